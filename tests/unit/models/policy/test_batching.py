"""Numbers of rows that divide into global batches."""

import re
from typing import Any

import pytest
import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy.batching import global_batches
from nemo_rl.utils.errors import DataError

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(("count", "size", "nearest"), [(7, 6, "6, 12"), (3, 6, "6"), (13, 5, "10, 15")])
def test_the_nearest_numbers_of_rows_that_divide_are_proposed(count: int, size: int, nearest: str) -> None:
    rows: Any = BatchedDataDict(input_ids=torch.ones(count, 2), input_lengths=torch.full((count,), 2))
    with pytest.raises(DataError, match=re.escape(f"Nearest numbers of rows: {nearest}; or")):
        global_batches(rows, size, allow_partial=False)
    parts = [part.size for part in global_batches(rows, size, allow_partial=True)]
    assert parts == [size] * (count // size) + [count % size]
