"""Tune Python's garbage collector, and the handling of freed memory by the C library's allocator."""

import ctypes
import gc

_OLDEST_THRESHOLD = 1000
"""Number of collections of the middle generation (one per about 7,000 new objects) between two collections of all
objects. Python's own number is 10."""


def search_all_objects_rarely() -> None:
    """Search all objects a hundred times less often from now on, in a process with many permanent objects.

    Python searches all objects, including those of the imported libraries (0.3 s), each time that their number has
    grown by a quarter. Young objects are searched as often as before, so short-lived cycles are found soon. Others are
    found after about seven million new objects.
    """
    youngest, young, old = gc.get_threshold()
    gc.set_threshold(youngest, young, max(old, _OLDEST_THRESHOLD))


_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_MOST_THRESHOLD = 32 << 20
"""Largest block in bytes that glibc lets `M_MMAP_THRESHOLD` keep on the heap (half of `HEAP_MAX_SIZE`)."""
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Return free memory to the system now. From then on, keep freed blocks of up to 32 MiB for later allocations.

    By default glibc returns the top of the heap and each large block to the system, and gets them back page by page,
    cleared: 18,000 and 140,000 page faults of every training step on the CPU at 1 and 25 million parameters. After this
    call, a process keeps all memory that it has used. Only a process that repeats its work should call it, after its
    start.

    Returns:
        Whether the C library supports this.
    """
    libc = ctypes.CDLL(None)
    if not (hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt")):
        return False
    libc.malloc_trim(0)
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, _MOST_THRESHOLD) and libc.mallopt(_M_TRIM_THRESHOLD, _NEVER))


def share_one_heap() -> bool:
    """Let all threads that this process and its forks start from now on allocate from one heap.

    By default glibc gives each thread a heap of its own, in which another thread cannot use freed memory. An engine is
    built by one thread and gets new weights from another one, so that the memory of the first weights stayed unused:
    0.4 GB with 135 million parameters in float32.

    Returns:
        Whether the C library supports this.
    """
    libc = ctypes.CDLL(None)
    return hasattr(libc, "mallopt") and bool(libc.mallopt(_M_ARENA_MAX, 1))
