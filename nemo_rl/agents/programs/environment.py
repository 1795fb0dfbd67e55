"""The environment `agent`, which runs one program for each sample and rewards the program's result.

    metadata: row + `agent` ─► task ─► program ─► result ─► reward
                                                    └─ answer ─► grader ─► reward

A step is a whole episode, and the program has ended when the step returns. Invariant: a reward always comes from the
program or the grader, and any failure is the error of one sample. The key of a sample is neither in its metadata nor in
its answer or error.
"""

import asyncio
import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from nemo_rl.agents.dialects.images import as_requested
from nemo_rl.agents.programs.callables import CallableProgram, find_program
from nemo_rl.agents.programs.commands import CommandProgram
from nemo_rl.agents.programs.interfaces import (
    AGENT,
    CALL_REWARDS,
    AgentError,
    AgentProgram,
    AgentResult,
    AgentTask,
    key_of_start,
)
from nemo_rl.agents.programs.sandboxed import SandboxedCommand
from nemo_rl.agents.programs.service import ServiceProgram
from nemo_rl.config.schema.agents import AgentEnvironmentConfig, AgentKeys
from nemo_rl.config.schema.kits import GraderConfig
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn, EpisodeStart
from nemo_rl.environments.user_errors import describe
from nemo_rl.host.boundary import Boundary
from nemo_rl.kits.tools.grader import Grader, check_grader
from nemo_rl.kits.tools.vllm import CallParser, ReasoningReader, load_parsers
from nemo_rl.utils.errors import ConfigError, NemoRLError

if TYPE_CHECKING:
    from nemo_rl.data.interfaces import LLMMessageLogType, TokenizerType
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict


@dataclass(frozen=True)
class SampleGrade:
    """Rewards of one sample."""

    rewards: Mapping[str, float]
    """Reward of the sample under the name "", or one reward for each named component."""
    answer: str | None = None
    """Graded text."""
    row: Any = None
    """Metadata that the grader returned, or None without a grader."""


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

    async def grade(self, messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any], answer: str) -> SampleGrade:
        """Grade the answer to the messages of a prompt.

        Raises:
            AgentError: the grader returned no reward for the answer.
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
        return SampleGrade({name: float(column[0]) for name, column in columns.items()}, found, graded.metadata[0])

    async def post_process(
        self, batch: "BatchedDataDict[Any]", rows: list[Any]
    ) -> tuple["BatchedDataDict[Any]", dict[str, float | int]]:
        """Let the grader correct the rewards of B samples, given the `SampleGrade.row` of each, and compute metrics."""
        own = batch.copy()
        own["extra_env_info"] = rows
        processed: tuple[BatchedDataDict[Any], dict[str, float | int]] = await self._called(
            lambda: self._environment.post_process(own)
        )
        return processed

    async def shutdown(self) -> None:
        """Release the resources of the grader."""
        await self._called(self._environment.shutdown)
        self._threads.shutdown(wait=False)

    async def _called(self, call: Callable[[], Any]) -> Any:
        """Make a call on one of the grader's threads, and await the result on this event loop if it is a coroutine."""
        outcome = await asyncio.get_running_loop().run_in_executor(self._threads, call)
        return await outcome if inspect.iscoroutine(outcome) else outcome


_MAX_ERROR_CHARS = 2000

PLAYED = "played"
"""Key that a step adds to the metadata, for the program's seconds and metrics and the grader's metadata."""


