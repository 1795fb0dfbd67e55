"""Sample one trajectory: open its episode, alternate between engine and environment, and close the episode.

    play: open episode ─► _take_turns: generate ─► environment step ─► (again, until done or out of room)
        ─► close episode ─► Trajectory

Invariants: sampled token ids never change, and tokens are only appended. An episode is always closed, also after an
error. A sample's seed depends only on (run seed, phase, step, round, prompt, sample, turn).
"""

import asyncio
import json
import logging
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from nemo_rl.config.schema.agents import AgentEndpointConfig
from nemo_rl.data.images.messages import images_in
from nemo_rl.data.interfaces import Message
from nemo_rl.data.messages.content import TextRules, content_text
from nemo_rl.data.messages.observations import ObservationRenderer, messages_of
from nemo_rl.data.messages.steps import num_tokens_until
from nemo_rl.data.routed_experts import note_experts
from nemo_rl.environments.interfaces import EpisodeStart, StepResult
from nemo_rl.experience.post_processing import PostProcessor
from nemo_rl.experience.program_player import ProgramPlayer, make_program_player
from nemo_rl.experience.progress import SampleProgress
from nemo_rl.experience.trajectory import Ending, Outcome, RolloutLimits, Trajectory
from nemo_rl.models.generation.interfaces import (
    GenerationInterface,
    GenerationRequest,
    GenerationResult,
    ResponseSoFar,
    SamplingParams,
    VersionSpan,
)
from nemo_rl.models.generation.remote.chats import ChatInput
from nemo_rl.models.generation.responses import joined, rest_of, sampled_text
from nemo_rl.utils.errors import DataError, NoAnswerError
from nemo_rl.utils.seed import derive_seed
from nemo_rl.utils.timer import BusyClock


def chat_of(sample: Trajectory) -> ChatInput:
    """Return the conversation of a sample as messages, up to the answer to sample next.

    Raises:
        DataError: The data does not contain the messages of the prompt.
    """
    if sample.chat is None:
        raise DataError(
            "generation.endpoint sends prompts as messages, but the data processor does not say what the prompt was "
            "rendered from: give the datum `chat`, a dict with `messages` and `tools`."
        )
    log = sample.message_log
    first = next((number for number, message in enumerate(log) if "generation_logprobs" in message), len(log))
    messages = list(sample.chat["messages"])
    for message in log[first:]:
        messages += [_said(message)] if "generation_logprobs" in message else messages_of(message)
    return ChatInput(messages, sample.chat["tools"] or (), sample.chat.get("template_kwargs") or {})


def _said(message: Message) -> Message:
    """Return an answer in its server's form. Tool calls are separate and are not repeated in the text."""
    return {"role": "assistant", "content": message.get("spoken", message["content"])} | (
        {"tool_calls": message["tool_calls"]} if "tool_calls" in message else {}
    )


def end_without_answer(sample: Trajectory, error: NoAnswerError) -> None:
    """End a sample whose next answer cannot be sampled. It is truncated if it is too long, and otherwise failed."""
    if not error.is_too_long:
        sample.fail(str(error))
        return
    sample.outcome = Outcome.TRUNCATED if sample.num_turns else Outcome.PROMPT_TOO_LONG
    sample.ended_by = Ending.SEQUENCE_LENGTH


logger = logging.getLogger(__name__)

CLOSING_S = 30.0
"""Seconds for which a group or collection waits until its episodes are closed. An environment may be busy."""

_late: set[asyncio.Task[None]] = set()
"""Tasks that take longer than `CLOSING_S`. They are kept here because asyncio holds only weak references to tasks."""


