"""Freed memory stays with a process that requests it, and every thread of a worker can use it."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource, sys
import torch
from nemo_rl.optimizations.process_tuning import keep_freed_memory

def use(num_blocks):
    blocks = [torch.ones(8 << 18) for _ in range(num_blocks)]  # 8 MiB each

def faults(rounds):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        use(8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

ctypes.CDLL(None).mallopt(-3, 128 << 10)  # where glibc begins, before it adapts to what it sees
if sys.argv[1] == "keep":
    assert keep_freed_memory()
faults(5)
print(faults(40))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives memory back so eagerly")
def test_freed_memory_is_reused_without_new_page_faults() -> None:
    faults, faults_kept = (
        int(subprocess.check_output([sys.executable, "-c", PROGRAM, mode], text=True)) for mode in ("plain", "keep")
    )
    pages_of_a_round = 8 * (8 << 20) // 4096
    assert faults > 30 * pages_of_a_round
    assert faults_kept < 0.01 * pages_of_a_round


PROGRAM_OF_THREADS = """
import ctypes, sys, threading
from pathlib import Path
from nemo_rl.optimizations.process_tuning import share_one_heap

def use(num_blocks):
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [libc.malloc(3 << 20) for _ in range(num_blocks)]
    for block in blocks:
        ctypes.memset(block, 1, 3 << 20)
    for block in blocks:
        libc.free(block)

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

if sys.argv[1] == "share":
    assert share_one_heap()
ctypes.CDLL(None).mallopt(-3, 32 << 20)  # blocks on the heap
ctypes.CDLL(None).mallopt(-1, 2**31 - 1)  # which keeps what is freed
use(40)
before = resident()
thread = threading.Thread(target=use, args=(40,))
thread.start()
thread.join()
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has a heap for each thread")
def test_a_thread_uses_what_another_one_has_freed() -> None:
    growth, growth_shared = (
        int(subprocess.check_output([sys.executable, "-c", PROGRAM_OF_THREADS, mode], text=True))
        for mode in ("plain", "share")
    )
    assert growth_shared < 8 << 20
    assert growth > 40 << 20, "else the setting has no purpose"
