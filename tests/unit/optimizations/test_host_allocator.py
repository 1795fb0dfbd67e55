"""Freed memory stays with a process that requests it."""

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