class Closings:
    """Episodes that are being closed.

    Args:
        owner: "group" or "collection", for the log.
    """

    def __init__(self, owner: str):
        self._owner = owner
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, closing: Coroutine[Any, Any, None]) -> None:
        """Start to close an episode. If the environment has nothing to close, this happens at once."""
        task = asyncio.Task(closing, loop=asyncio.get_running_loop(), eager_start=True)
        if not task.done():
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def wait(self) -> None:
        """Wait until all episodes are closed, at most `CLOSING_S`. After that, they are closed in the background."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=CLOSING_S)
        if late:
            _late.update(late)
            for task in late:
                task.add_done_callback(_late.discard)
            logger.warning(
                "%d episodes are not closed %g s after their %s has ended; they are closed when their environment has "
                "time.",
                len(late),
                CLOSING_S,
                self._owner,
            )


class EnvironmentPort(PostProcessor, Protocol):
    """Methods of an environment that rollouts call. `EnvironmentClient` and `EnvironmentPool` implement them."""

    @property
    def reads_chat(self) -> bool:
        """Return whether the environment reads the prompt's messages (`EnvironmentInterface.reads_chat`)."""

    async def open_episode(self, metadata: Any, seed: int | None = None) -> EpisodeStart[Any]:
        """Open the episode of one sample. `seed` determines its random numbers."""

    async def step(self, message_log: list[Message], metadata: Any) -> StepResult:
        """Take one turn of a conversation, whose messages have `token_ids`."""

    @property
    def continues_episodes(self) -> bool:
        """Return whether episodes can continue in another process (`EnvironmentInterface.continues_episodes`)."""

    @property
    def agent_section(self) -> Mapping[str, Any] | None:
        """Return the section of an environment with `runs_agents`, or None for other environments."""

    async def close_episode(self, metadata: Any) -> None:
        """Close the episode of one sample. This never raises an error."""


@dataclass(frozen=True)
class RolloutKey:
    """Identity of a collection, which determines its random numbers."""

    run_seed: int
    phase: str
    """Phase of the run: "train", "validation" ..."""
    step: int
    """Training step."""
    round: int = 0
    """Number of the collection within the step. Dynamic sampling makes several collections."""
    first_group: int = 0
    """Number of the collection's first prompt."""
    prompts: tuple[str, ...] = ()
    """Identity of each prompt (`data.prompt_identity`), on which samples then depend in place of the prompt's number.
    With it, samples of evaluations and validations do not depend on the batch size and the order of prompts."""

    @property
    def trains(self) -> bool:
        """Return True if the policy is trained on the samples."""
        return self.phase == "train"

    def seed_of(self, sample: Trajectory) -> int:
        """Return the seed of a sample's next turn."""
        return self._seed(sample, sample.num_turns)

    def episode_seed_of(self, sample: Trajectory) -> int:
        """Return the seed with which the environment opens the episode of a sample."""
        return self._seed(sample, "episode")

    def call_seed_of(self, sample: Trajectory, *parts: int | str) -> int:
        """Return the seed of a sample's program or, if `parts` are given, of one of the program's answers."""
        return self._seed(sample, "call", *parts)

    def of_prompt(self, row: int) -> "RolloutKey":
        """Return the key of a collection that has only the prompt in a row of this collection."""
        return replace(self, first_group=self.first_group + row, prompts=self.prompts[row : row + 1])

    def _seed(self, sample: Trajectory, *use: int | str) -> int:
        group, index = self.first_group + sample.group_index, sample.sample_index
        prompt = self.prompts[sample.group_index] if self.prompts else group
        return derive_seed(self.run_seed, self.phase, self.step, self.round, prompt, index, *use)


