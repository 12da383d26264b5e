"""How many workers there are where nobody says."""

import os
from pathlib import Path

import pytest

from uvimg.core.quota import count_cores
from uvimg.cores import usable_cores


@pytest.mark.parametrize(
    ("allowed", "quotas", "cores"),
    [
        (8, [], 8),
        (8, ["max 100000"], 8),
        (8, ["200000 100000\n"], 2),
        (8, ["150000 100000"], 2),
        (8, ["10000 100000"], 1),
        (2, ["800000 100000"], 2),
        (8, ["max 100000", "400000 100000", "max 100000", "300000 100000"], 3),
        (8, ["-1 100000", "", " ", "rubbish", "1 2 3", "100000 0"], 8),
    ],
)
def test_a_quota_counts_where_it_is_less_than_the_cores(allowed: int, quotas: list[str], cores: int) -> None:
    assert count_cores(allowed, quotas) == cores


def test_quotas_of_the_groups_above_and_of_both_versions_are_found(tmp_path: Path) -> None:
    proc, groups = tmp_path / "cgroup", tmp_path / "groups"
    inner = groups / "pod" / "container"
    inner.mkdir(parents=True)
    proc.write_text("0::/pod/container\n")
    allowed = len(os.sched_getaffinity(0))
    (inner / "cpu.max").write_text("max 100000\n")
    assert usable_cores(proc, groups) == allowed
    (inner.parent / "cpu.max").write_text("50000 100000\n")
    assert usable_cores(proc, groups) == 1
    old = groups / "cpu" / "docker"
    old.mkdir(parents=True)
    proc.write_text("5:memory:/x\n4:cpu,cpuacct:/docker/gone\n")
    assert usable_cores(proc, groups) == allowed
    (old / "cpu.cfs_quota_us").write_text("100000\n")
    (old / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(proc, groups) == 1
    assert usable_cores(tmp_path / "none", groups) == allowed
