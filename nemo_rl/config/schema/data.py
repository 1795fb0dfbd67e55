"""Define the keys of `data`: data sets for training and validation, and the conversion of rows to prompts.

Invariant: a key that an entry of `train` or `validation` omits comes from `data.default`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, PrivateAttr, Tag

from nemo_rl.config.base.names import EPISODES, GENERATED_DATASETS, HAVE_IMAGE_FILES, SHAPES
from nemo_rl.config.base.section import Section, Seed, derived
from nemo_rl.config.base.value_types import (
    Amount,
    AmountOrZero,
    Count,
    Factor,
    FactorOrZero,
    Number,
    Tokens,
    WorkersOrNone,
)
from nemo_rl.utils.errors import ConfigError


class CurriculumPhase(Section):
    """Weights of the data sets, starting at a step."""

    from_step: AmountOrZero
    """Number of finished steps after which prompts are drawn with these weights; 0 for the first phase."""
    weights: dict[str, FactorOrZero]
    """Weight of each data set by name, like data.train.weight; 0 draws no prompts from it."""


class AccuracyRuleConfig(Section):
    """Draw more prompts from data sets whose share of solved samples is close to the target."""

    target: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of solved samples at which a data set keeps its whole weight. The weight falls linearly to 0 at the
    accuracy farthest from the target, 0 or 1."""
    min_share: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Smallest share of the prompts for each data set with a weight above 0, even if it is solved."""
    average_over: Count = 64
    """Number of groups over which the recent accuracy of a data set is averaged; older groups have less weight."""
    solved_above: Number = 0.0
    """A sample is solved if its reward is above this value."""


class CurriculumConfig(Section):
    """Weights of data sets that change during the run."""

    phases: list[CurriculumPhase] = Field(default_factory=list)
    """Weights by step, instead of data.train.weight."""
    interpolation: Literal["none", "linear"] = "none"
    """none: the weights of a phase apply until the next phase; linear: the weights of a phase change linearly, over its
    steps, to those of the next phase, and the last weights stay."""
    accuracy: AccuracyRuleConfig | None = None
    """Weights by recent accuracy, multiplied by those of the phases or of data.train.weight; null: no such weights."""


Operand = Annotated[int, Field(ge=-(10**15), le=10**15)]
"""A number in a generated problem. Its bound keeps sums exact for every tokenizer and verifier."""

_DATA_FILES = (".jsonl", ".json", ".parquet", ".csv", ".arrow")
_MEDIA = "multimodal data"
_LOADERS = "one data loader per data set (for shares of data sets set data.train.<i>.weight)"


class DatasetDefaults(Section):
    """Values of keys that entries of data.train and data.validation do not set."""

    later: ClassVar[dict[str, str]] = {
        "allowed_problem_types": _MEDIA,
        "min_generation_tokens": "a reserve of tokens for the answer",
        "num_frames": _MEDIA,
        "video_maintain_aspect_ratio": _MEDIA,
        "video_sampling_style": _MEDIA,
        "video_target_num_patches": _MEDIA,
        "video_temporal_patch_size": _MEDIA,
    }
    dataset_name: str | None = None
    """A built-in data set, ResponseDataset for data_path, or the dotted path of a class."""
    data_path: str | None = None
    """A local JSONL, JSON, Parquet, CSV or Arrow file, or a hub id."""
    download_dir: str | None = None
    """Folder with the image files of refcoco (train2014 of COCO) or mmpr-tiny (its images); null: the folder of
    data_path."""
    subset: str | None = None
    """Configuration name of a hub data set."""
    split: str | None = None
    """Split of a hub data set; null: its default."""
    split_validation_size: Annotated[int, Field(ge=0, le=1e12, strict=True)] | Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Training rows reserved for validation: a share if the value is below 1, otherwise a number."""
    max_samples: Amount | None = None
    """Largest number of rows, drawn at random by seed before split_validation_size reserves any; null: all rows."""
    repeat: Count = 1
    """Number of times that all rows are repeated, one complete copy after another, so that validation averages over
    several answers to a prompt. Rows reserved by split_validation_size occur once."""
    weight: Factor | None = None
    """Weight of this entry of data.train: its share of the prompts of each step, relative to the sum of all weights;
    null for all entries: their rows are shuffled together."""
    name: Annotated[str, Field(pattern=r"^[\w-]+$")] | None = None
    """Name of the data set in data.curriculum and in metrics; null: the first of env_name, dataset_name and data_path
    that distinguishes all training entries. Validation rows with a name are reported separately: under
    validation/<name>/ (GRPO, PPO and distillation) or validation-<name>/ (SFT, DPO and reward models)."""
    seed: Seed = 42
    """Seed of the split and of generated tasks."""
    input_key: str | None = None
    """Column of the question; null: the column of the data set, or input."""
    output_key: str | None = None
    """Column of the answer; null: the column of the data set, or output."""
    data_files: list[str] | str | None = None
    """For arrow_text, instead of data_path: local files, or patterns with wildcards."""
    text_key: str | None = None
    """Column of the text, for arrow_text; null: text."""
    characters_per_sample: Amount | None = None
    """For arrow_text: a longer text becomes several samples of at most this number of characters; null: one sample."""
    chat_key: str | None = None
    """Column of the messages, for openai_format; null: messages."""
    system_key: str | None = None
    """Column of a system message, for openai_format."""
    system_prompt: str | None = None
    """System message of rows without one (openai_format)."""
    tool_key: str | None = None
    """Column of the tool descriptions, for openai_format; null: tools."""
    prompt_key: str | None = None
    """Column of the prompt of a pair; null: prompt."""
    chosen_key: str | None = None
    """Column of the preferred answer; null: chosen."""
    rejected_key: str | None = None
    """Column of the rejected answer; null: rejected."""
    margin_key: str | None = None
    """Column with the reward by which the preferred answer of a pair should lead; null: none."""
    label_key: str | None = None
    """Column that says whether an answer is desirable, for BinaryFeedbackDataset; null: label."""
    scores_key: str | None = None
    """Column with a mapping from attributes to scores, for data sets of scored answers; null: each attribute is a
    column of its own, or a key of the column scores."""
    steps_key: str | None = None
    """Column with the list of an answer's steps, for data sets of labelled steps; null: completions."""
    labels_key: str | None = None
    """Column with the list of true or false for the steps, for data sets of labelled steps; null: labels."""
    env_name: str | None = "math"
    """Environment that rewards answers, one of env."""
    processor: str | None = "math_hf_data_processor"
    """Function that converts a row to a prompt."""
    prompt_file: str | None = None
    """Text file with one {} for the question; null: only the question."""
    system_prompt_file: str | None = None
    """Text file with the system message; null: none."""
    num_samples: Amount | None = None
    """Number of generated rows, only for the arithmetic data sets and shapes (null: 10,000 for training, 256 for
    validation) and for episodes (null: 1,000,000 and 256)."""
    min_operand: Operand = 10
    """Smallest number in a problem, only for arithmetic data sets."""
    max_operand: Operand = 99
    """Largest number in a problem, only for arithmetic data sets."""


