"""Run the receiving side of a weight sync: a generation worker in a separate process, like a Ray actor."""

import asyncio
import multiprocessing
import os
import traceback
from multiprocessing.connection import Connection
from typing import Any

from nemo_rl.models.generation.interfaces import EngineSettings

ANSWER_TIMEOUT_S = 45.0


class EngineProcess:
    """Hosts a `GenerationWorker`; calls run its methods in the other process.

    Attributes:
        settings: settings of the worker.
    """

    def __init__(self, settings: EngineSettings):
        self.settings = settings
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, settings), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, method: str, *args: Any) -> None:
        """Start a call; `answer` returns its result."""
        self._pipe.send((method, args))

    def answer(self) -> Any:
        """Return the result of the oldest unanswered call.

        Raises:
            RuntimeError: the call raised in the other process, or no answer came in time.
        """
        if not self._pipe.poll(ANSWER_TIMEOUT_S):
            raise RuntimeError(f"the engine's process did not answer within {ANSWER_TIMEOUT_S:.0f} s")
        kind, value = self._pipe.recv()
        if kind == "raised":
            raise RuntimeError(f"in the engine's process: {value}")
        return value

    def call(self, method: str, *args: Any) -> Any:
        """Run one method."""
        self.send(method, *args)
        return self.answer()

    def close(self) -> None:
        """Kill the process; it has no state that needs an orderly end."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe: Connection, settings: EngineSettings) -> None:
    """Run the process: make the worker, then run one method after another on one event loop."""
    os.environ["RANK"] = "0"
    from transformers.utils import logging as transformers_logging

    from nemo_rl.models.generation.worker import GenerationWorker

    transformers_logging.disable_progress_bar()
    with asyncio.Runner() as loop:
        worker: GenerationWorker | None = None
        while True:
            method, args = pipe.recv()
            try:
                if worker is None:
                    worker = GenerationWorker(settings)
                pipe.send(("value", loop.run(getattr(worker, method)(*args))))
            except Exception as error:
                pipe.send(("raised", f"{error!r}\n{traceback.format_exc()}"))
