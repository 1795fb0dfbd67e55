"""Keep the state of unfinished samples, for the checkpoint of a run that samples ahead.

    RolloutRunner.play_group ─► GroupProgress.begin ─► SamplePlayer notes what each sample waits for
    checkpoint ─► states_of: asks the engines for the responses so far, while sampling continues
    resumed run ─► GroupProgress(stored=...) ─► begin ─► samples continue where they were

A sample waits for its response or for its environment, or is finished. Its state is the trajectory so far, the tokens
of the response that is being sampled, and the environment's metadata. Invariant: a state has all tokens that the engine
had sampled at the time of the request, so a resumed run does not sample them again.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from nemo_rl.experience.branches import num_written_tokens
from nemo_rl.experience.trajectory import Rollouts, Trajectory
from nemo_rl.files.safe_load import is_plain
from nemo_rl.models.generation.interfaces import (
    FinishReason,
    GenerationInterface,
    GenerationRequest,
    ResponseSoFar,
    VersionSpan,
)

_MOST_ROUNDS = 10
"""Number of times that engines are asked for turns that have started meanwhile. Later turns are sampled again."""


@dataclass(eq=False)
class SampleProgress:
    """State of one unfinished sample."""

    sample: Trajectory
    """Trajectory of the sample so far."""
    is_open: bool = False
    """Whether the sample's episode was opened."""
    is_finished: bool = False
    """Whether the sample is finished."""
    stops: list[str] | None = None
    """Stop strings of the turn in addition to those of the run."""
    request: GenerationRequest | None = None
    """The current request to an engine. None if the sample is not waiting for a response."""
    so_far: ResponseSoFar = field(default_factory=ResponseSoFar.nothing)
    """First part of the turn's response, sampled by an earlier run. None if there is none."""
    finish_reason: FinishReason | None = None
    """Finish reason of a response that the environment has not answered yet. None if there is no such response."""

    def num_tokens(self, response: ResponseSoFar) -> int:
        """Return the number of sampled tokens, including tokens of the response that is being sampled."""
        return self.sample.response_length + len(self.so_far) + len(response)

    def state_dict(self, response: ResponseSoFar) -> dict[str, Any]:
        """Return tensors and plain values for a checkpoint.

        Args:
            response: tokens that the engine has sampled for `request`.
        """
        so_far = self.so_far.followed_by(response)
        return {
            "trajectory": self._trajectory(),
            "episode": self.sample.episode,
            "is_finished": self.is_finished,
            "stops": self.stops,
            "finish_reason": self.finish_reason,
            "token_ids": torch.from_numpy(so_far.token_ids.astype(np.int64)),
            "logprobs": torch.from_numpy(so_far.logprobs.copy()),
            "weight_versions": [list(span) for span in so_far.weight_versions],
        }

    def _trajectory(self) -> dict[str, Any]:
        """Return the state of the trajectory, which later turns do not change."""
        inputs = self.sample.row_inputs
        has_images = inputs is not None and inputs.images is not None  # observations may have added some
        stored = self.sample if has_images else replace(self.sample, row_inputs=None)  # others are those of the prompt
        return stored.state_dict() | {
            "extra_env_info": self.sample.extra_env_info,
            "turn_rewards": list(self.sample.turn_rewards),
            "step_rewards": list(self.sample.step_rewards),
            "reward_components": dict(self.sample.reward_components),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], start: Trajectory) -> "SampleProgress":
        """Rebuild a sample from its `state_dict`.

        Args:
            start: The same sample before its first turn, with the values of the prompt.
        """
        sample = Trajectory.from_state(state["trajectory"])
        sample.group_index, sample.chat = start.group_index, start.chat
        sample.row_inputs = sample.row_inputs or start.row_inputs
        sample.episode = state["episode"]
        so_far = ResponseSoFar(
            state["token_ids"].numpy().astype(np.int32),
            state["logprobs"].numpy(),
            [VersionSpan(*span) for span in state["weight_versions"]],
        )
        return cls(
            sample,
            is_open=True,
            is_finished=state["is_finished"],
            stops=state["stops"],
            so_far=so_far,
            finish_reason=state["finish_reason"],
        )