class DatasetConfig(DatasetDefaults):
    """One data set. Omitted keys come from data.default."""

    inherits: ClassVar[str] = "data.default"
    decided_by: ClassVar[str] = "dataset_name"

    @classmethod
    def without_effect(cls, values: Mapping[str, Any]) -> Mapping[str, str]:
        """Report the keys of generated problems, and of folders of images, if the data set has none."""
        name = values.get("dataset_name")
        has_files = name in HAVE_IMAGE_FILES or (isinstance(name, str) and "." in name)
        own = {} if has_files else {"download_dir": "data sets are cached by Hugging Face"}
        return {**super().without_effect(values), **numbers_without_effect(name), **own}


def numbers_without_effect(dataset_name: Any) -> dict[str, str]:
    """Return the keys of generated problems that have no effect for this data set, with the reason."""
    if not isinstance(dataset_name, str | None) or dataset_name in GENERATED_DATASETS:
        return {}
    numbers = dict.fromkeys(("min_operand", "max_operand"), "only arithmetic data sets generate problems")
    if dataset_name in (EPISODES, SHAPES):
        return numbers
    return {**numbers, "num_samples": "only arithmetic data sets, shapes and episodes generate rows"}


def _one_or_many(value: object) -> str:
    return "many" if isinstance(value, list) else "one"


