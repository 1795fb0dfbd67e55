"""Engines, environments and a trainer that only take time, for a simulation of overlap."""

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from virtual_time import VirtualLoop

from nemo_rl.data.interfaces import Message
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EpisodeStart, StepResult
from nemo_rl.losses.loss_function import AnyLossFunction
from nemo_rl.models.generation.interfaces import GenerationInterface, GenerationRequest, GenerationResult, VersionSpan
from nemo_rl.models.policy.interfaces import TrainResult


@dataclass(frozen=True)
class LogNormal:
    """A log-normal distribution.

    Attributes:
        mean: its mean; with 0 every value is 0.
        sigma: deviation of the logarithm; with 0 every value is the mean.
    """

    mean: float
    sigma: float

    def draw(self, *name: object) -> float:
        """Return the value of a name: the same name has the same value in every run."""
        if self.mean == 0:
            return 0.0
        deviation = random.Random(repr(name)).gauss(0.0, self.sigma)
        return float(self.mean * np.exp(deviation - self.sigma**2 / 2))


@dataclass(frozen=True)
class EngineSpeed:
    """Time that an engine takes.

    Attributes:
        step_s: seconds of a decoding step, whatever the batch: the weights are read once.
        step_s_per_request: further seconds for each running request, whose keys and values are read.
        read_tokens_per_s: tokens per second of which keys and values are computed again after a weight update.
        most_running: requests that decode at the same time; others wait.
    """

    step_s: float
    step_s_per_request: float
    read_tokens_per_s: float
    most_running: int


@dataclass(order=True)
class _Request:
    end: float
    """`_Engine.written` when it has all its tokens."""
    number: int
    begin: float
    num_prompt_tokens: int
    done: Any