def num_stored_tokens(state: Mapping[str, Any]) -> int:
    """Return the number of sampled tokens in a state of `SampleProgress`."""
    sample = state["trajectory"]
    logs = [sample["message_log"], *(branch["message_log"] for branch in sample.get("branches", ()))]
    return sum(map(num_written_tokens, logs)) + len(state["token_ids"])


@dataclass(eq=False)
class GroupProgress:
    """State of the samples of one prompt while they are sampled."""

    stored: Sequence[Mapping[str, Any] | None] = ()
    """States of the samples in a checkpoint. A sample without a state starts from its prompt. Empty means no states."""
    samples: list[SampleProgress] = field(default_factory=list)
    """Samples of the group. Empty until `begin` is called."""
    rollouts: Rollouts | None = None
    """The finished, post-processed samples. None before the group is finished."""

    def begin(self, starts: Sequence[Trajectory]) -> list[SampleProgress]:
        """Begin to sample the group, and return its samples. A stored sample continues from its state.

        Args:
            starts: the samples before their first turn.
        """
        states, self.stored = self.stored or [None] * len(starts), ()
        self.samples = [
            SampleProgress(start) if state is None else SampleProgress.from_state(state, start)
            for state, start in zip(states, starts, strict=True)
        ]
        return self.samples

    def forget(self) -> None:
        """Discard the stored states, so that the next `begin` starts from the prompt."""
        self.stored, self.samples = (), []


@dataclass(frozen=True)
class StoredSamples:
    """The samples of an unfinished group, for a checkpoint."""

    states: list[Mapping[str, Any] | None]
    """States of the samples, as in `GroupProgress.stored`."""
    num_lost_tokens: int
    """Number of sampled tokens that the samples without a state had."""

    def without_states(self) -> "StoredSamples":
        """Return the group without states, so that all of its samples start from the prompt."""
        num_stored = sum(num_stored_tokens(state) for state in self.states if state is not None)
        return StoredSamples([], self.num_lost_tokens + num_stored)


async def states_of(
    groups: Sequence[GroupProgress], generation: GenerationInterface, can_continue: Callable[[Trajectory], bool]
) -> list[StoredSamples | None]:
    """Return the samples of groups for a checkpoint, without interrupting them.

    Args:
        can_continue: Function that tells whether a sample's episode can continue in another process.

    Returns:
        The samples of each group, or None for a finished group. A sample has no state if its episode was not opened or
        cannot continue, or if a checkpoint cannot store the episode's metadata. It also has no state if its request has
        bad words, because an engine recognizes them only if it samples the whole response.
    """
    responses: dict[int, tuple[GenerationRequest, ResponseSoFar]] = {}
    for _ in range(_MOST_ROUNDS):
        waiting = [sample.request for group in groups for sample in group.samples if sample.request is not None]
        asked = [request for request in waiting if id(request) not in responses]
        if not asked:
            break
        found = await generation.responses_so_far(asked)
        # # A request that was answered in the meantime is not asked for again, because its sample has the answer.
        responses |= {id(r): (r, so_far) for r, so_far in zip(asked, found, strict=True) if so_far is not None}
        await asyncio.sleep(0)
    so_far = {key: response for key, (_, response) in responses.items()}
    return [_stored(group, so_far, can_continue) for group in groups]


def _stored(
    group: GroupProgress, responses: Mapping[int, ResponseSoFar], can_continue: Callable[[Trajectory], bool]
) -> StoredSamples | None:
    if group.rollouts is not None:
        return None
    if not group.samples:
        return StoredSamples(list(group.stored), 0)
    states: list[Mapping[str, Any] | None] = []
    num_lost_tokens = 0
    for sample in group.samples:
        response = responses.get(id(sample.request), ResponseSoFar.nothing())
        state = sample.state_dict(response) if _can_continue(sample, can_continue) else None
        if state is None or not is_plain(state):
            state = None
            num_lost_tokens += sample.num_tokens(response)
        states.append(state)
    return StoredSamples(states, num_lost_tokens)


def _can_continue(sample: SampleProgress, can_continue: Callable[[Trajectory], bool]) -> bool:
    if sample.is_finished:
        return True
    has_bad_words = sample.request is not None and bool(sample.request.sampling.bad_words)
    return sample.is_open and not has_bad_words and can_continue(sample.sample)