DatasetEntries = Annotated[
    Annotated[DatasetConfig, Tag("one")] | Annotated[list[DatasetConfig], Tag("many")],
    Discriminator(_one_or_many),
]


def _as_default(key: str) -> str:
    return f"write data.default.{key} (all data sets) or data.train.{key}"


type InRows = Literal["report", "allow", "as_text", "leave_out"]
type FromTools = Literal["as_text", "as_tokens"]
IN_ROWS = (
    "Rows whose texts hold control tokens such as <|im_end|>: report counts the rows and encodes the tokens as such, "
    "allow does so without a report, as_text encodes them as ordinary text, leave_out counts the rows as unusable."
)
FROM_TOOLS = (
    "Control tokens in texts of environments and tools (observations, messages of the role tool in rows): as_text "
    "encodes them as ordinary text, which cannot end or begin a turn; as_tokens encodes them as the tokens."
)


type LeftOut = Literal["messages", "reasoning", "tool_calls", "call_ids", "tools", "tool_descriptions"]
MAY_LEAVE_OUT: tuple[LeftOut, ...] = ("reasoning", "call_ids", "tool_descriptions")
LEAVE_OUT = (
    "Parts of rows that the chat template may leave out: reasoning (also of earlier turns only), call_ids (ids of tool "
    "calls), tool_descriptions (texts about tools and arguments), tools (their names and those of arguments), "
    "tool_calls, messages (texts of roles it does not know). A row is unusable if another part of it is absent in the "
    "rendered chat."
)


class ImagesConfig(Section):
    """Limits on the images of rows, for a policy that reads images. A row with an image beyond them is unusable."""

    allow_urls: bool = False
    """Download images from http and https addresses in rows."""
    max_megapixels: Factor = 64.0
    """Largest number of millions of pixels of an image."""
    max_megabytes: Factor = 64.0
    """Largest size of an image file in millions of bytes."""