class SamplePlayer:
    """Play samples, concurrently on one event loop.

    Args:
        environments: Environments by task name.
        tokenizer: Decodes responses without a text, and encodes observations.
        limits: Limits of tokens, turns and time.
        text_rules: Rules that choose texts whose control tokens are encoded as ordinary text. If None, `TextRules()`.
        endpoint: Section of the endpoint for agents. If None, its defaults.
    """

    def __init__(
        self,
        generation: GenerationInterface,
        environments: Mapping[str, EnvironmentPort],
        tokenizer: PreTrainedTokenizerBase,
        limits: RolloutLimits,
        text_rules: TextRules | None = None,
        endpoint: AgentEndpointConfig | None = None,
    ):
        self._generation = generation
        self._environments = environments
        self._tokenizer = tokenizer
        self._text_rules = text_rules or TextRules()
        self._observations: dict[str, ObservationRenderer] = {}
        """Renderers of observations, by the chat template's variables as JSON."""
        self._has_reported = False
        self._limits = limits
        self._endpoint = endpoint or AgentEndpointConfig()
        self.environments_busy = BusyClock()
        """Clock of the time in which an environment opens an episode or takes a turn."""

    @cached_property
    def _programs(self) -> ProgramPlayer:
        """Return the player of agent environments, which is made for the first such sample."""
        return make_program_player(self._generation, self._tokenizer, self._limits, self._text_rules, self._endpoint)

    async def play(
        self,
        progress: SampleProgress,
        sampling: SamplingParams,
        prompt_stops: list[str] | None,
        key: RolloutKey,
        closings: Closings,
    ) -> Trajectory:
        """Sample one trajectory in its own episode, from its stored state if there is one."""
        sample = progress.sample
        if not progress.is_finished and not self._has_no_room(sample):
            environment = self._environments[sample.task_name]
            _remember(sample, sample.extra_env_info)
            try:
                if progress.is_open or await self._open(progress, prompt_stops, key):
                    if environment.agent_section is None:
                        await self._take_turns(progress, sampling, prompt_stops, key)
                    else:
                        await self._run_agent(
                            sample, environment.agent_section, _with_stops(sampling, prompt_stops), key
                        )
            except NoAnswerError as error:
                end_without_answer(sample, error)
            finally:
                closings.start(environment.close_episode(sample.episode))
        progress.is_finished = True
        return sample

    async def _open(self, progress: SampleProgress, prompt_stops: list[str] | None, key: RolloutKey) -> bool:
        """Open the episode of a sample. Return False if the sample has already ended."""
        sample = progress.sample
        environment = self._environments[sample.task_name]
        started = time.perf_counter()
        with self.environments_busy.work():
            start = await environment.open_episode(sample.extra_env_info, key.episode_seed_of(sample))
        sample.environment_s += time.perf_counter() - started
        _remember(sample, start.metadata)
        progress.is_open, progress.stops = True, prompt_stops
        return self._begin(sample, start)

    def _has_no_room(self, sample: Trajectory) -> bool:
        if sample.loss_multiplier != 0 and sample.prompt_length < self._limits.max_sequence_length:
            return False
        sample.outcome, sample.ended_by = Outcome.PROMPT_TOO_LONG, Ending.SEQUENCE_LENGTH
        return True

    def _begin(self, sample: Trajectory, start: EpisodeStart[Any]) -> bool:
        """Add the first observation to the prompt. Return False if the sample has already ended."""
        if start.error is not None:
            sample.fail(start.error, aborted=start.aborted)
            return False
        if start.observation is None:
            return True
        try:
            self._add_to_prompt(sample, start.observation)
        except DataError as error:
            sample.fail(f"the first observation cannot be rendered: {error}")
            return False
        return not self._has_no_room(sample)

    def _add_to_prompt(self, sample: Trajectory, observation: Message) -> None:
        """Render the prompt again with one more message. This is possible only before a token is sampled."""
        if sample.chat is None:
            raise DataError(
                "its data processor does not say what the prompt was rendered from: give the datum `chat`, a dict "
                "with `messages` and `tools`, or put the observation into the prompt there"
            )
        observation = self._renderer(sample).read(observation)
        self._note_control_tokens(sample, observation)
        entry = self._renderer(sample).first_of_prompt(sample.chat, observation)
        sample.message_log = [entry]
        sample.prompt_length = len(entry["token_ids"])
        sample.chat = {**sample.chat, "messages": [*sample.chat["messages"], *messages_of(observation)]}
        _add_images(sample, observation)

    def _renderer(self, sample: Trajectory) -> ObservationRenderer:
        """Return the renderer of a sample's observations. Levels of effort may have different templates."""
        variables = {} if sample.chat is None else sample.chat.get("template_kwargs", {})
        key = json.dumps(variables, sort_keys=True, default=repr)
        if key not in self._observations:
            self._observations[key] = ObservationRenderer(self._tokenizer, self._text_rules, variables)
        return self._observations[key]

    async def _take_turns(
        self, progress: SampleProgress, sampling: SamplingParams, prompt_stops: list[str] | None, key: RolloutKey
    ) -> None:
        """Alternate between engine and environment until the environment or a limit ends the sample."""
        sample = progress.sample
        while True:
            if progress.finish_reason is None:
                await self._take_turn(progress, _with_stops(sampling, progress.stops), key)
            step = await self._ask_environment(sample)
            finish_reason, progress.finish_reason = progress.finish_reason, None
            if not _absorb(sample, step):
                return
            self._note_steps(sample, step)
            if step.terminated or sample.num_turns >= self._limits.max_turns:
                if finish_reason == "length":
                    _cut(sample, self._limits.bound_of(sample))
                elif not step.terminated:
                    sample.ended_by = Ending.MAX_TURNS
                return
            if self._limits.room(sample) <= 0:
                _cut(sample, self._limits.bound_of(sample))
                return
            try:
                observation = self._renderer(sample).read(step.observation)
                self._note_control_tokens(sample, observation)
                ids = self._renderer(sample).token_ids(observation, sample.message_log, sample.prompt_length)
            except DataError as error:
                sample.fail(f"an observation cannot be rendered: {error}")
                return
            if len(ids) >= self._limits.max_sequence_length - sample.length:
                _cut(sample, Ending.SEQUENCE_LENGTH)
                return
            kept = self._generation.reads_chats
            said = {name: value for name, value in observation.items() if kept or name != "messages"}
            if isinstance(said.get("content"), list):
                said["content"] = content_text(said["content"])
            sample.message_log.append({**said, "token_ids": ids})
            _add_images(sample, observation)
            progress.stops = prompt_stops if step.next_stop_strings is None else step.next_stop_strings

    async def _run_agent(
        self, sample: Trajectory, section: Mapping[str, Any], sampling: SamplingParams, key: RolloutKey
    ) -> None:
        """Run the program of a sample to its end."""
        step_of = self._environments[sample.task_name].step
        seed_of = partial(key.call_seed_of, sample)
        played = await self._programs.play(sample, section, step_of, sampling, seed_of, trains=key.trains)
        if _absorb(sample, played.step):
            played.spread_reward()

    def _note_steps(self, sample: Trajectory, step: StepResult) -> None:
        """Add the rewards of the steps of the last turn, whose ends become numbers of tokens."""
        ends = [end for end, _ in step.step_rewards]
        written = sample.message_log[-1]["token_ids"].tolist()
        tokens = num_tokens_until(ends, written, self._tokenizer) if ends else []
        sample.step_rewards.append([(end, each) for end, (_, each) in zip(tokens, step.step_rewards, strict=True)])

    def _note_control_tokens(self, sample: Trajectory, observation: Message) -> None:
        """Count an observation whose text contains a control token. Log the first one in this process."""
        token = self._renderer(sample).control_token_in(observation)
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

    async def _take_turn(self, progress: SampleProgress, sampling: SamplingParams, key: RolloutKey) -> None:
        sample = progress.sample
        prefix = [t for message in sample.message_log for t in message["token_ids"].tolist()]
        room = self._limits.room(sample)
        if room < sampling.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=room)
        started = time.perf_counter()
        chat = chat_of(sample) if self._generation.reads_chats else None
        request = GenerationRequest(prefix, sampling, key.seed_of(sample), sample.served_by, sample.row_inputs, chat)
        result = await self._respond(progress, request)
        progress.finish_reason = result.finish_reason
        sample.num_prefix_hits += sample.served_by is not None and sample.served_by == result.served_by
        sample.served_by = result.served_by
        sample.generation_s += time.perf_counter() - started
        text = sampled_text(self._tokenizer, result.token_ids) if result.text is None else result.text
        sample.message_log.append(
            {
                "role": "assistant",
                "content": text,
                "token_ids": torch.from_numpy(np.array(result.token_ids, dtype=np.int64)),
                "generation_logprobs": torch.from_numpy(np.array(result.logprobs, dtype=np.float32)),
                **({} if result.answer is None else result.answer.fields),
            }
        )
        note_experts(sample.message_log, result.routed_experts)
        sample.weight_versions += [
            VersionSpan(len(prefix) + span.start, span.version) for span in result.weight_versions
        ]
        sample.num_turns += 1

    async def _respond(self, progress: SampleProgress, request: GenerationRequest) -> GenerationResult:
        """Sample a response, or the rest of a response whose first part has been sampled before."""
        nothing, so_far = ResponseSoFar.nothing(), progress.so_far
        progress.request = rest_of(request, so_far)
        if progress.request.sampling.max_new_tokens > 0:
            rest = await self._generation.generate(progress.request)
        else:  # the limits were lowered after the first part
            rest = GenerationResult(nothing.token_ids, nothing.logprobs, "length", [])
        progress.request, progress.so_far = None, nothing
        return joined(so_far, rest, request.sampling.stop_strings, self._tokenizer)

    async def _ask_environment(self, sample: Trajectory) -> StepResult:
        started = time.perf_counter()
        environment = self._environments[sample.task_name]
        with self.environments_busy.work():
            conversation = sample.conversation if environment.reads_chat else sample.message_log
            step = await environment.step(conversation, sample.extra_env_info)
        sample.environment_s += time.perf_counter() - started
        return step


