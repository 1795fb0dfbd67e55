"""Turn prompts into trajectories: one coroutine per sample over generation and environment.

Map of one collection:

    collect() (training thread) ─► event loop: one _run_sample task per sample, then post_process
        _run_sample: open episode ─► _play: generate ─► environment step ─► (again, until done or out of room)
                     ─► close episode ─► Trajectory

Samples never wait for each other, so a long one does not hold up short ones, and none waits for its episode to be
closed: an environment that does one thing at a time may be busy with the step of another. The same code serves one and
many turns, training, validation and evaluation.

Invariant: sampled token ids stay, more only come behind them; an episode is closed however its sample ends; a sample's
seed depends on (run seed, phase, step, group, sample, turn) and on nothing that varies between runs.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from nemo_rl.compat.public_names import public_names
from nemo_rl.data.interfaces import Message
from nemo_rl.data.messages.content import TextRules
from nemo_rl.data.messages.observations import ObservationRenderer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EpisodeStart, StepResult
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.post_processing import PostProcessor, post_process
from nemo_rl.experience.trajectory import Outcome, Rollouts, Trajectory
from nemo_rl.models.generation.interfaces import (
    GenerationInterface,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
    VersionSpan,
)
from nemo_rl.models.generation.texts import sampled_text
from nemo_rl.utils.errors import ConfigError, DataError
from nemo_rl.utils.garbage import search_all_objects_rarely
from nemo_rl.utils.seed import derive_seed

__getattr__ = public_names(__name__)
logger = logging.getLogger(__name__)

_CLOSING_S = 30.0
"""How long a collection waits for its episodes to be closed; an environment may be busy with a step."""
_MANY_SAMPLES = 4096
"""Samples of a collection from which on looking for garbage among all objects took a third of the driver's time."""


class EnvironmentPort(PostProcessor, Protocol):
    """What a rollout needs of an environment; `environments.client.EnvironmentClient` offers it."""

    async def open_episode(self, metadata: Any) -> EpisodeStart[Any]:
        """Begin one sample."""

    async def step(self, message_log: list[Message], metadata: Any) -> StepResult:
        """Take one turn."""

    async def close_episode(self, metadata: Any) -> None:
        """End one sample; never raises."""


@dataclass(frozen=True)
class RolloutLimits:
    """Bounds of a rollout.

    Attributes:
        max_sequence_length: tokens of prompt and all turns.
        max_turns: response turns.
        timeout_s: seconds for a whole collection.
    """

    max_sequence_length: int
    max_turns: int
    timeout_s: float


@dataclass(frozen=True)
class RolloutKey:
    """Names a collection, so that its random numbers are its own.

    Attributes:
        run_seed: seed of the run.
        phase: "train", "validation" ...
        step: training step.
        round: collection within the step (dynamic sampling asks several times).
        first_group: number of the collection's first prompt; an evaluation counts through all of its
            batches, so that samples do not depend on the batch size.
    """

    run_seed: int
    phase: str
    step: int
    round: int = 0
    first_group: int = 0


class Collection:
    """The groups of a collection, each as soon as it is finished: the samples of one prompt, in order.

    Environments may correct rewards once all groups are finished: in place, before the iteration ends.

    Args:
        groups: them; its value is the metrics.

    Attributes:
        metrics: what the environments have to tell, once all groups are finished.
    """

    def __init__(self, groups: Generator[list[Trajectory], None, dict[str, float]]):
        self._groups = groups
        self.metrics: dict[str, float] = {}

    def __iter__(self) -> Iterator[list[Trajectory]]:
        self.metrics = yield from self._groups


