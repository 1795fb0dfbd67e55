"""Define the keys of environments that reward answers with a reward model or a language model (a judge).

Invariant: a section describes the judge completely. Its environment gets nothing else.
"""

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from nemo_rl.config.base.availability import OnlyWith
from nemo_rl.config.base.section import Section, derived
from nemo_rl.config.base.value_types import AmountOrZero, Count, FactorOrZero, HttpAddress, Number, Seconds, Tokens
from nemo_rl.config.schema.algorithms.supervised import ScoringModelConfig, StepSeparator
from nemo_rl.config.schema.cluster import ClusterConfig, Device
from nemo_rl.config.schema.model.endpoint import VariableName
from nemo_rl.config.schema.model.generation import GenerationConfig
from nemo_rl.config.schema.model.megatron import MegatronConfig, MegatronOptimizerConfig
from nemo_rl.config.schema.model.parallel import DTensorConfig, DynamicBatchingConfig, SequencePackingConfig
from nemo_rl.config.schema.model.policy import AttributeName, OwnDevicesConfig, PolicyConfig, TokenizerConfig
from nemo_rl.utils.errors import ConfigError

_OF_THE_JUDGE = {"temperature": "temperature", "max_new_tokens": "max_tokens"}
_WITHOUT_MEANING = frozenset(
    ("colocated", "weight_sync", "lora_refit_mode", "num_engines_file", "val_temperature", "val_top_p", "val_top_k")
)