class _Engine:
    """One engine: all running requests get a token in each decoding step, whose length depends on their number."""

    def __init__(self, loop: VirtualLoop, speed: EngineSpeed, scale: int):
        self._loop, self._speed, self._scale = loop, speed, scale
        self._running: list[_Request] = []
        self._waiting: deque[_Request] = deque()
        self._written = 0.0
        """Tokens that a request would have that runs since the start."""
        self._since = 0.0
        self._is_paused = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_open(self) -> int:
        return len(self._running) + len(self._waiting)

    @property
    def _seconds_per_token(self) -> float:
        return self._speed.step_s + self._speed.step_s_per_request * len(self._running)

    async def write(self, number: int, num_prompt_tokens: int, num_tokens: int) -> None:
        """Return when a request has its tokens."""
        self._note_progress()
        request = _Request(num_tokens, number, 0.0, num_prompt_tokens, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._continue()
        await request.done

    def pause(self) -> None:
        """Stop to decode: new weights arrive."""
        self._note_progress()
        self._is_paused = True
        self._continue()

    def resume(self) -> None:
        """Compute keys and values of all running requests again, then decode."""
        tokens = sum(r.num_prompt_tokens + self._written - r.begin for r in self._running) * self._scale
        self._loop.call_at(self._loop.now + tokens / self._speed.read_tokens_per_s, self._decode_again)

    def _decode_again(self) -> None:
        self._since = self._loop.now
        self._is_paused = False
        self._continue()

    def _note_progress(self) -> None:
        now = self._loop.now
        if self._running and not self._is_paused:
            self._written += (now - self._since) / self._seconds_per_token / self._scale
        self._since = now

    def _continue(self) -> None:
        """Start waiting requests that have room, and plan the next end of a request."""
        while self._waiting and len(self._running) < self._speed.most_running:
            request = self._waiting.popleft()
            request.begin, request.end = self._written, self._written + request.end
            heapq.heappush(self._running, request)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._running and not self._is_paused:
            left = max(self._running[0].end - self._written, 0.0) * self._scale
            self._timer = self._loop.call_at(self._loop.now + left * self._seconds_per_token, self._finish)

    def _finish(self) -> None:
        self._note_progress()
        self._written = max(self._written, self._running[0].end)
        while self._running and self._running[0].end <= self._written:
            request = heapq.heappop(self._running)
            if not request.done.done():
                request.done.set_result(None)
        self._continue()


class SimulatedEngines(GenerationInterface):
    """Engines that write answers of drawn lengths; a request goes to the engine with the fewest open ones.

    Args:
        loop: the clock.
        num_engines: number of engines.
        speed: of each of them.
        lengths: tokens of one turn.
        scale: number of tokens that one token of the stand-ins' answers stands for.
    """

    def __init__(self, loop: VirtualLoop, num_engines: int, speed: EngineSpeed, lengths: LogNormal, scale: int):
        self.weight_version = 0
        self._loop, self._lengths, self._scale = loop, lengths, scale
        self._engines = [_Engine(loop, speed, scale) for _ in range(num_engines)]
        self._num_requests = 0

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See `GenerationInterface.generate`; the text of an answer is its seed."""
        drawn = round(self._lengths.draw("length", request.seed) / self._scale)
        num_tokens = min(max(drawn, 1), request.sampling.max_new_tokens)
        version, self._num_requests = self.weight_version, self._num_requests + 1
        engine = min(self._engines, key=lambda each: each.num_open)
        await engine.write(self._num_requests, len(request.prompt_token_ids), num_tokens)
        tokens = np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.float32)
        return GenerationResult(*tokens, "stop", [VersionSpan(0, version)], text=str(request.seed))

    def update_weights(self, seconds: float) -> None:
        """Give all engines new weights; running requests wait meanwhile."""
        for engine in self._engines:
            engine.pause()
        self._loop.advance(seconds)
        self.weight_version += 1
        for engine in self._engines:
            engine.resume()

    def shutdown(self) -> None:
        """Do nothing."""


class WaitingEnvironment:
    """Environment that waits in each turn.

    Args:
        waits: seconds of a turn.
        num_turns: turns of an episode.
    """

    post_processes_groups = False
    reads_chat = False
    continues_episodes = True
    agent_section = None

    def __init__(self, waits: LogNormal, num_turns: int):
        self._waits, self._num_turns = waits, num_turns

    async def open_episode(self, metadata: Any, seed: int | None = None) -> EpisodeStart[Any]:
        """See `EnvironmentPort.open_episode`."""
        return EpisodeStart(metadata)

    async def step(self, message_log: list[Message], metadata: Any) -> StepResult:
        """See `EnvironmentPort.step`."""
        await asyncio.sleep(self._waits.draw("wait", message_log[-1]["content"]))
        turns = sum(message["role"] == "assistant" for message in message_log)
        return StepResult(
            observation={"role": "environment", "content": "x"},
            metadata=metadata,
            next_stop_strings=None,
            reward=1.0,
            terminated=turns == self._num_turns,
            answer=None,
        )

    async def close_episode(self, metadata: Any) -> None:
        """See `EnvironmentPort.close_episode`."""

    async def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        """See `PostProcessor.global_post_process_and_metrics`."""
        return batch, {}


@dataclass
class SimulatedTrainer:
    """A policy whose updates take time.

    Attributes:
        loop: the clock.
        s_per_token: seconds for each token of prompt and answer.
        scale: as `SimulatedEngines`.
    """

    loop: VirtualLoop
    s_per_token: float
    scale: int

    def train(
        self, data: BatchedDataDict[Any], loss_fn: AnyLossFunction, *, gbs: int | Sequence[int] | None = None
    ) -> TrainResult:
        """Take the time of the forward and backward passes; the optimizer's step takes none."""
        self.loop.advance(float(data["input_lengths"].sum()) * self.scale * self.s_per_token)
        result: Any = {}
        return result


class OneToken:
    """A tokenizer for which each text is one token."""

    eos_token_id = pad_token_id = 0
    chat_template = None
    all_special_tokens: tuple[str, ...] = ()

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return a text."""
        return "x"

    def __call__(self, text: str, **_: Any) -> Mapping[str, list[int]]:
        """Return the token of a text."""
        return {"input_ids": [0]}