class ProgramEnvironment(EnvironmentInterface[dict[str, Any]]):
    """Base class of environments that run a program for each sample.

    Args:
        program: object that starts the programs.
        timeout_s: time limit of one program in seconds.
        row_fields: fields of the row that a program gets, or None for all fields.
        grader: environment that rewards the answers, or None if the programs return rewards.
    """

    runs_agents: ClassVar[bool] = True
    reads_chat: ClassVar[bool] = True
    gives_answers: ClassVar[bool] = True
    continues_episodes: ClassVar[bool | None] = False

    def __init__(
        self,
        program: AgentProgram,
        timeout_s: float,
        row_fields: Sequence[str] | None = None,
        grader: AnswerGrader | None = None,
    ) -> None:
        self._program = program
        self._timeout_s = timeout_s
        self._row_fields = row_fields
        self._grader = grader

    async def step(  # type: ignore[override]  # may be a coroutine function
        self,
        message_log_batch: list["LLMMessageLogType"],
        metadata: list[dict[str, Any]],
        return_extracted_answer: bool = False,
    ) -> EnvironmentReturn[dict[str, Any]]:
        """Run the program of one sample (B is 1).

        Args:
            message_log_batch: B conversations, which are not read.
            metadata: B rows, with `agent`: `base_url`, `api_key`, `model`, `messages`, `tools` and `seed`.
            return_extracted_answer: Fill `answers`.
        """
        (given,) = metadata
        row = {name: value for name, value in given.items() if name != AGENT}
        task, started = self._task(given[AGENT], row), time.perf_counter()
        with Boundary(Exception) as caught:  # programs and graders are user code, and the key must not be logged
            result = _without_key(await self._program.run(task), task)
            graded = await self._graded(given[AGENT]["messages"], row, result)
        if caught:
            error = caught.take()
            has_reason = isinstance(error, AgentError | NemoRLError | OSError)
            return _failed(row, task, str(error) if has_reason else describe(error))
        played = {"seconds": time.perf_counter() - started, "metrics": dict(result.metrics), "row": graded.row}
        row |= {PLAYED: played, **({CALL_REWARDS: dict(result.call_rewards)} if result.call_rewards else {})}
        return _episode(row, graded, None, with_answer=return_extracted_answer)

    async def global_post_process_and_metrics(  # type: ignore[override]  # may be a coroutine function
        self, batch: "BatchedDataDict[Any]"
    ) -> tuple["BatchedDataDict[Any]", dict[str, float | int]]:
        """Average the metrics of the programs of B samples, and let the grader correct rewards and add its metrics.

        The data that `step` added may be missing in samples of rollout runners and in restored samples, if it is not
        plain data. Averages are over the samples that have this data. The grader is called only if no sample lacks it,
        because the grader corrects a batch as a whole.
        """
        given = [(metadata or {}).get(PLAYED) for metadata in batch["extra_env_info"]]
        played = [one for one in given if one is not None]
        metrics: dict[str, float | int] = {}
        if self._grader is not None and len(played) == len(given):
            batch, metrics = await self._grader.post_process(batch, [one["row"] for one in played])
        own = {name: _mean(one["metrics"].get(name) for one in played) for one in played for name in one["metrics"]}
        times = {"mean_program_s": _mean(one["seconds"] for one in played)} if played else {}
        return batch, {**metrics, **own, **times}

    async def shutdown(self) -> None:  # type: ignore[override]  # may be a coroutine function
        """Release the grader, and the resources that the programs share."""
        await self._program.shutdown()
        if self._grader is not None:
            await self._grader.shutdown()

    def _task(self, agent: Mapping[str, Any], row: Mapping[str, Any]) -> AgentTask:
        fields = list(row) if self._row_fields is None else self._row_fields
        return AgentTask(
            messages=as_requested(agent["messages"]),
            tools=agent.get("tools"),
            row={name: row[name] for name in fields if name in row},
            base_url=agent["base_url"],
            api_key=key_of_start(agent["api_key"], agent["start_secret"]),
            model=agent["model"],
            seed=agent["seed"],
            timeout_s=self._timeout_s,
        )

    async def _graded(
        self, messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any], result: AgentResult
    ) -> SampleGrade:
        """Return the program's reward, or the grader's reward for the program's answer."""
        if self._grader is not None:
            if result.answer is None:
                raise AgentError("the program returned no answer for env.agent.grader")
            return await self._grader.grade(messages, row, result.answer)
        if result.reward is None:
            raise AgentError("the program returned no reward, and env.agent.grader is null")
        return SampleGrade({"": result.reward}, result.answer)


