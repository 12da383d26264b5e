"""Which of several servers a key lies on: consistent hashing, so that most keys stay when a server comes or goes.

Each has points on a circle of 2**64 places, and a key lies on the server whose point comes next behind its own place.
Of n servers one more takes a share of 1 / (n + 1) of the keys, and no key moves between two that were there before.
Rule: the order in which servers are written changes nothing, so all nodes agree however they write them.
"""

import bisect
import hashlib
from collections.abc import Sequence

# With so many of each the fullest of ten servers has a tenth more keys than the mean, or less; 1.5 ms for two of them.
POINTS = 512


class Ring:
    """`servers` are told apart by their names, and none is there twice."""

    def __init__(self, servers: Sequence[str], points: int = POINTS) -> None:
        assert servers
        assert len(set(servers)) == len(servers)
        placed = sorted((_place(f"{server}#{point}".encode()), server) for server in servers for point in range(points))
        self._places = [place for place, _ in placed]
        self._servers = [server for _, server in placed]

    def find(self, key: bytes) -> str:
        # Behind the last point comes the first.
        return self._servers[bisect.bisect(self._places, _place(key)) % len(self._servers)]


def _place(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