class JudgeEngineConfig(Section):
    """Engines of the run that serve the judge's model. Its weights do not change."""

    place: ClassVar[str] = "env.llm_judge.engine"

    model_name: str
    """Hub id or folder of the judge, a chat model or a generative reward model."""
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    """Tokenizer and chat template of the judge."""
    precision: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Number format of weights and activations."""
    max_model_len: Tokens = 4096
    """Largest number of tokens of a request and the judge's text together."""
    generation: dict[str, Any] = Field(default_factory=dict)
    """Keys of policy.generation: backend, top_p, top_k, stop_strings, bad_words, engine, vllm_cfg, vllm_kwargs and
    engine_kwargs."""
    resources: OwnDevicesConfig = Field(default_factory=OwnDevicesConfig)
    """Devices of the engines. On GPUs, they are part of the cluster's devices."""
    hf_config_overrides: dict[str, Any] | None = Field(default_factory=dict)
    """Fields of the Hugging Face model config to change."""
    trust_remote_code: bool = False
    """Run the Python code in the folders of judge and tokenizer (see policy.trust_remote_code)."""
    device: Device = derived("${cluster.device}")
    """Device of the judge."""

    def as_policy(self, temperature: float = 0.0, max_tokens: int = 512) -> PolicyConfig:
        """Return the engines' model as a policy section that is not trained.

        Args:
            temperature: sampling temperature.
            max_tokens: largest number of tokens of a text.

        Raises:
            ConfigError: a key of `generation` is wrong.
        """
        return PolicyConfig.build(
            model_name=self.model_name,
            tokenizer=self.tokenizer.model_dump(),
            precision=self.precision,
            max_total_sequence_length=self.max_model_len,
            train_micro_batch_size=1,
            hf_config_overrides=self.hf_config_overrides,
            trust_remote_code=self.trust_remote_code,
            optimizer=None,
            generation={**self.generation, "temperature": temperature, "max_new_tokens": max_tokens},
        )

    def as_cluster(self) -> ClusterConfig:
        """Return the cluster section of the engines: their device, with default deadlines and restarts."""
        return ClusterConfig.build(device=self.device)

    @property
    def uses_gpu(self) -> bool:
        """Return True if the judge runs on GPUs."""
        return self.as_cluster().uses_gpu

    @field_validator("generation")
    @classmethod
    def _only_known(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name in given:
            if (reason := _refused(name)) is not None:
                raise PydanticCustomError("generation", "{why}", {"why": reason})
        return given


def _refused(name: str) -> str | None:
    """Return why a judge cannot have a key of `policy.generation`, or None if it can."""
    if name in _OF_THE_JUDGE:
        return f"write env.llm_judge.{_OF_THE_JUDGE[name]} instead of {name}"
    if name in _WITHOUT_MEANING:
        return f"{name} has no meaning for a judge, whose engines have devices of their own and keep their weights"
    if name not in GenerationConfig.model_fields:
        allowed = sorted(GenerationConfig.model_fields.keys() - _WITHOUT_MEANING - _OF_THE_JUDGE.keys())
        return f"there is no key {name}; there are {', '.join(allowed)}"
    return None


_OF_STEPS = OnlyWith("reward_model_cfg.reward_model_type", ("process",))
_ONE_PASS = "batch_size is the number of rows of a pass"
_NOT_TRAINED = "the reward model is not trained here"
_WEIGHTS = ("policy/weights/model", "weights/model", "model")
"""Folders of a checkpoint with the sequence classifier, relative to a step, a model and its weights."""


_PASS_TOKENS = "${mul:${..max_model_len},${..batch_size}}"
_OF_SCORES = "a reward model only computes scores"


class PackedPassesConfig(SequencePackingConfig):
    """Packing of several conversations into one row."""

    idle: ClassVar[dict[str, str]] = {"train_mb_tokens": _OF_SCORES}

    train_mb_tokens: Tokens = derived(_PASS_TOKENS)
    """Not used, because the reward model is not trained here."""
    logprob_mb_tokens: Tokens = derived(_PASS_TOKENS)
    """Number of tokens of a packed row."""


class BudgetedPassesConfig(DynamicBatchingConfig):
    """Forward passes with a token budget instead of batch_size."""

    idle: ClassVar[dict[str, str]] = {"train_mb_tokens": _OF_SCORES}

    train_mb_tokens: Tokens = derived(_PASS_TOKENS)
    """Not used, because the reward model is not trained here."""
    logprob_mb_tokens: Tokens = derived(_PASS_TOKENS)
    """Number of padded tokens of a forward pass."""


class UnusedOptimizerConfig(MegatronOptimizerConfig):
    """The optimizer of Megatron Core, which a reward model does not have here."""

    clip_grad: FactorOrZero | None = None
    """Not used, because the reward model is not trained here."""


class ScoringMegatronConfig(MegatronConfig):
    """Megatron Core without training."""

    idle: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("optimizer", "scheduler", "distributed_data_parallel_config"), _NOT_TRAINED),
        "zero_train_gen_mismatch": "the reward model samples no answers",
    }

    optimizer: UnusedOptimizerConfig = Field(default_factory=UnusedOptimizerConfig)
    """Not used, because the reward model is not trained here."""


