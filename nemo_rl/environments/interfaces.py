"""The interface of environments, and the results that their methods return.

A user implements `EnvironmentInterface`; the actor that hosts it turns its `EnvironmentReturn` into one `StepResult`
for each sample, which rollouts get from `workers.client`. Invariant: a sample whose reward could not be computed has
the reason in `errors`, so a reward without an error is always a computed one.
"""

import abc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

from torch import Tensor

if TYPE_CHECKING:
    from nemo_rl.data.interfaces import LLMMessageLogType, TokenizerType
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

MetadataT = TypeVar("MetadataT")


class EnvironmentReturn(NamedTuple, Generic[MetadataT]):  # noqa: UP046  (MetadataT is public)
    """Result of `step` for a batch of B samples."""

    observations: list[dict[str, Any]]
    """B messages with `role` and `content`, a text or a list of text parts. The conversation continues through the chat
    template, where the role "environment" is rendered as "user" and other roles ("tool") are unchanged. An observation
    of several messages also has a list `messages`, which is rendered in place of `role` and `content`."""
    metadata: list[MetadataT]
    """B items, each passed to the next `step` of the same sample. An item that is None is passed on as None."""
    next_stop_strings: list[list[str] | None] | list[None]
    """B lists of stop strings for the next turn only, which replace those of the prompt and are added to
    `policy.generation.stop_strings`; None keeps those of the prompt."""
    rewards: Tensor | dict[str, Tensor]
    """[B] float, or one such tensor for each named reward component."""
    terminateds: Tensor
    """[B] bool, True where the episode is over."""
    answers: list[str | None] | None = None
    """B extracted answers, each None if none was found, or None in place of the list if no answers are extracted."""
    errors: list[str | None] | None = None
    """B reasons why a sample's reward could not be computed, each None if it was computed. None if all were computed.
    The reward of a sample with a reason is ignored, and the sample does not train the model."""
    invalid_tool_calls: list[bool] | None = None
    """B values: True if the last turn has a tool call that cannot be made (`grpo.invalid_tool_call_advantage`).
    None if no turn has such a call."""
    step_rewards: list[list[tuple[int, float]] | None] | None = None
    """B lists of the steps of the last turn, or None for a turn without steps: the end of each step, as the number of
    characters of the turn's text up to it, and its reward. The last step also gets what `rewards` has beyond their sum.
    None if no turn has steps. Turns of agent programs have none."""


@dataclass(frozen=True)
class EpisodeStart(Generic[MetadataT]):  # noqa: UP046
    """Result of `open_episode`."""

    metadata: MetadataT
    """Metadata for the first `step`, which replaces the prompt's `extra_env_info`."""
    observation: dict[str, Any] | None = None
    """Message with `role` and `content` that is added to the prompt, or several messages in `messages` as in
    `EnvironmentReturn.observations`. None adds no message."""
    error: str | None = None
    """Reason why the episode could not be opened, or None. A sample with a reason is not played and does not train."""
    aborted: bool = False
    """With an error: whether the environment missed its deadline or died (True), or raised (False)."""


