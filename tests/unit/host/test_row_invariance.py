"""After `compute_rows_alike`, the bits of a row depend neither on other rows nor on the number of threads."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

SOURCE = """
import json, sys, torch
from nemo_rl.host.row_invariance import compute_rows_alike, linear_in_parts

torch.manual_seed(0)
left, right = torch.randn(64, 96), torch.randn(48, 96)
products = lambda: [left[:rows] @ right.T for rows in range(1, 41)]
torch.set_num_threads(1)
usual = left @ right.T
torch.set_num_threads(int(sys.argv[1]))
before = products()
compute_rows_alike(parts=2)
others = lambda found: sum(not torch.equal(each, usual[: len(each)]) for each in found)
halves = left[:, :48] @ right[:, :48].T + left[:, 48:] @ right[:, 48:].T
found = [others(before), others(products())]
print(json.dumps([*found, torch.equal(linear_in_parts(left[:5], right), halves[:5]), torch.equal(halves, usual)]))
"""

OF_ONE_COLUMN = """
import json, sys, torch
from torch.nn.functional import linear
from nemo_rl.host.row_invariance import compute_rows_alike

torch.manual_seed(0)
left, right, bias = torch.randn(64, 96), torch.randn(1, 96), torch.randn(1)

def others():
    found = 0
    for summand in (None, bias):
        torch.set_num_threads(1)
        whole = linear(left, right, summand)
        torch.set_num_threads(int(sys.argv[1]))
        found += sum(not torch.equal(linear(left[:rows], right, summand), whole[:rows]) for rows in range(1, 65))
    return found

before = others()
compute_rows_alike()
difference = (linear(left, right, bias) - linear(left.double(), right.double(), bias.double())).abs().max()
print(json.dumps([before, others(), difference.item()]))
"""


def printed(source: str, threads: int) -> list[Any]:
    """Return what a program prints. Matrix products of a process can be replaced only once, so it has its own."""
    done = subprocess.run(
        [sys.executable, "-c", source, str(threads)],
        env=os.environ | {"OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_bits_of_many_rows_and_one_thread(threads: int) -> None:
    before, after, has_parts, parts_are_whole = printed(SOURCE, threads)
    assert before > 0 and after == 0
    assert has_parts and not parts_are_whole


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_of_one_column_does_not_depend_on_others(threads: int) -> None:
    before, after, difference = printed(OF_ONE_COLUMN, threads)
    assert before > 0 and after == 0
    assert difference < 1e-5