class RolloutRunner:
    """Collects trajectories.

    Args:
        generation: the engines.
        environments: environment by task name.
        tokenizer: decodes responses that come without a text, and encodes observations.
        limits: bounds.
        loop: where the coroutines run.
        text_rules: whose control tokens are ordinary text; None is `TextRules()`.
    """

    def __init__(
        self,
        generation: GenerationInterface,
        environments: Mapping[str, EnvironmentPort],
        tokenizer: PreTrainedTokenizerBase,
        limits: RolloutLimits,
        loop: EventLoopThread,
        text_rules: TextRules | None = None,
    ):
        self._generation = generation
        self._environments = environments
        self._tokenizer = tokenizer
        self._text_rules = text_rules or TextRules()
        self._observations = ObservationRenderer(tokenizer, self._text_rules)
        self._has_reported = False
        self._limits = limits
        self._loop = loop
        self._closings: set[asyncio.Task[None]] = set()

    def collect(
        self,
        prompts: BatchedDataDict[Any],
        num_generations: int,
        sampling: SamplingParams,
        key: RolloutKey,
    ) -> Rollouts:
        """As `stream`, all at once: trajectories ordered by prompt, then sample, and the metrics."""
        collection = self.stream(prompts, num_generations, sampling, key)
        trajectories = [sample for group in collection for sample in group]
        trajectories.sort(key=lambda t: (t.group_index, t.sample_index))
        return Rollouts(trajectories, collection.metrics)

    def stream(
        self,
        prompts: BatchedDataDict[Any],
        num_generations: int,
        sampling: SamplingParams,
        key: RolloutKey,
    ) -> Collection:
        """Sample `num_generations` responses per prompt.

        Args:
            prompts: collated `DatumSpec` rows.
            num_generations: samples per prompt.
            sampling: how to sample.
            key: names the collection.

        Raises:
            ConfigError: a prompt names an environment that does not run.
            DeadlineExceededError: the collection takes longer than the limit.
        """
        groups = self._loop.stream(
            partial(self._run_all, prompts, num_generations, sampling, key),
            self._limits.timeout_s,
            f"The rollouts of {key.phase} step {key.step} (cluster.timeouts.rollout_s)",
            self._generation.describe_open,
        )
        return Collection(groups)

    async def _run_all(
        self,
        prompts: BatchedDataDict[Any],
        num_generations: int,
        sampling: SamplingParams,
        key: RolloutKey,
        hand_over: Callable[[list[Trajectory]], None],
    ) -> dict[str, float]:
        if prompts.size * num_generations >= _MANY_SAMPLES:
            search_all_objects_rarely()
        starts = [start for group in range(prompts.size) for start in _starts(prompts, group, num_generations)]
        for start in starts:
            if start.task_name not in self._environments:
                raise ConfigError(
                    f"A prompt asks for environment {start.task_name!r}; running are "
                    f"{sorted(self._environments)}. Add it under `env:` or change its `env_name`."
                )
        stops = prompts.get("stop_strings") or [None] * prompts.size
        groups: dict[int, list[Trajectory]] = defaultdict(list)

        async def run(start: Trajectory) -> Trajectory:
            sample = await self._run_sample(start, sampling, stops[start.group_index], key)
            group = groups[sample.group_index]
            group.append(sample)
            if len(group) == num_generations:
                hand_over(sorted(group, key=lambda t: t.sample_index))
            return sample

        failure: Exception | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(run(start)) for start in starts]
        except ExceptionGroup as failures:
            failure = failures.exceptions[0]
        finally:
            await self._wait_for_closings()
        if failure is not None:
            # All samples fail for the same reason as a rule. Raised here, it keeps its cause, the worker's traceback,
            # and the others, hundreds of copies, are not printed with it.
            raise failure
        return await post_process(self._environments, [task.result() for task in running])

    async def _run_sample(
        self, sample: Trajectory, sampling: SamplingParams, prompt_stops: list[str] | None, key: RolloutKey
    ) -> Trajectory:
        """Play one sample in an episode of its own; fills in and returns the trajectory."""
        if self._has_no_room(sample):
            return sample
        environment = self._environments[sample.task_name]
        _remember(sample, sample.extra_env_info)
        try:
            started = time.perf_counter()
            start = await environment.open_episode(sample.extra_env_info)
            sample.environment_s += time.perf_counter() - started
            _remember(sample, start.metadata)
            if self._begin(sample, start):
                await self._play(sample, sampling, prompt_stops, key)
        finally:
            # Started at once: where an environment has nothing to close it is over already.
            loop = asyncio.get_running_loop()
            closing = asyncio.Task(environment.close_episode(sample.episode), loop=loop, eager_start=True)
            if not closing.done():
                self._closings.add(closing)
                closing.add_done_callback(self._closings.discard)
        return sample

    async def _wait_for_closings(self) -> None:
        """A sample is finished before its episode is closed, a collection only after, unless that takes too long."""
        if not self._closings:
            return
        _, late = await asyncio.wait(self._closings, timeout=_CLOSING_S)
        if late:
            logger.warning(
                "%d episodes are not closed %g s after their collection has ended; they are closed when their "
                "environment has time.",
                len(late),
                _CLOSING_S,
            )

    def _has_no_room(self, sample: Trajectory) -> bool:
        if sample.loss_multiplier != 0 and sample.prompt_length < self._limits.max_sequence_length:
            return False
        sample.outcome = Outcome.PROMPT_TOO_LONG
        return True

    def _begin(self, sample: Trajectory, start: EpisodeStart[Any]) -> bool:
        """Add the first observation to the prompt; returns False when there is nothing to play."""
        if start.error is not None:
            _fail(sample, start.error)
            return False
        if start.observation is None:
            return True
        try:
            self._add_to_prompt(sample, start.observation)
        except DataError as error:
            _fail(sample, f"the first observation cannot be rendered: {error}")
            return False
        return not self._has_no_room(sample)

    def _add_to_prompt(self, sample: Trajectory, observation: Message) -> None:
        """Render the prompt with one more message: nothing is sampled yet, so nothing has to stay."""
        if sample.chat is None:
            raise DataError(
                "its data processor does not say what the prompt was rendered from: give the datum `chat`, a dict "
                "with `messages` and `tools`, or put the observation into the prompt there"
            )
        self._note_control_tokens(sample, observation)
        entry = self._observations.first_of_prompt(sample.chat, observation)
        sample.message_log = [entry]
        sample.prompt_length = len(entry["token_ids"])

    async def _play(
        self, sample: Trajectory, sampling: SamplingParams, prompt_stops: list[str] | None, key: RolloutKey
    ) -> None:
        """Take turns until the environment or a limit ends the sample."""
        stops = prompt_stops
        while True:
            result = await self._take_turn(sample, _with_stops(sampling, stops), key)
            step = await self._ask_environment(sample)
            if not _absorb(sample, step):
                return
            if step.terminated or sample.num_turns >= self._limits.max_turns:
                if result.finish_reason == "length":
                    sample.outcome = Outcome.TRUNCATED
                return
            try:
                self._note_control_tokens(sample, step.observation)
                ids = self._observations.token_ids(step.observation, sample.message_log, sample.prompt_length)
            except DataError as error:
                _fail(sample, f"an observation cannot be rendered: {error}")
                return
            if len(ids) >= self._limits.max_sequence_length - sample.length:
                sample.outcome = Outcome.TRUNCATED
                return
            sample.message_log.append({**step.observation, "token_ids": ids})
            stops = prompt_stops if step.next_stop_strings is None else step.next_stop_strings

    def _note_control_tokens(self, sample: Trajectory, observation: Message) -> None:
        """Count an observation whose text holds a control token, and report the first one of this process."""
        token = self._observations.control_token_in(observation)
        if token is None:
            return
        sample.num_control_token_observations += 1
        if not self._has_reported:
            self._has_reported = True
            logger.warning(
                "An observation of %r holds the control token %r, encoded as %s (data.control_tokens_from_tools).",
                sample.task_name,
                token,
                "text" if self._text_rules.tools else "that token",
            )

    async def _take_turn(self, sample: Trajectory, sampling: SamplingParams, key: RolloutKey) -> GenerationResult:
        prefix = [t for message in sample.message_log for t in message["token_ids"].tolist()]
        room = self._limits.max_sequence_length - len(prefix)
        seed = derive_seed(
            key.run_seed,
            key.phase,
            key.step,
            key.round,
            key.first_group + sample.group_index,
            sample.sample_index,
            sample.num_turns,
        )
        if room < sampling.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=room)
        started = time.perf_counter()
        result = await self._generation.generate(GenerationRequest(prefix, sampling, seed, sample.row_inputs))
        sample.generation_s += time.perf_counter() - started
        text = sampled_text(self._tokenizer, result.token_ids) if result.text is None else result.text
        sample.message_log.append(
            {
                "role": "assistant",
                "content": text,
                "token_ids": torch.from_numpy(np.array(result.token_ids, dtype=np.int64)),
                "generation_logprobs": torch.from_numpy(np.array(result.logprobs, dtype=np.float32)),
            }
        )
        sample.weight_versions += [
            VersionSpan(len(prefix) + span.start, span.version) for span in result.weight_versions
        ]
        sample.num_turns += 1
        return result

    async def _ask_environment(self, sample: Trajectory) -> StepResult:
        started = time.perf_counter()
        environment = self._environments[sample.task_name]
        step = await environment.step(sample.turns, sample.extra_env_info)
        sample.environment_s += time.perf_counter() - started
        return step


