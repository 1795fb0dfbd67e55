"""The sender of weights to the engines of this folder's tests."""

from collections.abc import Iterator

import pytest
from speculating import SPEC

from nemo_rl.weight_sync.endpoints import WeightSender
from nemo_rl.weight_sync.lanes import Lane


@pytest.fixture(scope="module")
def sender() -> Iterator[WeightSender]:
    sender = WeightSender([Lane(SPEC)], rank=0, is_node_leader=True)
    yield sender
    sender.close()