class RewardModelEnvironmentConfig(Section):
    """A reward model that scores finished conversations."""

    place: ClassVar[str] = "env.reward_model"
    renamed: ClassVar[dict[str, str]] = PolicyConfig.renamed
    later: ClassVar[dict[str, str]] = {"generation": "a reward model that writes (env.llm_judge asks one)"}
    ignored: ClassVar[dict[str, str]] = {
        "processor": "data entries name their processor",
        "logprob_batch_size": _ONE_PASS,
        "offload_optimizer_for_logprob": _NOT_TRAINED,
        "max_grad_norm": _NOT_TRAINED,
    }

    enabled: bool = True
    """Whether the environment may be used. If false, data that names it is refused."""
    model_name: str
    """Hub id or folder of a sequence classifier."""
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    """Tokenizer and chat template of the reward model, which may differ from those of the policy."""
    precision: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Number format of the forward pass."""
    batch_size: Count = 4
    """Number of conversations of a rank's forward pass. With sequence_packing or dynamic_batching, the default token
    budget of a pass is that of this many conversations of max_model_len tokens."""
    batch_wait_ms: FactorOrZero = 5.0
    """Milliseconds that a conversation waits for others to share its forward pass, if no pass is running."""
    checkpoint_path: str | None = None
    """Checkpoint of run_rm.py to read instead of model_name: the folder step_<N>, or its folder of weights."""
    max_model_len: Tokens = derived("${policy.max_total_sequence_length}")
    """Largest number of tokens of a conversation, counted by the reward model's tokenizer."""
    conversation_end: Literal["auto", "turn", "template"] = "auto"
    """Token at which the score is read. turn: the token that ends the last turn, as in training with run_rm.py;
    template: the last token that the chat template writes, often a line break, as in most other programs; auto: turn
    with checkpoint_path, otherwise template."""
    too_long: Literal["error", "keep_end"] = "error"
    """If a conversation has over max_model_len tokens, its sample gets an error, or only its last tokens are scored."""
    resources: OwnDevicesConfig = Field(default_factory=OwnDevicesConfig)
    """Devices of the reward model. On GPUs, they are part of the cluster's devices."""
    dtensor_cfg: DTensorConfig = Field(default_factory=DTensorConfig)
    """Parallel axes of the reward model's ranks."""
    megatron_cfg: ScoringMegatronConfig = Field(default_factory=ScoringMegatronConfig)
    """Megatron Core for the reward model's ranks, instead of dtensor_cfg."""
    sequence_packing: PackedPassesConfig = Field(default_factory=PackedPassesConfig)
    """Packing of conversations, which begin with the same prompt in a group of answers."""
    dynamic_batching: BudgetedPassesConfig = Field(default_factory=BudgetedPassesConfig)
    """Passes by token budget."""
    reward_model_cfg: ScoringModelConfig = Field(default_factory=ScoringModelConfig)
    """The head for scores, which must stay enabled. With reward_model_type=process, the model scores each step. The
    names in attributes replace the labels of the model's config.json."""
    attribute_weights: dict[AttributeName, Number] = Field(default_factory=dict)
    """Weights of a model's scores by name, if it has several. The reward is the sum of the named scores, each times its
    weight. Each term is a reward component with the name of the score (grpo.adv_estimator.name=gdpo)."""
    step_separator: Annotated[StepSeparator, _OF_STEPS] = "\n"
    """Text that ends a step of the answer, as rm.step_separator in training."""
    step_reward: Annotated[Literal["min", "mean", "product", "last", "each"], _OF_STEPS] = "min"
    """The reward of an answer from the probabilities that its steps are right: the smallest, their mean, their product,
    or that of the last step. each: each step has its own, and the answer their sum (grpo.adv_estimator.credit)."""
    hf_config_overrides: dict[str, Any] | None = Field(default_factory=dict)
    """Fields of the Hugging Face model config to change."""
    trust_remote_code: bool = False
    """Run the Python code in the folders of reward model and tokenizer (see policy.trust_remote_code)."""
    device: Device = derived("${cluster.device}")
    """Device of the reward model."""

    def as_policy(self, num_scores: int = 1) -> PolicyConfig:
        """Return the model's section as a policy section that is not trained.

        Args:
            num_scores: number of outputs of the model's head.

        Raises:
            ConfigError: checkpoint_path has no model.
        """
        labels = [f"LABEL_{number}" for number in range(num_scores)] if num_scores > 1 else []
        model, tokenizer = self.model_name, self.tokenizer.model_dump()
        if self.checkpoint_path is not None:
            model = str(weights_folder(self.checkpoint_path))
            tokenizer["name"] = model if self.tokenizer.name == self.model_name else self.tokenizer.name
        return PolicyConfig.build(
            model_name=model,
            tokenizer=tokenizer,
            precision=self.precision,
            max_total_sequence_length=self.max_model_len,
            train_micro_batch_size=self.batch_size,
            hf_config_overrides=self.hf_config_overrides,
            trust_remote_code=self.trust_remote_code,
            dtensor_cfg=self.dtensor_cfg.model_dump(),
            megatron_cfg=self.megatron_cfg.model_dump(exclude={"optimizer", "scheduler"}),
            sequence_packing=self.sequence_packing.model_dump(),
            dynamic_batching=self.dynamic_batching.model_dump(),
            reward_model_cfg={"enabled": True, "attributes": labels},
            optimizer=None,
            generation=None,
        )

    @property
    def uses_gpu(self) -> bool:
        """Return True if the reward model runs on GPUs."""
        return ClusterConfig.build(device=self.device).uses_gpu

    @property
    def ends_with_turn(self) -> bool:
        """Return True if the text that the chat template writes after the last turn is dropped."""
        return self.conversation_end == "turn" or (self.conversation_end == "auto" and self.checkpoint_path is not None)

    @model_validator(mode="after")
    def _scores(self) -> Self:
        if not self.reward_model_cfg.enabled:
            raise PydanticCustomError("reward_model", "reward_model_cfg.enabled=false gives no scores; set it to true")
        if self.reward_model_cfg.reward_model_type == "process" and self.attribute_weights:
            raise PydanticCustomError(
                "reward_model",
                "attribute_weights belong to several scores, and a model of process has one; remove them",
            )
        if self.reward_model_cfg.reward_model_type == "process" and self.too_long == "keep_end":
            raise PydanticCustomError(
                "reward_model", "too_long=keep_end would cut off steps; with reward_model_type=process set it to error"
            )
        return self