class AgentEnvironment(ProgramEnvironment):
    """The environment `agent`.

    Args:
        cfg: the `env.agent` section (or its dict).

    Raises:
        ConfigError: the program or the grader cannot be used, or this machine does not support the sandbox.
    """

    pooled: ClassVar[bool] = True
    config_class: ClassVar[type | None] = AgentEnvironmentConfig

    def __init__(self, cfg: AgentEnvironmentConfig | Mapping[str, Any]) -> None:
        section = AgentEnvironmentConfig.of(cfg)
        grader = None if section.grader is None else AnswerGrader(section.grader)
        fields = [] if section.row_fields is None and section.command else section.row_fields
        super().__init__(program_of(section), section.timeout_s, fields, grader)

    @classmethod
    def check_section(cls, section: Mapping[str, Any], place: str, tokenizer: "TokenizerType | None" = None) -> None:
        """Check the program, its grader and its parsers (`EnvironmentInterface.check_section`)."""
        cfg = AgentEnvironmentConfig.of(section)
        if cfg.program is not None:
            find_program(cfg.program, cfg.kwargs)  # the user's class is constructed only in the environment's process
        else:
            program_of(cfg)
        check_grader(cfg.grader, f"{place}.grader", tokenizer)
        if tokenizer is not None:
            check_parsers(cfg, place, tokenizer)


def check_parsers(cfg: AgentKeys, place: str, tokenizer: "TokenizerType") -> None:
    """Check that the parsers of a section exist, and that they read the answers of the tokenizer's model.

    Args:
        place: key of the section, for messages.

    Raises:
        ConfigError: a plugin cannot be run, or a parser does not exist or cannot be used.
    """
    try:
        for file in filter(None, (cfg.tool_parser_plugin, cfg.reasoning_parser_plugin)):
            load_parsers(file)
        if cfg.tool_parser is not None:
            CallParser(cfg.tool_parser, tokenizer, [])
        if cfg.reasoning_parser is not None:
            ReasoningReader(cfg.reasoning_parser, tokenizer)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error


def program_of(cfg: AgentEnvironmentConfig) -> AgentProgram:
    """Return the object that starts the programs of a section.

    Raises:
        ConfigError: the program cannot be used, or this machine does not support the sandbox.
    """
    if cfg.program is not None:
        return CallableProgram(cfg.program, cfg.kwargs)
    if cfg.service is not None:
        return ServiceProgram(cfg.service)
    assert cfg.command is not None, "the section has one of the three"
    if cfg.sandbox == "none":
        return CommandProgram(cfg.command, cfg.environment, cfg.output_bytes)
    return SandboxedCommand(cfg)


def _episode(
    row: dict[str, Any], graded: SampleGrade, error: str | None, *, with_answer: bool = False
) -> EnvironmentReturn[dict[str, Any]]:
    rewards = {name: torch.tensor([value], dtype=torch.float64) for name, value in graded.rewards.items()}
    return EnvironmentReturn(
        observations=[{"role": "environment", "content": ""}],
        metadata=[row],
        next_stop_strings=[None],
        rewards=rewards.get("", rewards),
        terminateds=torch.ones(1, dtype=torch.bool),
        answers=[graded.answer] if with_answer else None,
        errors=[error],
    )


def _failed(row: dict[str, Any], task: AgentTask, error: str) -> EnvironmentReturn[dict[str, Any]]:
    """Return the result of a sample with an error."""
    return _episode(row, SampleGrade({"": 0.0}), task.without_key(error)[:_MAX_ERROR_CHARS])


def _without_key(result: AgentResult, task: AgentTask) -> AgentResult:
    """Return a result in whose texts the key is replaced."""

    def renamed(numbers: Mapping[str, float]) -> dict[str, float]:
        return {task.without_key(name): number for name, number in numbers.items()}

    answer = None if result.answer is None else task.without_key(result.answer)
    return replace(result, answer=answer, metrics=renamed(result.metrics), call_rewards=renamed(result.call_rewards))


def _mean(numbers: Iterable[float | None]) -> float:
    given = [number for number in numbers if number is not None]
    return sum(given) / max(len(given), 1)