class DataConfig(Section):
    """Training and validation data."""

    place: ClassVar[str] = "data"
    later: ClassVar[dict[str, str]] = {
        "custom_dataloader": "a user's data loader",
        "num_prompts_per_dataloader": _LOADERS,
        "use_multiple_dataloader": _LOADERS,
    }
    ignored: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("add_bos", "add_eos", "add_generation_prompt"), "chat templates form the prompts"),
        "add_system_prompt": "NeMo RL does not read it either; see system_prompt_file",
    }
    moved: ClassVar[dict[str, str]] = {
        "dataset_name": "write data.train.dataset_name",
        "train_data_path": "write data.train.data_path",
        "val_dataset_name": "write data.validation.dataset_name",
        "val_data_path": "write data.validation.data_path",
        "val_data_paths": "write data.validation as a list of entries with name and data_path",
        "split": "write data.train.split",
        "seed": "write data.train.seed",
        "problem_key": "write data.train.input_key",
        "solution_key": "write data.train.output_key",
        "input_key": "write data.train.input_key",
        "output_key": "write data.train.output_key",
        "prompt_file": _as_default("prompt_file"),
        "system_prompt_file": _as_default("system_prompt_file"),
        "env_name": _as_default("env_name"),
        "processor": _as_default("processor"),
    }

    @classmethod
    def without_effect(cls, values: Mapping[str, Any]) -> Mapping[str, str]:
        """Report old keys without an effect: null values, and dataset_name if train is also written."""
        written = {key: place for key, place in cls.moved.items() if key in values}
        dead = {key for key in written if values[key] is None} | ({"dataset_name"} if values.get("train") else set())
        return {**super().without_effect(values), **{key: place for key, place in written.items() if key in dead}}

    train: DatasetEntries | None = None
    """Training data: one entry, or a list of entries that are mixed."""
    validation: DatasetEntries | None = None
    """Validation data: one entry, a list, or null."""
    default: DatasetDefaults = Field(default_factory=DatasetDefaults)
    """Values of keys that entries omit."""
    curriculum: CurriculumConfig | None = None
    """Weights of the entries of train that change during the run; null: the weights do not change."""
    max_input_seq_length: Tokens | None = derived("${policy.max_total_sequence_length}")
    """Largest number of tokens of a prompt. Longer prompts are cut and excluded from the loss. null: no limit."""
    shuffle: bool = True
    """Draw training prompts in a seeded random order."""
    num_workers: WorkersOrNone = 1
    """Number of processes that prepare prompts; 0: the driver prepares them."""
    max_bad_row_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of unusable rows above which a data set is refused."""
    control_tokens_in_rows: InRows = Field(default="report", description=IN_ROWS)
    control_tokens_from_tools: FromTools = Field(default="as_text", description=FROM_TOOLS)
    template_may_leave_out: list[LeftOut] = Field(default=list(MAY_LEAVE_OUT), description=LEAVE_OUT)
    images: ImagesConfig = Field(default_factory=ImagesConfig)
    """Limits on images."""

    _has_user_data: bool = PrivateAttr(default=False)

    @property
    def has_user_data(self) -> bool:
        """Return True if a program passes the data. Entries then do not name data."""
        return self._has_user_data

    def with_user_data(self) -> "DataConfig":
        """Return this section for data that a program passes instead of `train` and `validation`.

        Raises:
            ConfigError: weights or a curriculum belong to the data sets that are replaced.
        """
        if self.has_shares:
            raise ConfigError(
                "data.train.<i>.weight and data.curriculum are for the data sets of data.train, but the program passes "
                "its own training data. Leave them out, or let the run load data.train."
            )
        own = self.model_copy(update={"train": None, "validation": None})
        own._has_user_data = True
        return own

    @property
    def train_entries(self) -> list[DatasetConfig]:
        """The training entries, as a list."""
        return _listed(self.train)

    @property
    def train_names(self) -> list[str]:
        """The name of each training entry (`DatasetDefaults.name`)."""
        entries = self.train_entries
        kinds = ([getattr(entry, key) for entry in entries] for key in ("env_name", "dataset_name", "data_path"))
        told_apart = (names for values in kinds if len(set(names := list(map(_short, values))) - {""}) == len(entries))
        derived = next(told_apart, [f"train_{index}" for index in range(len(entries))])
        return [entry.name or name for entry, name in zip(entries, derived, strict=True)]

    @property
    def has_shares(self) -> bool:
        """Return True if training entries have shares. Otherwise, all rows are shuffled together."""
        return self.curriculum is not None or any(entry.weight is not None for entry in self.train_entries)

    @property
    def validation_entries(self) -> list[DatasetConfig]:
        """The validation entries, as a list."""
        return _listed(self.validation)


def _short(value: str | None) -> str:
    """Return the last part of a dotted path, or a file's name without folder and ending."""
    text = value or ""
    last = Path(text).stem if "/" in text or Path(text).suffix in _DATA_FILES else text.rpartition(".")[2]
    return re.sub(r"[^\w-]", "_", last)


def _listed(entries: DatasetConfig | list[DatasetConfig] | None) -> list[DatasetConfig]:
    if entries is None:
        return []
    return entries if isinstance(entries, list) else [entries]
