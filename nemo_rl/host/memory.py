"""Measure the memory that this machine has for a run."""

import os
from pathlib import Path

_CONTROL_GROUP = Path("/sys/fs/cgroup/memory.max")


def machine_bytes() -> int:
    """Return the machine's memory in bytes, or less if a control group limits it."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(installed, int(_CONTROL_GROUP.read_text()))
    except (OSError, ValueError):  # no control group, or one whose limit is "max"
        return installed
