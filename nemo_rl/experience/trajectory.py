"""The carrier of one rollout: what was said, what it earned, how it ended.

Invariant: a failed rollout is data. Its outcome says what failed, it carries no reward, and it is masked from the loss;
a reward of zero always means that the grader said zero.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from nemo_rl.data.interfaces import Chat, Message, RowInputs
from nemo_rl.data.messages.content import content_text
from nemo_rl.models.generation.interfaces import VersionSpan


class Outcome(StrEnum):
    """How a rollout ended."""

    FINISHED = "finished"
    TRUNCATED = "truncated"
    REWARD_ERROR = "reward_error"
    PROMPT_TOO_LONG = "prompt_too_long"


def is_right(reward: float | None) -> bool:
    """Whether an answer with this reward counts as right in training metrics: it is above 0."""
    return reward is not None and reward > 0


@dataclass
class Trajectory:
    """One sample's message log with its reward.

    Attributes:
        group_index: which prompt of the step, from 0; samples of a group share it.
        sample_index: which of the prompt's generations, from 0.
        idx: row of the prompt in its data set.
        task_name: environment that graded it.
        message_log: messages with `role`, `content`, `token_ids` [t] int64; assistant turns also
            `generation_logprobs` [t] float32.
        prompt_length: tokens before the first response.
        loss_multiplier: weight from the data set, 0 masks the sample.
        reward: total over turns; None when it could not be computed.
        reward_components: named parts of the reward, for multi-reward environments.
        outcome: how it ended.
        error: text of what failed.
        answer: answer the grader extracted.
        weight_versions: which weights wrote the response turns; spans start at positions of the whole sequence.
        num_turns: response turns.
        extra_env_info: the environment's metadata after the last turn.
        episode: its last metadata that was not None, with which the episode is closed.
        chat: what the prompt was rendered from; None where the data does not say.
        row_inputs: what the model reads next to the tokens; None for most data.
        num_control_token_observations: observations whose texts hold control tokens.
        generation_s: seconds spent waiting for the engine.
        environment_s: seconds spent waiting for the environment.
    """

    group_index: int
    sample_index: int
    idx: int
    task_name: str
    message_log: list[Message]
    prompt_length: int
    loss_multiplier: float = 1.0
    reward: float | None = None
    reward_components: dict[str, float] = field(default_factory=dict)
    outcome: Outcome = Outcome.FINISHED
    error: str | None = None
    answer: str | None = None
    weight_versions: list[VersionSpan] = field(default_factory=list)
    num_turns: int = 0
    extra_env_info: Any = None
    episode: Any = None
    chat: Chat | None = None
    row_inputs: RowInputs | None = None
    num_control_token_observations: int = 0
    generation_s: float = 0.0
    environment_s: float = 0.0

    @property
    def length(self) -> int:
        """All tokens, prompt included."""
        return sum(message["token_ids"].numel() for message in self.message_log)

    @property
    def response_length(self) -> int:
        """Tokens written by the policy."""
        return sum(m["token_ids"].numel() for m in self.message_log if "generation_logprobs" in m)

    @property
    def has_reward(self) -> bool:
        """Whether the sample may enter baselines and the loss."""
        return self.reward is not None and self.loss_multiplier > 0

    @property
    def response_text(self) -> str:
        """The policy's turns as text."""
        return "".join(content_text(m["content"]) for m in self.message_log if "generation_logprobs" in m)

    @property
    def prompt_text(self) -> str:
        """The messages before the first response as text."""
        written = (number for number, m in enumerate(self.message_log) if "generation_logprobs" in m)
        return "".join(content_text(m["content"]) for m in self.message_log[: next(written, None)])

    @property
    def turns(self) -> list[Message]:
        """The messages without tokens: `role` and `content`."""
        return [{"role": m["role"], "content": m["content"]} for m in self.message_log]


@dataclass
class Rollouts:
    """Trajectories of one collection, or of several.

    Attributes:
        trajectories: ordered by group, then sample.
        metrics: what environments and sources have to tell about them.
    """

    trajectories: list[Trajectory]
    metrics: dict[str, float] = field(default_factory=dict)
