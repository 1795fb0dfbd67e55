"""Run a generation worker in a separate process, with the environment its engine needs.

vLLM reads its environment at import and changes the process it runs in, so tests never import it
themselves. The real `GenerationWorker` runs in that process, on the kind of loop that Ray gives its actors; its
coroutines are called one at a time.
"""

import asyncio
import inspect
import multiprocessing
import os
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Self
from unittest import mock

from ray._private.async_compat import get_new_event_loop

from nemo_rl.models.generation.engine_load import EngineLoad
from nemo_rl.models.generation.interfaces import EngineSettings, GenerationRequest, GenerationResult
from nemo_rl.models.generation.vllm.settings import engine_environment
from nemo_rl.weight_sync.endpoints import WeightSender
from nemo_rl.weight_sync.parts import HeldWeights
from nemo_rl.weight_sync.transport import TransportSpec
from nemo_rl.weight_sync.verify import SyncReceipt

ANSWER_TIMEOUT_S = 240.0
STOP = "stop"
LOOK = "look"


class EngineProcess:
    """Hosts one worker for each settings; `name` chooses among them in calls.

    `rank`, `port` and `machine` are for a worker of an engine with several: its rank, their rendezvous port on this
    machine, and the machine of the run on which it believes to be. `processor` replaces torch's answers about this
    processor in that process, by the names of the functions of `torch.cpu` that give them.
    """

    def __init__(
        self,
        settings: dict[str, EngineSettings],
        rank: int = 0,
        port: int = 0,
        machine: int = 0,
        processor: Mapping[str, bool] | None = None,
    ):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, settings, dict(processor or {})), daemon=True)
        own = {"RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "HF_HUB_OFFLINE": "1"}
        own["NODE_RANK"] = str(machine)
        with mock.patch.dict(os.environ, engine_environment("cpu") | own):
            self._process.start()
        theirs.close()
        self._next_id = 0
        self.settings = settings
        self.loads: defaultdict[str, list[EngineLoad | None]] = defaultdict(list)
        """Loads that `generate` was told, by name."""

    def start(self, name: str, method: str, *args: Any) -> None:
        """Start a coroutine of a worker without waiting; `answer` waits for it."""
        self._pipe.send((name, method, args))

    def answer(self, method: str) -> Any:
        """Return the result of the oldest call; raise AssertionError with the traceback if it failed."""
        assert self._pipe.poll(ANSWER_TIMEOUT_S), f"no answer to {method}"
        kind, value = self._pipe.recv()
        assert kind == "value", value
        return value

    def call(self, name: str, method: str, *args: Any) -> Any:
        """Run one coroutine of a worker; raise AssertionError with the traceback if it fails."""
        self.start(name, method, *args)
        return self.answer(method)

    def generate(self, name: str, requests: list[GenerationRequest]) -> list[GenerationResult]:
        """Submit all at once and collect until the last is answered."""
        ids = [str(self._next_id + offset) for offset in range(len(requests))]
        self._next_id += len(requests)
        self.call(name, "submit", list(zip(ids, requests, strict=True)))
        results: dict[str, GenerationResult] = {}
        while len(results) < len(ids):
            found, load = self.call(name, "collect")
            results.update(found)
            self.loads[name].append(load)
        return [results[id_] for id_ in ids]

    def sync(
        self, name: str, sender: WeightSender, spec: TransportSpec, weights: HeldWeights, version: int
    ) -> list[str]:
        """Send weights to a worker in one weight sync; return parameters that got no tensor or hold other values."""
        receipt = self.receipt(name, sender, spec, weights, version)
        return receipt.unbound + receipt.altered

    def receipt(
        self, name: str, sender: WeightSender, spec: TransportSpec, weights: HeldWeights, version: int
    ) -> SyncReceipt:
        """Send weights to a worker in one weight sync, and return its receipt."""
        self.call(name, "begin_weight_update", spec, version)
        sender.begin(weights)
        is_last = False
        while not is_last:
            bucket = sender.next_buckets()[0]
            self.call(name, "receive_bucket", bucket)
            is_last = bucket.is_last
        receipt: SyncReceipt = self.call(name, "finish_weight_update", version)
        return receipt

    def look(self, name: str, at: Callable[..., Any], *args: Any) -> Any:
        """Return what a function or coroutine function of an importable module reports about a worker's engine."""
        return self.call(name, LOOK, at, *args)

    def wait_until_gone(self, timeout_s: float) -> bool:
        """Return whether the process exits by itself in time."""
        self._process.join(timeout_s)
        return not self._process.is_alive()

    def kill(self) -> None:
        """Kill the process as the kernel does without memory, and wait until it is gone."""
        self._process.kill()
        self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._pipe.send((STOP, "", ()))
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection, settings: dict[str, EngineSettings], processor: dict[str, bool]) -> None:
    import torch

    for name, has_it in processor.items():
        assert callable(getattr(torch.cpu, name)), name
        setattr(torch.cpu, name, partial(bool, has_it))
    from nemo_rl.models.generation.worker import GenerationWorker

    async def serve() -> None:
        workers = {}
        while True:
            name, method, args = await asyncio.to_thread(pipe.recv)
            if name == STOP:
                return
            try:
                if name not in workers:
                    workers[name] = GenerationWorker(settings[name])
                if method == LOOK:
                    found = args[0](workers[name]._engine, *args[1:])
                    pipe.send(("value", await found if inspect.isawaitable(found) else found))
                else:
                    pipe.send(("value", await getattr(workers[name], method)(*args)))
            except Exception:
                pipe.send(("error", traceback.format_exc()))

    get_new_event_loop().run_until_complete(serve())
    os._exit(0)  # vLLM's finalizers collect garbage for seconds for each engine, and the exit frees everything anyway
