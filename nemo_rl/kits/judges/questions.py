"""Ask a judge with limited concurrency, retries with backoff, a deadline, and a cache of verdicts.

    reward() ──► memory ──► one task for each text ──► slot ──► request ──► verdict
                                  ▲   wait, double the wait  │ no answer, or none that can be read
                                  └──────────────────────────┘ at most max_attempts, until deadline_s

Samples with the same text share one task. Invariant: only verdicts are remembered, never errors. A task ends by its
deadline, which begins with its first request.
"""

import abc
import asyncio
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_rl.config.schema.judges import LLMJudgeConfig
from nemo_rl.models.generation.remote.connection import pause_s


class JudgeError(Exception):
    """Raised if a judge gave no verdict.

    Args:
        reason: what happened.
        may_pass: whether the same request may succeed at a later time.
        wait_s: waiting time in seconds that the endpoint requests.
    """

    def __init__(self, reason: str, *, may_pass: bool = True, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.may_pass = may_pass
        self.wait_s = wait_s


@dataclass(frozen=True)
class JudgeText:
    """Answer of a judge."""

    text: str
    """Text that the judge wrote."""
    prompt_tokens: int = 0
    """Number of tokens of the request, or 0 if the endpoint does not say."""
    completion_tokens: int = 0
    """Number of tokens of the answer, or 0 if the endpoint does not say."""
    is_complete: bool = True
    """Whether the judge itself ended the text. A text that the limit of tokens cut off has no verdict."""


class JudgeModel(abc.ABC):
    """Language model that judges.

    Args:
        config: the section `env.llm_judge`.
    """

    repeats_itself = False
    """Whether the same request always gets the same text, so that repeating the request is useless."""

    def __init__(self, config: LLMJudgeConfig) -> None:
        self._config = config

    def body(self, prompt: str) -> dict[str, Any]:
        """Return the request for a prompt, as the body of a chat completion."""
        config = self._config
        system = [] if config.system_prompt is None else [{"role": "system", "content": config.system_prompt}]
        return {
            "model": config.judge_name,
            "messages": [*system, {"role": "user", "content": prompt}],
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
        }

    @abc.abstractmethod
    async def ask(self, body: Mapping[str, Any], attempt: int = 0) -> JudgeText:
        """Send a request.

        Args:
            body: request that `body` returned.
            attempt: number of times that the request was sent before.

        Raises:
            JudgeError: the judge gave no text.
        """

    def close(self) -> None:  # noqa: B027  (optional hook)
        """Release the resources of the model."""


_MILLION = 1e6


@dataclass
class JudgeMeter:
    """Counts of the requests to a judge since the last call of `metrics`."""

    latencies_s: list[float] = field(default_factory=list)
    """Duration of each request in seconds."""
    num_retries: int = 0
    """Number of repeated requests for the same text."""
    num_failed: int = 0
    """Number of texts without a verdict."""
    num_from_memory: int = 0
    """Number of verdicts that were found without a separate request."""
    prompt_tokens: int = 0
    """Number of tokens of all requests."""
    completion_tokens: int = 0
    """Number of tokens of all answers."""

    def metrics(self, config: LLMJudgeConfig) -> dict[str, float | int]:
        """Return the metrics and reset all counts to 0."""
        counted = JudgeMeter(**vars(self))
        vars(self).update(vars(JudgeMeter()))
        latencies = sorted(counted.latencies_s)
        cost = (
            counted.prompt_tokens * config.price_per_million_prompt_tokens
            + counted.completion_tokens * config.price_per_million_completion_tokens
        ) / _MILLION
        return {
            "num_requests": len(latencies),
            "num_retries": counted.num_retries,
            "num_failed": counted.num_failed,
            "num_from_memory": counted.num_from_memory,
            "prompt_tokens": counted.prompt_tokens,
            "completion_tokens": counted.completion_tokens,
            "cost": cost,
            "latency_s_mean": sum(latencies) / max(len(latencies), 1),
            "latency_s_p95": latencies[int(0.95 * (len(latencies) - 1))] if latencies else 0.0,
            "latency_s_max": latencies[-1] if latencies else 0.0,
        }


_SHOWN_CHARS = 200

type Reader = Callable[[str], float]
"""Function that reads the reward in the judge's text, or raises a `JudgeError`."""


class Questions:
    """Ask a judge, on one event loop.

    Args:
        config: the section `env.llm_judge`.
        model: model that answers the requests.
        meter: counter of the requests.
    """

    def __init__(self, config: LLMJudgeConfig, model: JudgeModel, meter: JudgeMeter) -> None:
        self._config = config
        self._model = model
        self._meter = meter
        self._slots = asyncio.Semaphore(config.max_concurrency)
        self._remembered: OrderedDict[str, float] = OrderedDict()
        self._asking: dict[str, asyncio.Task[float]] = {}

    async def reward(self, prompt: str, read: Reader, kind: str = "") -> float:
        """Return the reward that the judge gives.

        Args:
            prompt: the question.
            read: function that reads the verdict.
            kind: text that distinguishes equal prompts whose answers are read in different ways.

        Raises:
            JudgeError: the judge gave no verdict.
        """
        body = self._model.body(prompt)
        key = hashlib.sha256(json.dumps([body, kind], sort_keys=True).encode()).hexdigest()
        if key in self._remembered:
            self._remembered.move_to_end(key)
            self._meter.num_from_memory += 1
            return self._remembered[key]
        task = self._asking.get(key)
        if task is None:
            task = asyncio.create_task(self._ask(body, read, key))
            self._asking[key] = task
        else:
            self._meter.num_from_memory += 1
        return await asyncio.shield(task)

    async def _ask(self, body: dict[str, object], read: Reader, key: str) -> float:
        try:
            reward = await self._attempts(body, read)
        except JudgeError:
            self._meter.num_failed += 1
            raise
        finally:
            del self._asking[key]
        if self._config.cache_size:
            self._remembered[key] = reward
            while len(self._remembered) > self._config.cache_size:
                self._remembered.popitem(last=False)
        return reward

    async def _attempts(self, body: dict[str, object], read: Reader) -> float:
        """Send a request until an answer has a verdict."""
        config, last, end = self._config, JudgeError("no request was made"), float("inf")
        for attempt in range(config.max_attempts):
            async with self._slots:
                now = time.monotonic()
                end = min(end, now + config.deadline_s)
                try:
                    async with asyncio.timeout(end - now):
                        return await self._one(body, read, attempt)
                except TimeoutError:
                    break
                except JudgeError as error:
                    last = error
            wait_s = pause_s(attempt, config.backoff_s, config.max_backoff_s, last.wait_s)
            if not last.may_pass or attempt + 1 == config.max_attempts:
                raise JudgeError(f"{last} (attempt {attempt + 1} of {config.max_attempts})", may_pass=False)
            if time.monotonic() + wait_s >= end:
                break
            self._meter.num_retries += 1
            await asyncio.sleep(wait_s)
        raise JudgeError(f"no verdict in {config.deadline_s:g} s (deadline_s); the last error: {last}", may_pass=False)

    async def _one(self, body: dict[str, object], read: Reader, attempt: int) -> float:
        started = time.perf_counter()
        try:
            answer = await self._model.ask(body, attempt)
        finally:
            self._meter.latencies_s.append(time.perf_counter() - started)
        self._meter.prompt_tokens += answer.prompt_tokens
        self._meter.completion_tokens += answer.completion_tokens
        try:
            if not answer.is_complete:
                raise JudgeError(
                    f"the judge was cut off after max_tokens={self._config.max_tokens} tokens, before its verdict. "
                    f"Raise env.llm_judge.max_tokens. It ends with {answer.text[-_SHOWN_CHARS:]!r}"
                )
            return read(answer.text)
        except JudgeError as error:
            raise JudgeError(str(error), may_pass=not self._model.repeats_itself) from None
