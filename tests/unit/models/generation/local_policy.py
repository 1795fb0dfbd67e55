"""A policy in the test's process, as the source of real weight streams."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from generation_helpers import streamed
from torch import nn
from transformers import PreTrainedModel

from nemo_rl.distributed.workers.results import PendingCall
from nemo_rl.weight_sync.buckets import Bucket
from nemo_rl.weight_sync.endpoints import WeightSender
from nemo_rl.weight_sync.transport import TransportSpec


class LocalPolicy:
    """A policy of one rank in this process."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.weight_version = 1
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

    def begin_weight_stream(self, spec: TransportSpec) -> list[PendingCall]:
        self.num_streams += 1
        self._sender = self._sender or WeightSender(spec, rank=0, is_node_leader=True)
        model = self.model
        self._sender.begin((streamed(model) if isinstance(model, PreTrainedModel) else model.state_dict()).items())
        return []

    def next_weight_bucket(self) -> Bucket:
        assert self._sender is not None
        return self._sender.next_bucket()

    def send_weight_bucket(self, bucket: Bucket) -> list[PendingCall]:
        return []

    def meeting_point(self) -> tuple[str, int]:
        raise AssertionError("shared memory needs no meeting point")

    def offload_optimizer(self) -> None:
        self.moves.append("offload")

    def onload_optimizer(self) -> None:
        self.moves.append("onload")