def weights_folder(checkpoint_path: str) -> Path:
    """Return the folder of a checkpoint with the model as a Hugging Face sequence classifier.

    Args:
        checkpoint_path: a step folder, the folder of its policy or weights, or the folder itself.

    Raises:
        ConfigError: the checkpoint has no such folder.
    """
    given = Path(checkpoint_path).expanduser()
    for folder in (given, *(given / below for below in _WEIGHTS)):
        if (folder / "config.json").is_file():
            return folder
    raise ConfigError(
        f"env.reward_model.checkpoint_path={checkpoint_path} has no model. It may be a folder step_<N> that run_rm.py "
        "wrote with dtensor_cfg, its policy/weights, or any folder with config.json; a checkpoint of Megatron Core "
        "has to be exported first (examples/converters/convert_megatron_to_hf.py)."
    )


_WORDED_SCALE = r"(?:out of|from|on a scale of|on a scale from)\s+\d+(?:\s*(?:-|–|to)\s*\d+)?"
_SCALE = rf"(?:\([^()\n]{{0,40}}\)|\[[^\[\]\n]{{0,40}}\]|{_WORDED_SCALE})"
_NUMBER = r"(-?\d+(?:\.\d+)?)(?!_*[^\W_]|%|[.,]\d|\s*(?:-|–|to\b)\s*\d)"
SCORE_PATTERN = rf"(?i)\bscore\b[*_`\"']{{0,4}}\s{{0,3}}{_SCALE}?(?:[^\w.+(-]|_){{0,6}}{_NUMBER}"
"""Matches a score: the word, perhaps its scale, a few signs, and a number that does not begin something else."""
WINNER_PATTERN = r"\[\[([ABC])\]\]"


def _pattern_with_a_group(pattern: str) -> str:
    try:
        num_groups = re.compile(pattern).groups
    except re.error as error:
        raise PydanticCustomError("pattern", "{why}", {"why": f"not a regular expression: {error}"}) from None
    if num_groups != 1:
        raise PydanticCustomError(
            "pattern", "{why}", {"why": f"it has {num_groups} groups; the one group (...) is what is read"}
        )
    return pattern


Pattern = Annotated[str, AfterValidator(_pattern_with_a_group)]