class EnvironmentInterface(abc.ABC, Generic[MetadataT]):  # noqa: UP046
    """Base of environments, which answer turns of a model and reward them.

    A subclass is a plain class, constructed inside a Ray actor with its section of the configuration (a dict). Only
    `step` is required; the other methods are called only if the class overrides them. All but `check_section` and
    `shutdown` may be coroutine functions. `step` should keep the state of an episode in `metadata`: when it raises for
    a batch, is too slow or crashes its process, it is called again for each sample alone, with copies of the original
    arguments, to find the sample that fails.
    """

    max_concurrent_steps: ClassVar[int] = 1
    """Number of calls of `step` that may run at the same time. If 1, calls run one after another on the main thread of
    their process. If more, `step` must be thread-safe. If `step` is a coroutine function, 1 means 1000."""
    steps_samples_alone: ClassVar[bool | None] = None
    """Whether each sample gets its own call of `step` (B is 1), so that a slow sample delays no other. At most
    `max_concurrent_steps` of these calls run at the same time. If False, samples whose turns end at the same moment
    share one call, and get their results when the slowest of them is finished. If None, the value is True for a
    coroutine function `step`, and False otherwise."""
    gives_answers: ClassVar[bool] = False
    """Whether `step` has the keyword argument `return_extracted_answer`."""
    reads_token_ids: ClassVar[bool] = False
    """Whether the messages that `step` gets also have their `token_ids`, [t] int64. If False, messages have only `role`
    and `content`, a text without special tokens."""
    config_class: ClassVar[type | None] = None
    """Dataclass or pydantic model that the environment's section has to fit, which is checked before Ray starts. If
    None, nothing is checked. The constructor gets the section as a dict in both cases."""
    post_processes_groups: ClassVar[bool] = False
    """Whether `global_post_process_and_metrics` is called for the samples of each prompt as soon as they are finished.
    If False, it is called once for all samples of a collection."""
    reads_chat: ClassVar[bool] = False
    """Whether conversations begin with the prompt's messages as they are in the data, for environments that render the
    messages again (a judge has its own chat template). If False, or if the data has no messages (`DatumSpec.chat`), the
    prompt is one message with the rendered text."""
    continues_episodes: ClassVar[bool | None] = None
    """Whether an episode can continue in another process, from its messages and `metadata` alone. A run that resumes
    from a checkpoint then continues its unfinished samples. If False, these samples start again from their prompts. If
    None, the value is True unless the class overrides `close_episode`, which releases resources of a process."""
    pooled: ClassVar[bool] = False
    """Whether the environment may run in several actors, `num_workers` of its section (default 1); all calls for an
    episode go to the same actor. If False, it runs in one actor, and the library ignores `num_workers`."""
    calls_own_code: ClassVar[bool] = False
    """Whether a class of the library calls functions of the user, which are tried out before engines start."""
    runs_agents: ClassVar[bool] = False
    """Whether `step` runs a program that samples from the policy itself, through an endpoint of the run. Each sample is
    then one call of `step` without a response before it, and its metadata (a dict) also has `agent` with the endpoint's
    address and a key. See `nemo_rl.agents.programs`."""

    @classmethod
    def check_section(  # noqa: B027  (optional hook)
        cls, section: Mapping[str, Any], place: str, tokenizer: "TokenizerType | None" = None
    ) -> None:
        """Refuse a section that the constructor would refuse. The driver calls this before it starts Ray.

        Args:
            section: section of the environment, which fits `config_class`.
            place: key of the section, for messages: `env.<name>`.
            tokenizer: tokenizer of the policy, or None in checks that read neither tokenizers nor data.

        Raises:
            ConfigError: a key of the section cannot be used.
        """

    @classmethod
    def offered_tools(cls, section: Any, tokenizer: "TokenizerType", place: str) -> list[dict[str, Any]]:
        """Return the function schemas of the tools that prompts of the environment offer to the model.

        Args:
            section: the section of the environment, which fits `config_class`.
            place: key of the section, for messages: `env.<name>`.

        Raises:
            ConfigError: a tool cannot be used.
        """
        return []

    @abc.abstractmethod
    def step(
        self,
        message_log_batch: list["LLMMessageLogType"],
        metadata: list[MetadataT],
    ) -> EnvironmentReturn[MetadataT]:
        """Answer and reward the last turn of B conversations.

        Args:
            message_log_batch: B conversations of messages with `role` and `content`.
            metadata: B items: in the first turn `extra_env_info` of the prompt or what `open_episode` returned, in
                later turns what the last `step` of the same sample returned.
        """

    def open_episode(self, metadata: MetadataT) -> EpisodeStart[MetadataT]:
        """Start the episode of one sample, before its first response.

        Args:
            metadata: `extra_env_info` of the prompt, with its `tools` if there are any. A dict also has `episode_seed`,
                an int for the random numbers of this sample's episode: samples of a prompt have different ones, and a
                resumed run has the same again.
        """
        return EpisodeStart(metadata)

    def close_episode(self, metadata: MetadataT) -> None:  # noqa: B027  (optional hook)
        """Release one sample that was finished, truncated, cancelled, that failed, or that could not be opened.

        Args:
            metadata: The sample's last metadata that was not None.
        """

    def global_post_process_and_metrics(
        self, batch: "BatchedDataDict[Any]"
    ) -> tuple["BatchedDataDict[Any]", dict[str, float | int]]:
        """Correct the rewards of a collection's samples where necessary, and compute metrics over them.

        The method is called once for each collection (a training step, or a batch of a validation or an evaluation). It
        gets the samples of this environment that have a reward, including those that were cut off. With
        `post_processes_groups` it is called once for each prompt instead, and metrics are averaged over the prompts.

        Args:
            batch: B samples: `rewards` [B] float32, or [B, C] for C named components; `total_reward` [B] float32;
                `is_end` [B] int64, 0 where the last response was cut off, and `truncated` [B] bool, its opposite;
                `generation_lengths` and `prompt_lengths` [B] int64, in tokens; lists of B: `text` (prompts as text),
                `message_log` (messages with `role` and `content`), `extra_env_info` (metadata of the last step),
                `idx` (rows of the data set).

        Returns:
            The batch, whose `rewards` are read again, and numbers to log as `<environment>/<name>`.
        """
        return batch, {}

    def shutdown(self) -> None:  # noqa: B027  (optional hook)
        """Release the resources of this object. The method is called once, before the actor stops."""


