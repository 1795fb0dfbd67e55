"""Define the keys of `examples/run_eval.py`: a model, a data set, the sampling and the metric.

The section `generation` is that of training with the model's name added. Evaluation and training therefore start
engines in the same way.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from nemo_rl.config.base.section import Section, Seed, derived
from nemo_rl.config.base.value_types import Amount, AmountOrMinusOne, Count, FactorOrZero, Seconds, Tokens
from nemo_rl.config.schema.data import (
    FROM_TOOLS,
    IN_ROWS,
    FromTools,
    ImagesConfig,
    InRows,
    Operand,
    numbers_without_effect,
)
from nemo_rl.config.schema.model.endpoint import ModelEndpointConfig
from nemo_rl.config.schema.model.generation import EngineConfig, GenerationConfig, TopK
from nemo_rl.config.schema.model.policy import TokenizerConfig


class EvalEngineConfig(EngineConfig):
    """The engine of an evaluation."""

    max_model_len: Tokens = 2048
    """Context length of the engine in tokens, including prompt and answer."""
    precision: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Number format of weights and activations."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory that the engine may take."""


class EvalGenerationConfig(GenerationConfig):
    """The model and its sampling."""

    ignored: ClassVar[dict[str, str]] = {
        key: reason for key, reason in GenerationConfig.ignored.items() if key != "model_name"
    }

    idle: ClassVar[dict[str, str]] = {
        "colocated": "there is no policy next to the engines",
        **dict.fromkeys(("weight_sync", "lora_refit_mode"), "engines read the weights themselves"),
        **dict.fromkeys(("val_temperature", "val_top_k", "val_top_p"), "an evaluation samples in one way"),
    }

    model_name: str = "Qwen/Qwen2.5-Math-1.5B-Instruct"
    """Hub id or folder of the model. The folder of a checkpoint is <step folder>/policy/weights/model."""
    trust_remote_code: bool = False
    """Run the Python code in the folders of model and tokenizer (see policy.trust_remote_code)."""
    endpoint: ModelEndpointConfig | None = None
    """A model on another server, which is evaluated instead of model_name without engines, GPUs and a tokenizer; null:
    engines of the run load model_name."""
    zero_mismatch: bool = False
    """Compute answers and log-probabilities with bits that depend neither on num_prompts_per_step nor on the number of
    engines and the order of problems, on CPUs with backend=hf or vllm (see policy.zero_mismatch)."""
    num_prompts_per_step: AmountOrMinusOne = -1
    """Number of prompts that are sampled together and then written to save_path; -1: all prompts."""
    temperature: FactorOrZero = 0.0
    """Sampling temperature; 0 takes the most likely token."""
    top_k: TopK | None = -1
    """Sample from the k most likely tokens; null or -1: from all tokens."""
    max_new_tokens: Tokens = derived("${.engine.max_model_len}")
    """Largest number of tokens of an answer. Prompt and answer together end at max_model_len."""
    engine: EvalEngineConfig = Field(default_factory=EvalEngineConfig)
    """Keys that every engine reads."""


class EvalTokenizerConfig(TokenizerConfig):
    """The tokenizer and its chat template."""

    name: str = derived("${generation.model_name}")
    """Hub id or folder of the tokenizer."""


class EvalConfig(Section):
    """The metric, and the folder for answers."""

    moved: ClassVar[dict[str, str]] = {"pass_k_value": "write eval.k_value"}

    metric: Literal["pass@k", "cons@k"] = "pass@k"
    """The metric: pass@k is 1 if one of k answers is right; cons@k is 1 if the majority of k answers is right."""
    num_tests_per_prompt: Count = 1
    """Number of answers per prompt."""
    k_value: Count = 1
    """The k of the metric, at most num_tests_per_prompt."""
    seed: Seed = 42
    """Seed of the samples."""
    save_path: str | None = None
    """Folder for answers and results; null: nothing is written. An evaluation that is started again with the same
    folder continues."""
    max_rollout_turns: Count = 1
    """Largest number of turns of model and environment in a conversation."""
    signal_grace_s: Seconds = 600.0
    """Seconds after SIGTERM, SIGINT, SIGHUP or SIGUSR1 within which pending prompts must be answered and written to
    save_path. After that, the evaluation ends without them."""


class EvalDataConfig(Section):
    """The problems."""

    ignored: ClassVar[dict[str, str]] = {
        "num_workers": "prompts are prepared in the driver",
        "shuffle": "problems keep the order of the data set",
    }
    idle: ClassVar[dict[str, str]] = {
        "file_format": "the ending of the name decides; a format that disagrees with it is refused",
    }

    @classmethod
    def without_effect(cls, values: Mapping[str, Any]) -> Mapping[str, str]:
        """Report the keys of generated problems if the data set does not generate problems."""
        return {**super().without_effect(values), **numbers_without_effect(values.get("dataset_name"))}

    dataset_name: str | None = "aime2024"
    """A built-in data set, or the path of a local csv, json or jsonl file with problem_key and solution_key."""
    data_path: str | None = None
    """A local copy of the named data set: a file, or the folder of the hub repository."""
    subset: str | None = None
    """Configuration name of a hub data set; null: its default."""
    split: str | None = None
    """Split of a hub data set; null: its default."""
    problem_key: str | None = None
    """Column of the problem; null: the column of the data set."""
    solution_key: str | None = None
    """Column of the answer; null: the column of the data set."""
    file_format: Literal["csv", "json", "jsonl"] | None = None
    """Format of a local file, which must agree with the ending of its name."""
    prompt_file: str | None = None
    """Text file with one {} for the problem (without {} in multiple choice); null: no text."""
    system_prompt_file: str | None = None
    """Text file with the system message; null: none."""
    env_name: str = "math"
    """Environment that grades answers, one of env."""
    processor: str | None = None
    """Function that converts a row to a prompt; null: the default of the data set."""
    max_input_seq_length: Tokens | None = derived("${generation.engine.max_model_len}")
    """Largest number of tokens of a prompt; longer prompts are not sampled and count as not solved; null: no limit."""
    repeat: Count = 1
    """Number of times that all problems are sampled, in one round after another."""
    max_samples: Amount | None = None
    """Number of problems, drawn at random by seed; null: all problems."""
    seed: Seed = 42
    """Seed of max_samples, of the order of options and of generated sums."""
    num_samples: Amount | None = None
    """Number of generated problems, only for arithmetic; null: 256."""
    min_operand: Operand = 10
    """Smallest number in a problem, only for arithmetic."""
    max_operand: Operand = 99
    """Largest number in a problem, only for arithmetic."""
    max_bad_row_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of unusable rows above which a data set is refused."""
    control_tokens_in_rows: InRows = Field(default="report", description=IN_ROWS)
    control_tokens_from_tools: FromTools = Field(default="as_text", description=FROM_TOOLS)
    images: ImagesConfig = Field(default_factory=ImagesConfig)
    """Limits on images."""
