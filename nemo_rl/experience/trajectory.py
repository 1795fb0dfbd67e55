"""Define the trajectory of one sample: its messages, reward and outcome.

Invariant: a failed rollout is kept as data. Its outcome says what failed. It has no reward and is masked in the loss. A
reward of zero always means that the grader returned zero.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import pairwise
from typing import Any, Self

from nemo_rl.data.images.rows import from_state
from nemo_rl.data.interfaces import Chat, Message, RowInputs
from nemo_rl.data.messages.content import content_text
from nemo_rl.experience.branches import (
    Branch,
    StoredTokens,
    messages_state,
    num_tokens,
    num_written_tokens,
    spans_of_turns,
)
from nemo_rl.files.safe_load import is_plain
from nemo_rl.models.generation.interfaces import ServedBy, VersionSpan

_NOT_STORED = ("episode", "chat", "served_by", "stored", "branch")


class Outcome(StrEnum):
    """State in which a rollout ended."""

    FINISHED = "finished"
    TRUNCATED = "truncated"
    REWARD_ERROR = "reward_error"
    PROMPT_TOO_LONG = "prompt_too_long"


class Ending(StrEnum):
    """Cause of the end of an episode. The metric `ended_by_<value>` is the share of a cause."""

    ENVIRONMENT = "environment"
    """The environment ended the episode."""
    MAX_TURNS = "max_turns"
    """The limit `max_rollout_turns` was reached before the environment ended the episode."""
    TURN_TOKENS = "turn_tokens"
    """The last response was cut off at the token limit of a turn."""
    EPISODE_TOKENS = "episode_tokens"
    """The limit `max_episode_tokens` cut off the last response, or left no token for another one."""
    SEQUENCE_LENGTH = "sequence_length"
    """The sequence reached its limit: by a long prompt, a response that was cut off, or a long observation."""
    FAILURE = "failure"
    """The environment raised an error, or returned a result that cannot be used."""
    ABORT = "abort"
    """The environment missed its deadline, or its process died during the sample."""


def is_right(reward: float | None) -> bool:
    """Return whether a reward is above 0. Training metrics then count the answer as right."""
    return reward is not None and reward > 0


@dataclass
class Trajectory:
    """One sample's message log with its reward.

    Lengths, turns and positions refer to all conversations of the sample, concatenated: first `message_log`, then the
    branches. Tokens in several conversations are counted in each of them. Texts refer to `message_log` only.
    """

    group_index: int
    """Index of the prompt in the step, from 0. Samples of a group have the same index."""
    sample_index: int
    """Index of the sample among the prompt's samples, from 0."""
    idx: int
    """Index of the prompt in its data set."""
    task_name: str
    """Environment that graded the sample."""
    message_log: list[Message]
    """Messages with `role`, `content` and `token_ids` [t] int64. Assistant turns also have `generation_logprobs` [t]
    float32."""
    prompt_length: int
    """Number of tokens of `message_log` before the first response."""
    loss_multiplier: float = 1.0
    """Weight from the data set. 0 masks the sample."""
    reward: float | None = None
    """Sum of the rewards of all turns. None if it could not be computed."""
    turn_rewards: list[float] = field(default_factory=list)
    """Reward of each response turn. The sum is `reward`. Empty if no turn was rewarded."""
    step_rewards: list[list[tuple[int, float]]] = field(default_factory=list)
    """For each rewarded turn, the end of each of its steps, in tokens of the turn, and the step's reward. The list of a
    turn without steps is empty."""
    reward_components: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward, for multi-reward environments."""
    invalid_tool_call_turns: list[bool] = field(default_factory=list)
    """For each rewarded turn, whether it has a tool call that cannot be made."""
    penalties: dict[str, list[int]] = field(default_factory=dict)
    """For each penalty of the run, the numbers of the response turns to which it applies."""
    malformed_thinking: list[tuple[int, int]] = field(default_factory=list)
    """Start and end position of each misplaced thinking tag, in the concatenated conversations."""
    num_thinking_tokens: int | None = None
    """Number of thinking tokens in all turns. None if the sample was not reviewed."""
    effort: str | None = None
    """Level of effort of the prompt. None in a run without levels."""
    outcome: Outcome = Outcome.FINISHED
    """How the rollout ended."""
    ended_by: Ending = Ending.ENVIRONMENT
    """Cause of the end of the episode."""
    error: str | None = None
    """Description of the failure. None without a failure."""
    answer: str | None = None
    """Answer that the grader extracted from the text."""
    weight_versions: list[VersionSpan] = field(default_factory=list)
    """Versions of the weights that wrote the response turns. Spans start at positions in `message_log`."""
    num_turns: int = 0
    """Number of response turns."""
    num_prefix_hits: int = 0
    """Number of later turns that were sampled by an engine with the cached keys and values of their prefix."""
    served_by: ServedBy | None = None
    """Engine that wrote the last response turn, and the version of its weights."""
    extra_env_info: Any = None
    """The environment's metadata after the last turn."""
    episode: Any = None
    """The environment's last metadata that was not None. Closing the episode needs it."""
    chat: Chat | None = None
    """Messages and tools from which the prompt was rendered. None if the data does not contain them."""
    row_inputs: RowInputs | None = None
    """Inputs of the model besides the tokens. None for most data."""
    num_control_token_observations: int = 0
    """Number of observations whose texts contain control tokens."""
    agent_counts: dict[str, float] = field(default_factory=dict)
    """Number of each event between the sample's program and the endpoint. Empty without a program."""
    generation_s: float = 0.0
    """Seconds spent waiting for the engine."""
    environment_s: float = 0.0
    """Seconds spent waiting for the environment."""
    stored: StoredTokens | None = None
    """Location of tokens and texts in the object store. If None, they are in `message_log`."""
    branches: list[Branch] = field(default_factory=list)
    """Further conversations of the sample."""
    branch: int | None = None
    """Number of the conversation, in a row of a sample with branches (`rows.rows_of`). 0 is the sample's `message_log`.
    None if this is a sample."""

    def fail(self, reason: str, *, aborted: bool = False) -> None:
        """End the sample without a reward.

        Args:
            reason: Description of the failure.
            aborted: Whether the environment missed its deadline, or its process died.
        """
        self.outcome = Outcome.REWARD_ERROR
        self.ended_by = Ending.ABORT if aborted else Ending.FAILURE
        self.error = reason
        self.reward = None

    def state_dict(self) -> dict[str, Any]:
        """Return a finished sample's data for training and metrics, as tensors and plain values.

        Fields that only the episode needs (`episode`, `chat` and `served_by`) are left out, as is environment metadata
        that a checkpoint cannot store.

        Raises:
            DataError: the row has its own position rule, which is a function and cannot be stored.
        """
        state = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _NOT_STORED}
        return state | {
            "message_log": messages_state(self.message_log),
            "extra_env_info": self.extra_env_info if is_plain(self.extra_env_info) else None,
            "branches": [branch.state_dict() for branch in self.branches],
            "outcome": str(self.outcome),
            "ended_by": str(self.ended_by),
            "row_inputs": None if self.row_inputs is None else self.row_inputs.state_dict(),
            "weight_versions": [list(span) for span in self.weight_versions],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Rebuild a sample from its `state_dict`."""
        spans = [VersionSpan(*span) for span in state["weight_versions"]]
        stored = state.get("row_inputs")
        inputs = None if stored is None else from_state(stored)
        ended_by = Ending(state.get("ended_by", Ending.ENVIRONMENT))
        rebuilt = {
            "outcome": Outcome(state["outcome"]),
            "ended_by": ended_by,
            "weight_versions": spans,
            "row_inputs": inputs,
            "branches": [Branch.from_state(branch) for branch in state.get("branches", ())],
        }
        return cls(**{**state, **rebuilt})

    @property
    def conversations(self) -> list["Trajectory | Branch"]:
        """The conversations of the sample: the sample itself for its `message_log`, and its branches."""
        return [self, *self.branches]

    @property
    def logs(self) -> list[list[Message]]:
        """The messages of each conversation."""
        return [conversation.message_log for conversation in self.conversations]

    @property
    def all_weight_versions(self) -> list[VersionSpan]:
        """The weight versions of all conversations. Positions of each span refer to its own conversation."""
        return [span for conversation in self.conversations for span in conversation.weight_versions]

    @property
    def length(self) -> int:
        """Number of tokens of all conversations, including prompts."""
        return sum(map(num_tokens, self.logs)) if self.branches else num_tokens(self.message_log)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens (tokens before the first response), summed over all conversations."""
        return self.prompt_length + sum(branch.prompt_length for branch in self.branches)

    @property
    def response_length(self) -> int:
        """Number of tokens written by the policy."""
        return sum(map(num_written_tokens, self.logs)) if self.branches else num_written_tokens(self.message_log)

    @property
    def turn_spans(self) -> list[tuple[int, int]]:
        """Start and end position of each response turn in the concatenated conversations."""
        if not self.branches:
            return spans_of_turns(self.message_log)
        spans, start = [], 0
        for log in self.logs:
            spans += spans_of_turns(log, start)
            start += num_tokens(log)
        return spans

    @property
    def has_reward(self) -> bool:
        """True if baselines and the loss may include the sample."""
        return self.reward is not None and self.loss_multiplier > 0

    @property
    def is_penalized(self) -> bool:
        """True if a penalty applies to one of the turns."""
        return bool(self.penalties) and any(self.penalties.values())

    @property
    def penalized_reward(self) -> float | None:
        """The reward for training. A penalty limits it to at most 0, and never increases a reward."""
        return self.reward if self.reward is None else self.after_penalties(self.reward)

    @property
    def penalized_turn_rewards(self) -> list[float]:
        """Rewards of the turns, which sum to `penalized_reward`.

        Penalties are divided equally between the offending turns, or go to the last turn if none of these has a reward.
        """
        if self.reward is None or not self.turn_rewards or not self.is_penalized:
            return list(self.turn_rewards)
        rewards = list(self.turn_rewards)
        offending = sorted({turn for turns in self.penalties.values() for turn in turns if turn < len(rewards)})
        payers = offending or [len(rewards) - 1]
        for turn in payers:
            rewards[turn] -= max(self.reward, 0.0) / len(payers)
        return rewards

    @property
    def has_steps(self) -> bool:
        """True if steps of a turn have rewards of their own."""
        return any(self.step_rewards)

    @property
    def rewarded_spans(self) -> list[tuple[tuple[int, int], float]]:
        """Start, end and reward of each step, and of each turn without steps, in the concatenated conversations.

        The rewards are those of `penalized_turn_rewards`: the last step of a turn gets what the turn's reward has
        beyond the sum of its steps. It ends with the turn.
        """
        spans, rewards = self.turn_spans, self.penalized_turn_rewards
        rewards += [0.0] * (len(spans) - len(rewards))
        if not self.has_steps:
            return list(zip(spans, rewards, strict=False))
        of_turns = [*self.step_rewards, *([] for _ in spans)]
        return [
            part
            for span, reward, steps in zip(spans, rewards, of_turns, strict=False)
            for part in (_spans_of_steps(span, reward, steps) if steps else [(span, reward)])
        ]

    def after_penalties(self, value: float) -> float:
        """Return a reward, or a component of a reward, with penalties applied."""
        return min(value, 0.0) if self.is_penalized else value

    @property
    def response_text(self) -> str:
        """The policy's turns, as text."""
        return "".join(content_text(m["content"]) for m in self.message_log if "generation_logprobs" in m)

    @property
    def prompt_text(self) -> str:
        """The messages before the first response, as text."""
        written = (number for number, m in enumerate(self.message_log) if "generation_logprobs" in m)
        return "".join(content_text(m["content"]) for m in self.message_log[: next(written, None)])

    @property
    def turns(self) -> list[Message]:
        """The messages without tokens: `role` and `content`."""
        return [{"role": m["role"], "content": m["content"]} for m in self.message_log]

    @property
    def conversation(self) -> list[Message]:
        """The messages of `turns`, with the prompt's original messages in place of its rendered text if known."""
        if self.chat is None:
            return self.turns
        first = next((n for n, m in enumerate(self.message_log) if "generation_logprobs" in m), len(self.message_log))
        return [*self.chat["messages"], *self.turns[first:]]


def _spans_of_steps(
    turn: tuple[int, int], reward: float, steps: Sequence[tuple[int, float]]
) -> list[tuple[tuple[int, int], float]]:
    """Return span and reward of each step of a turn. Steps that end with the same token are one step."""
    start, end_of_turn = turn
    sums: dict[int, float] = {}
    for end, value in steps:
        sums[start + end] = sums.get(start + end, 0.0) + value
    bounds = [start, *list(sums)[:-1], end_of_turn]
    *earlier, _ = sums.values()
    return list(zip(pairwise(bounds), [*earlier, reward - sum(earlier)], strict=True))


@dataclass
class Rollouts:
    """Trajectories of one or several collections."""

    trajectories: list[Trajectory]
    """Trajectories ordered by group, then sample."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of environments and sources."""


@dataclass(frozen=True)
class RolloutLimits:
    """Limits of a rollout. `SamplingParams.max_new_tokens` limits the tokens of a single turn."""

    max_sequence_length: int
    """Largest number of tokens of the prompt and all turns."""
    max_turns: int
    """Largest number of response turns."""
    timeout_s: float
    """Time limit in seconds of a collection, or of a group that is sampled separately."""
    max_episode_tokens: int | None = None
    """Largest number of tokens that the policy writes in all turns. If None, there is no limit."""

    def room(self, sample: Trajectory) -> int:
        """Return the number of tokens that a sample's next response may have, without the limit per turn."""
        room = self.max_sequence_length - sample.length
        if self.max_episode_tokens is None:
            return room
        return min(room, self.max_episode_tokens - sample.response_length)

    def bound_of(self, sample: Trajectory) -> Ending:
        """Return the limit that a sample reached, if its last response was cut off."""
        if sample.length >= self.max_sequence_length:
            return Ending.SEQUENCE_LENGTH
        if self.max_episode_tokens is not None and sample.response_length >= self.max_episode_tokens:
            return Ending.EPISODE_TOKENS
        return Ending.TURN_TOKENS