class LLMJudgeConfig(Section):
    """A language model that is asked for a score, at an OpenAI-compatible endpoint or on engines of the run."""

    place: ClassVar[str] = "env.llm_judge"

    base_url: HttpAddress | None = None
    """Address of the endpoint including the version, for example http://127.0.0.1:8000/v1; null with engine."""
    model: str | None = None
    """Name of the model at the endpoint."""
    engine: JudgeEngineConfig | None = None
    """Engines that the run starts for the judge, instead of an endpoint; null: the judge is at base_url."""
    api_key_env: VariableName | None = None
    """Environment variable with the key, which is never logged; null: no key is sent."""
    mode: Literal["absolute", "pairwise"] = "absolute"
    """Ask for a score of the answer, or for the better one of the answer and the row's reference answer."""
    system_prompt: str | None = None
    """System message of the request; null: none."""
    rubric: str = "Judge how correct, complete and helpful the answer is."
    """Text for {rubric} in the template."""
    template: str | None = None
    """User message of the request, with {question}, {conversation}, {answer}, {reference}, {rubric} and keys of the
    row's metadata; pairwise with {answer_a} and {answer_b}; {tag} is a text that no answer contains, for the names of
    tags. Write other braces twice. null: the built-in message of the mode."""
    score_pattern: Annotated[Pattern, OnlyWith("mode", ("absolute",))] = SCORE_PATTERN
    """Regular expression whose group is the score; its last match after `</think>` counts. The default one reads a line
    that begins or ends with a score, such as `**Score (1-10):** 7` or `Score: 7/10`."""
    min_score: Annotated[Number, OnlyWith("mode", ("absolute",))] = 1.0
    """Score that becomes the reward 0. A lower score is treated as no answer."""
    max_score: Annotated[Number, OnlyWith("mode", ("absolute",))] = 10.0
    """Score that becomes the reward 1. A higher score is treated as no answer."""
    winner_pattern: Annotated[Pattern, OnlyWith("mode", ("pairwise",))] = WINNER_PATTERN
    """With mode=pairwise: pattern whose group is A, B or C (a tie). Its last match after `</think>` is used."""
    both_orders: Annotated[bool, OnlyWith("mode", ("pairwise",))] = True
    """With mode=pairwise: ask twice, with the answers exchanged, and use the mean."""
    temperature: FactorOrZero = 0.0
    """Sampling temperature of the judge."""
    max_tokens: Tokens = 512
    """Largest number of tokens of the judge's text."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Additional fields of a request to an endpoint."""
    max_concurrency: Count = 32
    """Number of concurrent requests."""
    request_timeout_s: Seconds = 60.0
    """Time limit of one request in seconds."""
    deadline_s: Seconds = 300.0
    """Time limit of one sample in seconds, including all requests and waits. After that, the sample gets an error."""
    max_attempts: Count = 4
    """Most requests for one text; a request is repeated if the endpoint fails or answers without a score."""
    backoff_s: Seconds = 1.0
    """Seconds before the second request, doubled for each further request unless the endpoint requests more."""
    max_backoff_s: Seconds = 30.0
    """Longest wait between two requests, in seconds."""
    cache_size: AmountOrZero = 10000
    """Number of most recently judged texts that are cached; 0: none."""
    price_per_million_prompt_tokens: FactorOrZero = 0.0
    """Price for the metric `cost`, in any currency."""
    price_per_million_completion_tokens: FactorOrZero = 0.0
    """Price for the metric `cost`, in the same currency."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.min_score >= self.max_score:
            raise PydanticCustomError("scores", "min_score must be less than max_score")
        if (self.engine is None) == (self.base_url is None):
            raise PydanticCustomError("judge", "give either base_url, the address of a judge, or engine to start one")
        if self.engine is not None:
            if given := [key for key in ("model", "api_key_env", "extra_body") if getattr(self, key)]:
                raise PydanticCustomError(
                    "judge", "{keys} belong to base_url, not to engine; remove them", {"keys": ", ".join(given)}
                )
            return self
        if self.model is None:
            raise PydanticCustomError("model", "model is null: name the model at base_url")
        return self

    @property
    def judge_name(self) -> str:
        """Return the name of the judging model."""
        return self.engine.model_name if self.engine else str(self.model)

    def as_policy(self) -> PolicyConfig:
        """Return the section of the model on the run's engines, as a policy section.

        Raises:
            ConfigError: a key of `engine.generation` is wrong.
        """
        assert self.engine is not None, "a judge at base_url has no section of a model"
        return self.engine.as_policy(self.temperature, self.max_tokens)
