"""A second process that answers calls, for tests of transports: the other half of a sync.

Processes are forked, so that a test costs milliseconds; each child uses one thread, because OpenMP's
thread pool does not survive a fork.
"""

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Self

import torch

from nemo_rl.weight_sync.buckets import Bucket
from nemo_rl.weight_sync.endpoints import WeightReceiver
from nemo_rl.weight_sync.transport import TransportSpec
from nemo_rl.weight_sync.verify import SyncReceipt

ANSWER_TIMEOUT_S = 30.0
STOP = "stop"


class RemoteFailure(Exception):
    """An exception of a child; the text holds its traceback."""


class Child:
    """Hosts the object that `factory` makes; `call` runs one of its methods over there."""

    def __init__(self, factory: Callable[..., Any], *args: Any, start_method: str = "fork"):
        context = multiprocessing.get_context(start_method)
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, factory, args), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, method: str, *args: Any) -> None:
        self._pipe.send((method, args))

    def answer(self) -> Any:
        assert self._pipe.poll(ANSWER_TIMEOUT_S), "no answer"
        kind, value = self._pipe.recv()
        if kind == "error":
            raise RemoteFailure(value)
        return value

    def call(self, method: str, *args: Any) -> Any:
        self.send(method, *args)
        return self.answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.is_alive():
            self.send(STOP)
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(pipe: Connection, factory: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    host: Any = None
    while True:
        try:
            method, call_args = pipe.recv()
        except EOFError:
            return
        if method == STOP:
            return
        try:
            if host is None:
                host = factory(*args)
            pipe.send(("value", getattr(host, method)(*call_args)))
        except Exception:
            pipe.send(("error", traceback.format_exc()))


class ReceivingEngine:
    """A fake engine that keeps references to its input, as a real one may."""

    def __init__(self, spec: TransportSpec, index: int, device: str = "cpu"):
        if device != "cpu":
            torch.cuda.set_device(device)
        self._receiver = WeightReceiver(spec, index, f"engine {index}")
        self._weights: dict[str, torch.Tensor] = {}

    def ready(self) -> bool:
        return True

    def begin(self, version: int) -> None:
        self._weights = {}
        self._receiver.begin(version)

    def receive(self, bucket: Bucket) -> None:
        with self._receiver.received(bucket) as tensors:
            self._weights.update(tensors)

    def finish(self) -> SyncReceipt:
        return self._receiver.finish(unbound=[])

    def weights(self) -> dict[str, torch.Tensor]:
        # numpy is piped by value, a torch tensor would be sent by shared memory
        return {name: _as_numpy(tensor) for name, tensor in self._weights.items()}

    def close(self) -> None:
        self._receiver.close()


def _as_numpy(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().cpu()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()


def equal_to_sent(received: dict[str, Any], sent: dict[str, torch.Tensor]) -> bool:
    """Return whether all tensors arrived, bit for bit."""
    return received.keys() == sent.keys() and all(
        (received[name].tobytes(), received[name].shape) == (_as_numpy(value).tobytes(), tuple(value.shape))
        for name, value in sent.items()
    )
