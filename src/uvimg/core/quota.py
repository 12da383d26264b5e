"""How many cores there are for a process: those that it may run on, or fewer by a control group's quota.

A container with half of a machine's CPU time sees all of its cores. As many workers as these would be stopped by the
kernel in the middle of each period, all together.
"""

import math
from collections.abc import Iterable


def count_cores(allowed: int, quotas: Iterable[str]) -> int:
    """`quotas` are written as in cgroup v2's cpu.max: microseconds or "max", and the period's. A part counts whole."""
    cores = float(allowed)
    for quota in quotas:
        try:
            share, period = (int(word) for word in quota.split())
        except ValueError:
            # "max …", or nothing that we know.
            continue
        if share > 0 and period > 0:
            cores = min(cores, share / period)
    return max(1, math.ceil(cores))
