"""How many cores this process may use."""

import math
import os
from pathlib import Path

_CONTROL_GROUP = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Cores of this machine that the process may run on, or fewer where a control group limits their time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = map(int, _CONTROL_GROUP.read_text().split())
    except (OSError, ValueError):  # no control group, or one whose limit is "max"
        return cores
    return max(1, min(cores, math.ceil(quota / period)))
