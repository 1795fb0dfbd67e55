"""List the names that keys accept: data sets (without importing their code) and parts of a run.

A key that selects a part accepts a built-in name or the dotted path of a class.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from nemo_rl.config.base.availability import NOT_BUILT
from nemo_rl.utils.errors import did_you_mean

ARITHMETIC = "arithmetic"
ARITHMETIC_SFT = "arithmetic_sft"
ARITHMETIC_PREFERENCE = "arithmetic_preference"
ARITHMETIC_SCORES = "arithmetic_scores"
ARITHMETIC_STEPS = "arithmetic_steps"
EPISODES = "episodes"
SHAPES = "shapes"
PROMPTS = "PromptDataset"
ROW = "row"
"""Key in a sample's metadata with the columns of its row, if the environment gets them."""
PLAIN_TEXT = "arrow_text"
NEMO_GYM_ROWS = "NemoGymDataset"
ARITHMETIC_PRODUCTS = "arithmetic_products"
GENERATED_DATASETS = {
    ARITHMETIC: "ResponseDataset",
    ARITHMETIC_PRODUCTS: "ResponseDataset",
    ARITHMETIC_SFT: "openai_format",
    ARITHMETIC_PREFERENCE: "BinaryPreferenceDataset",
    ARITHMETIC_SCORES: "ScoredAnswersDataset",
    ARITHMETIC_STEPS: "LabelledStepsDataset",
}
"""Data sets that generate their rows, with the data set that reads such rows from `data_path`."""

HAVE_IMAGE_FILES = ("refcoco", "mmpr-tiny")
"""Data sets whose rows name image files that are not part of the data set."""

RESPONSE_DATASET_NAMES: tuple[str, ...] = (
    "OpenMathInstruct-2",
    "DeepScaler",
    "DAPOMath17K",
    "DAPOMathAIME2024",
    "AIME2024",
    "AIME2025",
    "AIME2026",
    "gsm8k",
    "GSM8K",
    "NuminaMath-1.5",
    "OpenR1-Math-220k",
    "squad",
    "tulu3_sft_mixture",
    "open_assistant",
    "openai_format",
    PLAIN_TEXT,
    "humaneval",
    "mbpp",
    "code_contests",
    "CodeDataset",
    "clevr-cogent",
    "geometry3k",
    "refcoco",
    "mmpr-tiny",
    "ResponseDataset",
    PROMPTS,
    ARITHMETIC,
    ARITHMETIC_PRODUCTS,
    ARITHMETIC_SFT,
    EPISODES,
    SHAPES,
    NEMO_GYM_ROWS,
)
"""Built-in response data sets. `ResponseDataset` reads `data_path`. A dotted path names a user's class."""

PREFERENCE_DATASET_NAMES: tuple[str, ...] = (
    "HelpSteer3",
    "Tulu3Preference",
    "BinaryPreferenceDataset",
    "PreferenceDataset",
    ARITHMETIC_PREFERENCE,
)
"""Built-in preference data sets. The generic data sets read `data_path`."""

FEEDBACK_DATASET_NAMES: tuple[str, ...] = ("BinaryFeedbackDataset",)
"""Built-in data sets of single labelled answers, for KTO."""

SCORED_DATASET_NAMES: tuple[str, ...] = ("HelpSteer2", "ScoredAnswersDataset", ARITHMETIC_SCORES)
"""Built-in data sets of answers with numeric scores, for reward models with regression."""

STEP_DATASET_NAMES: tuple[str, ...] = ("math_shepherd", "prm800k", "LabelledStepsDataset", ARITHMETIC_STEPS)
"""Built-in data sets of answers with a label for each step, for process reward models."""

REWARD_DATASET_NAMES: Mapping[str, tuple[str, ...]] = {
    "bradley_terry": PREFERENCE_DATASET_NAMES,
    "regression": SCORED_DATASET_NAMES,
    "process": STEP_DATASET_NAMES,
}
"""Data sets by the type of the reward model that learns from them."""

PASS_K = "pass_k"

VALIDATION_METRICS: tuple[str, ...] = (
    "accuracy",
    "avg_length",
    "num_samples",
    "num_reward_errors",
    "truncation_rate",
    PASS_K,
)
"""Metrics of a validation that samples answers. pass_k exists only with several answers per prompt."""

VERSION_METRICS: tuple[str, ...] = ("min_weight_version", "max_weight_version")
"""Metrics of a validation during training: the oldest and newest weights that wrote answers."""

SFT_VALIDATION_METRICS: Mapping[str, str] = {"loss": "val_loss", "num_valid_samples": "num_valid_samples"}
"""Metrics of a validation of SFT, by their names in the loss."""

REVIEW_METRICS: tuple[str, ...] = ("malformed_thinking_rate", "mean_thinking_tokens", "penalized_")
"""Metrics of runs that search answers for thinking and penalties, or prefixes of their names."""

MACHINE_METRICS = "ray"
"""Prefix of the metrics of machines. Their steps are seconds, not steps of training."""
OVERRIDE_MARKER = "_override_"
"""Key with which a mapping replaces an inherited mapping as a whole."""

BUILT_IN_ENVIRONMENTS: tuple[str, ...] = (
    *("math", "reward", "math_default", "math_multi_reward", "code", "code_jaccard", "reward_model", "llm_judge"),
    *("sliding_puzzle_game", "blackjack", "gymnasium", "textarena", "reasoning_gym", "verifiers", "rag", "tools"),
    *("agent", "nemo_gym", "vlm", "clevr-cogent", "geometry3k", "refcoco"),
)
"""Environments of the library, as `nemo_rl.environments` registers them."""

NOT_BUILT_ENVIRONMENTS: tuple[str, ...] = ("mmau",)
"""Environments of NeMo RL that do not exist here. A user's environment may have these names."""

NOT_BUILT_DATASETS: tuple[str, ...] = (
    *("HelpSteer3", "Nemotron-Cascade-2-SFT-Math", "audiomcq", "avqa"),
    *("daily-omni", "general-conversation-jsonl", "intent-bench", "intent-train", "mmau"),
)
"""Data sets of NeMo RL that do not exist here, or not for every algorithm."""

OWN_CLASS = "the dotted path of a class"


@dataclass(frozen=True)
class PartName:
    """Restrict a key to built-in names and dotted paths."""

    names: tuple[str, ...]
    """Built-in names."""
    not_built: Mapping[str, str] = field(default_factory=dict)
    """Names of NeMo RL whose features do not exist here yet, with the feature."""

    @property
    def allowed(self) -> str:
        """Return the accepted values as text for the user."""
        return " or ".join([*self.names, OWN_CLASS])

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: str | None) -> str | None:
        if value is None or value in self.names or is_own_class(value):
            return value
        if value in self.not_built:
            raise PydanticCustomError("not_available", f"{NOT_BUILT}: {{feature}}", {"feature": self.not_built[value]})
        hint = did_you_mean(value, self.names).strip()
        problem = f"no such name ({hint[0].lower()}{hint[1:]})" if hint else "no such name"
        raise PydanticCustomError("part_name", "{problem}", {"problem": problem})


def is_own_class(name: str | None) -> bool:
    """Return whether a name is the dotted path of a user's class."""
    return name is not None and "." in name