def _starts(prompts: BatchedDataDict[Any], group: int, num_generations: int) -> list[Trajectory]:
    """Empty trajectories of one prompt, each with its own copy of the message list."""
    messages, chats, inputs = prompts["message_log"][group], prompts.get("chat"), prompts.get("row_inputs")
    shared = {
        "idx": int(prompts["idx"][group]),
        "task_name": prompts["task_name"][group],
        "prompt_length": sum(len(message["token_ids"]) for message in messages),
        "loss_multiplier": float(prompts["loss_multiplier"][group]),
        "extra_env_info": prompts["extra_env_info"][group],
        "chat": chats[group] if chats else None,
        "row_inputs": inputs[group] if inputs else None,
    }
    return [
        Trajectory(group, sample, message_log=[dict(message) for message in messages], **shared)
        for sample in range(num_generations)
    ]


def _with_stops(sampling: SamplingParams, stop_strings: list[str] | None) -> SamplingParams:
    """Sampling that also stops at the strings of one turn."""
    if not stop_strings:
        return sampling
    merged = tuple(dict.fromkeys((*sampling.stop_strings, *stop_strings)))
    return replace(sampling, stop_strings=merged)


def _remember(sample: Trajectory, metadata: Any) -> None:
    """Take over the metadata for the next turn, and for the end of the episode unless it is None."""
    sample.extra_env_info = metadata
    if metadata is not None:
        sample.episode = metadata


def _absorb(sample: Trajectory, step: StepResult) -> bool:
    """Add a step's reward and metadata; returns False when the environment failed on the sample."""
    _remember(sample, step.metadata)
    sample.answer = step.answer
    if step.error is not None or step.reward is None:
        _fail(sample, step.error or "the environment returned no reward")
        return False
    components = step.reward if isinstance(step.reward, dict) else {}
    for name, value in components.items():
        sample.reward_components[name] = sample.reward_components.get(name, 0.0) + value
    earned = sum(components.values()) if components else float(step.reward)  # type: ignore[arg-type]
    sample.reward = (sample.reward or 0.0) + earned
    return True


def _fail(sample: Trajectory, reason: str) -> None:
    """End a sample that has no reward."""
    sample.outcome = Outcome.REWARD_ERROR
    sample.error = reason
    sample.reward = None
