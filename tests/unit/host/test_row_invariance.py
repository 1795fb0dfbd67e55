"""After `compute_rows_alike`, the bits of a row depend neither on other rows nor on the number of threads."""

import json
import os
import subprocess
import sys

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


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_bits_of_many_rows_and_one_thread(threads: int) -> None:
    """Matrix products of a process can be replaced only once, so another process does it."""
    done = subprocess.run(
        [sys.executable, "-c", SOURCE, str(threads)],
        env=os.environ | {"OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    before, after, has_parts, parts_are_whole = json.loads(done.stdout)
    assert before > 0 and after == 0
    assert has_parts and not parts_are_whole
