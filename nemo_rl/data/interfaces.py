"""Define the types that data sets, processors, collate functions and rollouts share.

Invariant: each type declares all its fields with their meaning, and code adds no other keys.
"""

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, Protocol, TypedDict

import torch
from transformers import PreTrainedTokenizerBase

from nemo_rl.config.schema.data import ImagesConfig
from nemo_rl.data.messages.content import Content, ImagePart, TextPart, TextRules, content_text
from nemo_rl.data.model_rows import RowInput, RowInputs
from nemo_rl.files.regular_file import read_text
from nemo_rl.utils.errors import DataError

__all__ = [
    "Chat",
    "Content",
    "DatumSpec",
    "FeedbackDatumSpec",
    "FlatMessagesType",
    "ImagePart",
    "LLMMessageLogType",
    "LabelledStepsDatumSpec",
    "Message",
    "PathLike",
    "PreferenceDatumSpec",
    "RowInput",
    "RowInputs",
    "ScoredDatumSpec",
    "TaskDataPreProcessFnCallable",
    "TaskDataProcessFnCallable",
    "TaskDataSpec",
    "TextPart",
    "TextRules",
    "TokenizerType",
    "content_text",
]

type Message = dict[str, Any]
"""One turn. It has `role` (system, user, assistant, environment, tool), `content` (a `Content`, for display) and
`token_ids` (1-D int64, on which training and sampling rely). Assistant turns of an engine also have
`generation_logprobs` (1-D float32), and training adds `token_loss_mask` (1-D int64). If the role does not decide
whether a turn counts in the loss, `counts` (bool) does. If engines report the experts of tokens, every message has
`routed_experts` `[t, L, k]` (`data.routed_experts`)."""

LLMMessageLogType = list[Message]
FlatMessagesType = dict[str, list[str] | torch.Tensor]
PathLike = str | os.PathLike[str]
TokenizerType = PreTrainedTokenizerBase


class Chat(TypedDict):
    """A prompt in the form of the chat template."""

    messages: list[Message]
    """Messages with `role` and `content`."""
    tools: list[dict[str, Any]] | None
    """Function schemas in OpenAI's form, or None if there are none."""
    template_kwargs: NotRequired[Mapping[str, Any]]
    """Variables for the chat template, in addition to those of the tokenizer."""


class DatumSpec(TypedDict):
    """One prompt, ready for a rollout."""

    message_log: LLMMessageLogType
    length: int
    """Number of prompt tokens in `message_log`."""
    extra_env_info: dict[str, Any] | None
    """Data that the environment needs to grade the answer, e.g. `ground_truth`."""
    loss_multiplier: float
    """1.0, or 0.0 for a sample that is excluded from training because its prompt is too long."""
    idx: int
    """Index of the row in the data set that the loader iterates over."""
    task_name: NotRequired[str]
    """Name of the environment that grades the sample."""
    stop_strings: NotRequired[list[str] | None]
    chat: NotRequired[Chat]
    """Chat from which `message_log` was rendered. An environment's first observation is rendered with it."""
    row_inputs: NotRequired[RowInputs]
    """Inputs of the model in addition to the tokens, for example pixel values (`data.model_rows`)."""
    effort: NotRequired[str]
    """Level of effort (`data.effort_levels`)."""
    fault: NotRequired[str]
    """Reason why the row cannot be used, in a datum that replaces the row."""


class PreferenceDatumSpec(TypedDict):
    """A chosen and a rejected conversation with a common start."""

    message_log_chosen: LLMMessageLogType
    message_log_rejected: LLMMessageLogType
    length_chosen: int
    length_rejected: int
    loss_multiplier: float
    idx: int
    margin: NotRequired[float]
    """Amount by which the reward of the chosen conversation should exceed that of the rejected one."""
    row_inputs_chosen: NotRequired[RowInputs]
    """Further inputs of `message_log_chosen`, as in `DatumSpec.row_inputs`."""
    row_inputs_rejected: NotRequired[RowInputs]
    fault: NotRequired[str]
    """Reason why the row cannot be used, as in `DatumSpec.fault`."""


class FeedbackDatumSpec(DatumSpec):
    """A conversation whose last message is labelled good or bad."""

    desirable: bool


class ScoredDatumSpec(DatumSpec):
    """A conversation whose last message has scores."""

    scores: list[float | None]
    """Score of each attribute, None where the row has none."""


