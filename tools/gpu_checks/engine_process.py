"""The other half of a weight sync: a generation worker in a process of its own, as a Ray actor would host it."""

import asyncio
import multiprocessing
import os
import traceback
from multiprocessing.connection import Connection
from typing import Any

from nemo_rl.models.generation.interfaces import EngineSettings

ANSWER_TIMEOUT_S = 45.0


class EngineProcess:
    """Hosts a `GenerationWorker`; calls run its methods over there.

    Attributes:
        settings: of the worker.
    """

    def __init__(self, settings: EngineSettings):
        self.settings = settings
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, settings), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, method: str, *args: Any) -> None:
        """Start a call; `answer` gives its result."""
        self._pipe.send((method, args))

    def answer(self) -> Any:
        """Result of the oldest call that was not answered yet.

        Raises:
            RuntimeError: the call raised over there, or no answer came in time.
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
        """End the process; it holds nothing that is worth an orderly end."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe: Connection, settings: EngineSettings) -> None:
    """Body of the process: make the worker, then run one method after another on one event loop."""
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