@dataclass(frozen=True)
class StepResult:
    """Result of one turn of one sample."""

    observation: dict[str, Any]
    """Message with `role` and `content`."""
    metadata: Any
    """Metadata for the next `step` of this sample."""
    reward: float | dict[str, float] | None
    """The reward, or a reward for each named component; None if it could not be computed."""
    terminated: bool
    """Whether the episode is over. After an error it always is."""
    next_stop_strings: list[str] | None = None
    """Stop strings for the next turn only, which replace those of the prompt; None keeps those of the prompt."""
    answer: str | None = None
    """The extracted answer, if the environment extracts answers."""
    error: str | None = None
    """Reason why `reward` is None: the environment raised, hung or died. None if there is a reward."""
    invalid_tool_call: bool = False
    """Whether the turn has a tool call that cannot be made."""
    step_rewards: Sequence[tuple[int, float]] = ()
    """End and reward of each step of the turn (`EnvironmentReturn.step_rewards`). Empty without steps."""
    aborted: bool = False
    """With an error: whether the environment hung or died (True), or raised (False)."""

    @classmethod
    def failed(cls, error: str, metadata: Any = None, *, aborted: bool = False) -> "StepResult":
        """Make the result of a sample whose reward could not be computed."""
        observation = {"role": "environment", "content": "Environment: not graded"}
        return cls(observation, metadata, reward=None, terminated=True, error=error, aborted=aborted)


def split_return(outcome: EnvironmentReturn[Any], num_samples: int, name: str) -> list[StepResult]:
    """Turn the outcome that an environment returned for a batch into one result for each sample.

    Raises:
        TypeError: The outcome is not an `EnvironmentReturn`.
        ValueError: A field does not have one item for each sample.
    """
    if not isinstance(outcome, EnvironmentReturn):
        raise TypeError(f"{name}.step returned {type(outcome).__name__}, and it must return an EnvironmentReturn")
    components = outcome.rewards if isinstance(outcome.rewards, dict) else {"": outcome.rewards}
    columns: dict[str, Any] = outcome._asdict() | {f"rewards {k}": v for k, v in components.items()}
    for field, column in columns.items():
        if column is not None and field != "rewards" and len(column) != num_samples:
            raise ValueError(f"{name}.step returned {len(column)} {field.strip()} for {num_samples} samples")
    rewards = {key: [float(value) for value in column] for key, column in components.items()}
    return [_one_result(outcome, row, rewards) for row in range(num_samples)]


def _one_result(outcome: EnvironmentReturn[Any], row: int, rewards: dict[str, list[float]]) -> StepResult:
    metadata = outcome.metadata[row]
    error = outcome.errors[row] if outcome.errors is not None else None
    values = {name: column[row] for name, column in rewards.items()}
    if error is None and not all(math.isfinite(value) for value in values.values()):
        error = f"the environment returned a reward that is not finite: {list(values.values())}"
    if error is not None:
        return StepResult.failed(error, metadata)
    terminated, stop_strings = bool(outcome.terminateds[row]), outcome.next_stop_strings[row]
    if not terminated:
        check_message(outcome.observations[row], "observations")
        if stop_strings is not None and not all(isinstance(text, str) for text in stop_strings):
            raise ValueError(f"next_stop_strings has {stop_strings!r}, which is neither None nor a list of texts")
    return StepResult(
        observation=outcome.observations[row],
        metadata=metadata,
        reward=values if isinstance(outcome.rewards, dict) else values[""],
        terminated=terminated,
        next_stop_strings=stop_strings,
        answer=outcome.answers[row] if outcome.answers is not None else None,
        invalid_tool_call=outcome.invalid_tool_calls is not None and bool(outcome.invalid_tool_calls[row]),
        step_rewards=_steps((outcome.step_rewards[row] if outcome.step_rewards is not None else None) or ()),
    )


def _steps(given: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return ends and rewards of steps as numbers.

    Raises:
        ValueError: An end is not larger than the one before it, or a reward is not finite.
    """
    steps = [(int(end), float(reward)) for end, reward in given]
    ends = [0, *(end for end, _ in steps)]
    if not all(before < end for before, end in pairwise(ends)) or not all(math.isfinite(each) for _, each in steps):
        raise ValueError(f"step_rewards has {steps!r:.200}, in which the ends must increase and rewards be finite")
    return steps


def check_message(message: Any, place: str) -> None:
    """Check that an environment returned a message.

    Raises:
        ValueError: `message` is not a dict with a text `role` and a `content`.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or message.get("content") is None:
        raise ValueError(f"{place} has {message!r:.200}, which is no dict with `role` and `content`")
