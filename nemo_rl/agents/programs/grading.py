"""Let another environment grade the answer of a program, in an episode of its own that has one turn."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_rl.agents.programs.interfaces import AgentError
from nemo_rl.config.schema.kits import GraderConfig
from nemo_rl.environments.interfaces import EnvironmentReturn, EpisodeStart
from nemo_rl.kits.tools.grader import Grader

if TYPE_CHECKING:
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict


@dataclass(frozen=True)
class Grade:
    """The rewards of one sample."""

    rewards: Mapping[str, float]
    """Its reward under the name "", or one for each named component."""
    answer: str | None = None
    """The graded text."""
    row: Any = None
    """Metadata of the grader's turn; None without a grader."""


class AnswerGrader:
    """An environment that grades answers.

    Args:
        config: name of the environment, and its section.

    Raises:
        ConfigError: there is no such environment, or its section is wrong.
    """

    def __init__(self, config: GraderConfig) -> None:
        self._environment = Grader(config)
        self._threads = ThreadPoolExecutor(self._environment.concurrency, "grader")

    async def grade(self, messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any], answer: str) -> Grade:
        """Grade the answer to the messages of a prompt.

        Raises:
            AgentError: the grader has no reward for it.
        """
        environment = self._environment
        start: EpisodeStart[Any] = await self._called(lambda: environment.open_episode(dict(row)))
        if start.error is not None:
            raise AgentError(f"the grader failed: {start.error}")
        log: Any = [*messages, {"role": "assistant", "content": answer}]
        try:
            graded: EnvironmentReturn[Any] = await self._called(lambda: environment.step(log, start.metadata))
        finally:
            await self._called(lambda: environment.close_episode(start.metadata))
        error = graded.errors[0] if graded.errors is not None else None
        if error is not None:
            raise AgentError(f"the grader failed: {error}")
        columns = graded.rewards if isinstance(graded.rewards, dict) else {"": graded.rewards}
        found = graded.answers[0] if graded.answers is not None else answer
        return Grade({name: float(column[0]) for name, column in columns.items()}, found, graded.metadata[0])

    async def post_process(
        self, batch: "BatchedDataDict[Any]", rows: list[Any]
    ) -> tuple["BatchedDataDict[Any]", dict[str, float | int]]:
        """Let the grader correct the rewards of B samples, whose `Grade.row` are given, and compute metrics."""
        own = batch.copy()
        own["extra_env_info"] = rows
        processed: tuple[BatchedDataDict[Any], dict[str, float | int]] = await self._called(
            lambda: self._environment.post_process(own)
        )
        return processed

    async def shutdown(self) -> None:
        """Release what the grader holds."""
        await self._called(self._environment.shutdown)
        self._threads.shutdown(wait=False)

    async def _called(self, call: Callable[[], Any]) -> Any:
        """Make a call on one of the grader's threads; a coroutine continues here."""
        outcome = await asyncio.get_running_loop().run_in_executor(self._threads, call)
        return await outcome if inspect.iscoroutine(outcome) else outcome
