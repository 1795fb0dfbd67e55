"""Turn prompts into trajectories: one coroutine per sample over generation and environment.

Map of one collection:

    collect() (training thread) ─► event loop: one _run_sample task per sample
        _run_sample: generate ─► environment step ─► (again, until done or out of room) ─► Trajectory

Samples never wait for each other, so a long one does not hold up short ones. The same code serves one and many turns,
training, validation and evaluation. Invariant: token ids only grow at the end; a sample's seed depends on (run seed,
phase, step, group, sample, turn) and on nothing that varies between runs.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.client import StepResult
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.trajectory import Outcome, Trajectory
from nemo_rl.models.generation.interfaces import (
    GenerationInterface,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
    VersionSpan,
)
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.seed import derive_seed


class EnvironmentPort(Protocol):
    """What a rollout needs of an environment; `environments.client.EnvironmentClient` offers it."""

    async def step(self, message_log: list[dict[str, Any]], metadata: Any) -> StepResult:
        """Take one turn."""


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


class RolloutRunner:
    """Collects trajectories.

    Args:
        generation: the engines.
        environments: environment by task name.
        tokenizer: decodes responses and encodes observations.
        limits: bounds.
        loop: where the coroutines run.
    """

    def __init__(
        self,
        generation: GenerationInterface,
        environments: Mapping[str, EnvironmentPort],
        tokenizer: PreTrainedTokenizerBase,
        limits: RolloutLimits,
        loop: EventLoopThread,
    ):
        self._generation = generation
        self._environments = environments
        self._tokenizer = tokenizer
        self._limits = limits
        self._loop = loop

    def collect(
        self,
        prompts: BatchedDataDict[Any],
        num_generations: int,
        sampling: SamplingParams,
        key: RolloutKey,
    ) -> list[Trajectory]:
        """Sample `num_generations` responses per prompt.

        Args:
            prompts: collated `DatumSpec` rows.
            num_generations: samples per prompt.
            sampling: how to sample.
            key: names the collection.

        Returns:
            Trajectories ordered by prompt, then sample.

        Raises:
            ConfigError: a prompt names an environment that does not run.
            DeadlineExceededError: the collection takes longer than the limit.
        """
        return self._loop.run(
            self._run_all(prompts, num_generations, sampling, key),
            self._limits.timeout_s,
            f"The rollouts of {key.phase} step {key.step} (cluster.timeouts.rollout_s)",
        )

    async def _run_all(
        self,
        prompts: BatchedDataDict[Any],
        num_generations: int,
        sampling: SamplingParams,
        key: RolloutKey,
    ) -> list[Trajectory]:
        starts = [_start(prompts, group, sample) for group in range(prompts.size) for sample in range(num_generations)]
        for start in starts:
            if start.task_name not in self._environments:
                raise ConfigError(
                    f"A prompt asks for environment {start.task_name!r}; running are "
                    f"{sorted(self._environments)}. Add it under `env:` or change its `env_name`."
                )
        stops = prompts.get("stop_strings") or [None] * prompts.size
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._run_sample(start, sampling, stops[start.group_index], key))
                    for start in starts
                ]
        except ExceptionGroup as failures:
            # All samples fail for the same reason as a rule; the first one is the one to read.
            raise failures.exceptions[0] from failures
        return [task.result() for task in running]

    async def _run_sample(
        self, sample: Trajectory, sampling: SamplingParams, prompt_stops: list[str] | None, key: RolloutKey
    ) -> Trajectory:
        """Play one sample to its end; fills in and returns the trajectory."""
        stops = prompt_stops
        room = self._limits.max_sequence_length - sample.prompt_length
        if sample.loss_multiplier == 0 or room < 1:
            sample.outcome = Outcome.PROMPT_TOO_LONG
            return sample
        while True:
            result = await self._take_turn(sample, _with_stops(sampling, stops), key)
            step = await self._ask_environment(sample)
            if not _absorb(sample, step):
                return sample
            room = self._limits.max_sequence_length - sample.length
            if step.terminated or sample.num_turns >= self._limits.max_turns:
                if result.finish_reason == "length":
                    sample.outcome = Outcome.TRUNCATED
                return sample
            observation = self._encode(step.observation)
            if len(observation["token_ids"]) >= room:
                sample.outcome = Outcome.TRUNCATED
                return sample
            sample.message_log.append(observation)
            stops = prompt_stops if step.next_stop_strings is None else step.next_stop_strings

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
        sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
        started = time.perf_counter()
        result = await self._generation.generate(GenerationRequest(prefix, sampling, seed))
        sample.generation_s += time.perf_counter() - started
        sample.message_log.append(
            {
                "role": "assistant",
                "content": self._tokenizer.decode(result.token_ids, skip_special_tokens=True),
                "token_ids": torch.tensor(result.token_ids, dtype=torch.int64),
                "generation_logprobs": torch.tensor(result.logprobs, dtype=torch.float32),
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
        texts = [{"role": m["role"], "content": m["content"]} for m in sample.message_log]
        step = await environment.step(texts, sample.extra_env_info)
        sample.environment_s += time.perf_counter() - started
        return step

    def _encode(self, observation: dict[str, str]) -> dict[str, Any]:
        ids = self._tokenizer(observation["content"], add_special_tokens=False)["input_ids"]
        return {**observation, "token_ids": torch.tensor(ids, dtype=torch.int64)}


def _start(prompts: BatchedDataDict[Any], group: int, sample: int) -> Trajectory:
    """An empty trajectory with its own copy of the prompt's message list."""
    message_log = [dict(message) for message in prompts["message_log"][group]]
    return Trajectory(
        group_index=group,
        sample_index=sample,
        idx=int(prompts["idx"][group]),
        task_name=prompts["task_name"][group],
        message_log=message_log,
        prompt_length=sum(len(message["token_ids"]) for message in message_log),
        loss_multiplier=float(prompts["loss_multiplier"][group]),
        extra_env_info=prompts["extra_env_info"][group],
    )


def _with_stops(sampling: SamplingParams, stop_strings: list[str] | None) -> SamplingParams:
    """Sampling that also stops at the strings of one turn."""
    if not stop_strings:
        return sampling
    merged = tuple(dict.fromkeys((*sampling.stop_strings, *stop_strings)))
    return replace(sampling, stop_strings=merged)


def _absorb(sample: Trajectory, step: StepResult) -> bool:
    """Add a step's reward and metadata; returns False when the environment failed on the sample."""
    sample.extra_env_info = step.metadata
    sample.answer = step.answer
    if step.error is not None or step.reward is None:
        sample.outcome = Outcome.REWARD_ERROR
        sample.error = step.error or "the environment returned no reward"
        sample.reward = None
        return False
    components = step.reward if isinstance(step.reward, dict) else {}
    for name, value in components.items():
        sample.reward_components[name] = sample.reward_components.get(name, 0.0) + value
    earned = sum(components.values()) if components else float(step.reward)  # type: ignore[arg-type]
    sample.reward = (sample.reward or 0.0) + earned
    return True