def _with_stops(sampling: SamplingParams, stop_strings: list[str] | None) -> SamplingParams:
    """Add the stop strings of one turn to the sampling parameters."""
    if not stop_strings:
        return sampling
    merged = tuple(dict.fromkeys((*sampling.stop_strings, *stop_strings)))
    return replace(sampling, stop_strings=merged)


def _add_images(sample: Trajectory, observation: Mapping[str, Any]) -> None:
    """Add the images of an observation to the inputs of a sample."""
    images = images_in(messages_of(observation))
    if images and sample.row_inputs is not None and sample.row_inputs.images is not None:
        sample.row_inputs = sample.row_inputs.images.followed_by(images).row_inputs()


def _remember(sample: Trajectory, metadata: Any) -> None:
    """Store the metadata for the next turn. If it is not None, store it for closing the episode too."""
    sample.extra_env_info = metadata
    if metadata is not None:
        sample.episode = metadata


def _absorb(sample: Trajectory, step: StepResult) -> bool:
    """Add a step's reward and metadata. Return False if the environment failed on the sample."""
    _remember(sample, step.metadata)
    sample.answer = step.answer
    if step.error is not None or step.reward is None:
        sample.fail(step.error or "the environment returned no reward", aborted=step.aborted)
        return False
    components = step.reward if isinstance(step.reward, dict) else {}
    for name, value in components.items():
        sample.reward_components[name] = sample.reward_components.get(name, 0.0) + value
    earned = sum(components.values()) if components else float(step.reward)  # type: ignore[arg-type]
    sample.reward = (sample.reward or 0.0) + earned
    sample.turn_rewards.append(earned)
    sample.invalid_tool_call_turns.append(step.invalid_tool_call)
    return True


def _cut(sample: Trajectory, bound: Ending) -> None:
    """End a sample that reached a limit, as truncated."""
    sample.outcome, sample.ended_by = Outcome.TRUNCATED, bound
