"""Measure the cores and the memory that this machine has for a run, with the limits of its control group."""

import math
import os
from pathlib import Path

_CORES_OF_GROUP = Path("/sys/fs/cgroup/cpu.max")
_MEMORY_OF_GROUP = Path("/sys/fs/cgroup/memory.max")


def usable_cores() -> int:
    """Return the number of cores this process may run on, or fewer if a control group limits its CPU time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = map(int, _CORES_OF_GROUP.read_text().split())
    except (OSError, ValueError):  # no control group, or one whose limit is "max"
        return cores
    return max(1, min(cores, math.ceil(quota / period)))


def machine_bytes() -> int:
    """Return the machine's memory in bytes, or less if a control group limits it."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(installed, int(_MEMORY_OF_GROUP.read_text()))
    except (OSError, ValueError):  # no control group, or one whose limit is "max"
        return installed
