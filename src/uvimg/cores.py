"""The cores that this process may use, as the kernel tells them.

Surprise: the groups above one's own have quotas too, and inside of a container their paths may not be there to see.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from uvimg.core.quota import count_cores


def usable_cores(proc: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """One for each worker that can work at the same time."""
    return count_cores(len(os.sched_getaffinity(0)), _quotas(proc, groups))


def _quotas(proc: Path, groups: Path) -> Iterator[str]:
    """Those of this process's control group and of all above it, in both versions, as version 2 writes them."""
    for line in _read(proc).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = groups / "cpu" if controllers else groups
        folder = root / path.strip("/")
        for place in (folder, *folder.parents):
            if not place.is_relative_to(root):
                break
            if controllers:
                yield f"{_read(place / 'cpu.cfs_quota_us')} {_read(place / 'cpu.cfs_period_us')}"
            else:
                yield _read(place / "cpu.max")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