class LabelledStepsDatumSpec(DatumSpec):
    """A conversation whose last message consists of steps that are labelled right or wrong."""

    step_ends: list[int]
    """Index of the token after the last token of each step."""
    step_labels: list[bool]
    """Whether each step is right."""


@dataclass
class TaskDataSpec:
    """The texts that are added to the rows of a data set.

    Both files are read when the object is constructed. Their unchanged content is in `prompt` and `system_prompt`,
    which are None without a file.

    Raises:
        DataError: A file is missing, is not UTF-8, or is not a valid template for `str.format`.
    """

    task_name: str | None = None
    """Name of the task, which is also the name of the environment that grades the rows."""
    prompt_file: PathLike | None = None
    """Path of a UTF-8 text with one `{}` for the problem. As in `str.format`, literal braces are written twice."""
    system_prompt_file: PathLike | None = None
    """Path of a UTF-8 text that becomes the system message."""
    stop_strings: list[str] | None = None
    """Texts that end an answer, in addition to those of `policy.generation`."""
    text_rules: TextRules | None = None
    """Rules that choose texts to encode as ordinary text. If None, `TextRules()`."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Function schemas that every prompt offers, in addition to those of its row."""
    may_leave_out: Collection[str] | None = None
    """Parts of a row that the chat template may leave out. If None, `MAY_LEAVE_OUT`."""
    keeps_rows: bool | None = None
    """Whether `extra_env_info` of a prompt contains the columns of the row."""
    image_limits: ImagesConfig | None = None
    """Limits on the images of rows. If None, the default ones."""
    prompt: str | None = field(default=None, init=False)
    system_prompt: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Read the two files."""
        self.prompt = _read_text("prompt_file", self.prompt_file)
        self.system_prompt = _read_text("system_prompt_file", self.system_prompt_file)

    @property
    def rules(self) -> TextRules:
        """Return `text_rules`, or the default rules if it is None."""
        return self.text_rules or TextRules()

    @property
    def images(self) -> ImagesConfig:
        """Return `image_limits`, or the default limits if it is None."""
        return self.image_limits or ImagesConfig.build()

    def copy_defaults(self, from_spec: "TaskDataSpec") -> None:
        """Set each attribute that is None to its value in `from_spec`."""
        for attribute in dataclasses.fields(self):
            if getattr(self, attribute.name) is None:
                setattr(self, attribute.name, getattr(from_spec, attribute.name))

    def format_problem(self, problem: str) -> str:
        """Insert a problem into the prompt template, or return the problem unchanged if there is no template.

        Raises:
            DataError: The template has no `{}`, or contains single braces that are not `{}`.
        """
        if self.prompt is None:
            return problem
        try:
            text = self.prompt.format(problem)
        except (KeyError, IndexError, ValueError) as error:
            raise DataError(
                f"prompt_file {os.fspath(self.prompt_file or '')!r} cannot be filled in: {error!r}. "
                "It needs exactly one {} for the problem; write every other brace twice, "
                "as in \\boxed{{}}."
            ) from error
        if problem and problem not in text:
            raise DataError(
                f"prompt_file {os.fspath(self.prompt_file or '')!r} has no {{}} placeholder, "
                "so the problem would be lost. Put {} where the problem belongs."
            )
        return text


class TaskDataProcessFnCallable(Protocol):
    """Interface that converts a formatted row to a datum with token ids."""

    def __call__(
        self,
        datum_dict: dict[str, Any],
        task_data_spec: TaskDataSpec,
        tokenizer: TokenizerType,
        max_seq_length: int | None,
        idx: int,
    ) -> DatumSpec:
        """Return the datum, like the processors in `nemo_rl.data.processors`."""
        ...


TaskDataPreProcessFnCallable = Callable[[dict[str, Any]], dict[str, Any]]
"""Function that converts a raw row to a formatted row (`messages`, `task_name`)."""


def _read_text(key: str, path: PathLike | None) -> str | None:
    if path is None:
        return None
    try:
        return read_text(path)
    except UnicodeDecodeError as error:
        raise DataError(f"{key} {os.fspath(path)!r} is not UTF-8 text: {error}.") from error
    except OSError as error:
        raise DataError(
            f"{key} {os.fspath(path)!r} cannot be read ({error.strerror}). Relative paths start "
            f"at the current folder, {os.getcwd()!r}; null means no file."
        ) from error
