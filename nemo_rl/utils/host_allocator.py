"""How this process's allocator deals with memory that was freed."""

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MOST_THRESHOLD = 32 << 20
"""The largest block that glibc lets `M_MMAP_THRESHOLD` keep on the heap (half of `HEAP_MAX_SIZE`), in bytes."""
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Give back what is free now, and from then on keep freed blocks of up to 32 MiB for the next allocation.

    glibc returns the top of the heap and each large block to the system and gets it back page by page, cleared: at 1
    and 25 million parameters, 18,000 and 140,000 page faults of every training step on the CPU. Memory that
    a process has used once stays its own, so call this in a process that repeats its work, when its start is over.

    Returns:
        Whether the C library is one that can.
    """
    libc = ctypes.CDLL(None)
    if not (hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt")):
        return False
    libc.malloc_trim(0)
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, _MOST_THRESHOLD) and libc.mallopt(_M_TRIM_THRESHOLD, _NEVER))
