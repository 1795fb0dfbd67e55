"""Count the cores that this process may use."""

import math
import os
from pathlib import Path

_CONTROL_GROUP = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Return the number of cores this process may run on, or fewer if a control group limits its CPU time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = map(int, _CONTROL_GROUP.read_text().split())
    except (OSError, ValueError):  # no control group, or one whose limit is "max"
        return cores
    return max(1, min(cores, math.ceil(quota / period)))
