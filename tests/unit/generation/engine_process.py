"""A generation worker in a process of its own, with the environment its engine needs.

vLLM reads its environment at import and changes the process it runs in, so tests never import it
themselves. The real `GenerationWorker` runs over there; its coroutines are called one at a time.
"""

import asyncio
import multiprocessing
import os
import traceback
from functools import reduce
from multiprocessing.connection import Connection
from typing import Any, Self
from unittest import mock

from nemo_rl.models.generation.interfaces import EngineSettings, GenerationRequest, GenerationResult
from nemo_rl.models.generation.vllm.settings import engine_environment

ANSWER_TIMEOUT_S = 240.0
STOP = "stop"


class EngineProcess:
    """Hosts one worker for each settings; `name` chooses among them in calls."""

    def __init__(self, settings: dict[str, EngineSettings]):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, settings), daemon=True)
        with mock.patch.dict(os.environ, engine_environment("cpu") | {"RANK": "0", "HF_HUB_OFFLINE": "1"}):
            self._process.start()
        theirs.close()
        self._next_id = 0

    def call(self, name: str, method: str, *args: Any) -> Any:
        """One coroutine of a worker, or a dotted attribute; raises AssertionError with the traceback if it fails."""
        self._pipe.send((name, method, args))
        assert self._pipe.poll(ANSWER_TIMEOUT_S), f"no answer to {method}"
        kind, value = self._pipe.recv()
        assert kind == "value", value
        return value

    def generate(self, name: str, requests: list[GenerationRequest]) -> list[GenerationResult]:
        """Submit all at once and collect until the last is answered."""
        ids = [str(self._next_id + offset) for offset in range(len(requests))]
        self._next_id += len(requests)
        self.call(name, "submit", list(zip(ids, requests, strict=True)))
        results: dict[str, GenerationResult] = {}
        while len(results) < len(ids):
            results.update(self.call(name, "collect"))
        return [results[id_] for id_ in ids]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.is_alive():
            self._pipe.send((STOP, "", ()))
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection, settings: dict[str, EngineSettings]) -> None:
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
                found = reduce(getattr, method.split("."), workers[name])
                pipe.send(("value", await found(*args) if callable(found) else found))
            except Exception:
                pipe.send(("error", traceback.format_exc()))

    asyncio.run(serve())
