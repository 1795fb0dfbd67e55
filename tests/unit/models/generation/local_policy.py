"""A policy in the test's process, as the source of real weight streams."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from generation_helpers import streamed
from torch import nn
from transformers import PreTrainedModel

from nemo_rl.distributed.ranks.rendezvous import hold_port
from nemo_rl.distributed.workers.results import PendingCall
from nemo_rl.weight_sync.buckets import Bucket
from nemo_rl.weight_sync.endpoints import WeightSender
from nemo_rl.weight_sync.lanes import Lane
from nemo_rl.weight_sync.parts import WholeWeights


class LocalPolicy:
    """A policy of one rank in this process."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.weight_version = 1
        self.num_ranks = 1
        self.moves: list[str] = []
        self.num_streams = 0
        self._turn = threading.RLock()
        self._sender: WeightSender | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        assert self._turn.acquire(timeout=60)
        yield
        self._turn.release()

    def train(self, new: nn.Module, half_way: Callable[[], None]) -> None:
        """Change the weights in two halves, with a callback in between."""
        with self.held(), torch.no_grad():
            pairs = list(zip(self.model.parameters(), new.parameters(), strict=True))
            for number, (own, given) in enumerate(pairs):
                if number == len(pairs) // 2:
                    half_way()
                own.copy_(given)
            self.weight_version += 1

    def begin_weight_stream(self, lanes: list[Lane]) -> list[PendingCall]:
        self.num_streams += 1
        if self._sender is None or self._sender.lanes != lanes:
            self._sender = WeightSender(lanes, rank=0, is_node_leader=True)
        model = self.model
        tensors = streamed(model) if isinstance(model, PreTrainedModel) else model.state_dict()
        self._sender.begin(WholeWeights(tensors.items))
        return []

    def next_weight_buckets(self) -> list[Bucket]:
        assert self._sender is not None
        return self._sender.next_buckets()

    def send_weight_bucket(self, bucket: Bucket) -> list[PendingCall]:
        assert self._sender is not None
        self._sender.send(bucket)
        return []

    def meeting_point(self, rank: int) -> tuple[str, int]:
        return hold_port("127.0.0.1", None, None)

    def offload_optimizer(self) -> None:
        self.moves.append("offload")

    def onload_optimizer(self) -> None:
        self.moves.append("onload")
