"""Ask a judge with a limit of concurrency, attempts with backoff, a deadline, and a memory of its verdicts.

    reward() ──► memory ──► one task for each text ──► slot ──► request ──► verdict
                                  ▲   wait, double the wait  │ no answer, or none that can be read
                                  └──────────────────────────┘ at most max_attempts, until deadline_s

Samples with the same text share one task. Invariant: only verdicts are remembered, never errors; a task ends by its
deadline, which runs from its first request.
"""

import asyncio
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable

from nemo_rl.config.schema.judges import LLMJudgeConfig
from nemo_rl.kits.judges.interfaces import JudgeError, JudgeModel
from nemo_rl.kits.judges.meter import JudgeMeter
from nemo_rl.models.generation.remote.connection import pause_s

_SHOWN_CHARS = 200

type Reader = Callable[[str], float]
"""The judge's text -> the reward that it states, or a `JudgeError`."""


class Questions:
    """Asks a judge; for one event loop.

    Args:
        config: the section `env.llm_judge`.
        model: takes the requests.
        meter: counts them.
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
            read: reads the verdict.
            kind: tells equal prompts apart that are read in different ways.

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
        """Make requests until one gives a verdict."""
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
