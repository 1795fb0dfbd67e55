"""Keys of a language model that judges answers and is served by engines of the run itself."""

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from nemo_rl.config.base.numbers import Tokens
from nemo_rl.config.base.section import Section, derived
from nemo_rl.config.schema.cluster import ClusterConfig, Device
from nemo_rl.config.schema.model.generation import GenerationConfig
from nemo_rl.config.schema.model.policy import OwnDevicesConfig, PolicyConfig, TokenizerConfig

_OF_THE_JUDGE = {"temperature": "temperature", "max_new_tokens": "max_tokens"}
_WITHOUT_MEANING = frozenset(
    ("colocated", "weight_sync", "num_engines_file", "val_temperature", "val_top_p", "val_top_k")
)


class JudgeEngineConfig(Section):
    """Engines of the run that serve the judge's model; its weights do not change."""

    place: ClassVar[str] = "env.llm_judge.engine"

    model_name: str
    """Hub id or folder of the judge, a chat model or a generative reward model."""
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    """Tokenizer and chat template of the judge."""
    precision: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Number format of weights and activations."""
    max_model_len: Tokens = 4096
    """Most tokens of a request and its text together."""
    generation: dict[str, Any] = Field(default_factory=dict)
    """Keys as in policy.generation: backend, top_p, top_k, stop_strings, bad_words, engine, vllm_cfg, vllm_kwargs and
    engine_kwargs."""
    resources: OwnDevicesConfig = Field(default_factory=OwnDevicesConfig)
    """Devices of the engines; on GPUs they are taken from those of the cluster."""
    hf_config_overrides: dict[str, Any] | None = Field(default_factory=dict)
    """Fields of the Hugging Face model config to change."""
    device: Device = derived("${cluster.device}")
    """Where the judge computes."""

    def as_policy(self, temperature: float = 0.0, max_tokens: int = 512) -> PolicyConfig:
        """Return the section of the engines' model, as that of a policy that is not trained.

        Args:
            temperature: sampling temperature.
            max_tokens: most tokens of a text.

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
            optimizer=None,
            generation={**self.generation, "temperature": temperature, "max_new_tokens": max_tokens},
        )

    def as_cluster(self) -> ClusterConfig:
        """Return the cluster section of the engines: their device, with the default deadlines and restarts."""
        return ClusterConfig.build(device=self.device)

    @property
    def uses_gpu(self) -> bool:
        """True if the judge runs on GPUs."""
        return self.as_cluster().uses_gpu

    @field_validator("generation")
    @classmethod
    def _only_known(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name in given:
            if (reason := _refused(name)) is not None:
                raise PydanticCustomError("generation", "{why}", {"why": reason})
        return given


def _refused(name: str) -> str | None:
    """Return why a key of `policy.generation` cannot be used for a judge; None if it can."""
    if name in _OF_THE_JUDGE:
        return f"write env.llm_judge.{_OF_THE_JUDGE[name]} instead of {name}"
    if name in _WITHOUT_MEANING:
        return f"{name} has no meaning for a judge, whose engines have devices of their own and keep their weights"
    if name not in GenerationConfig.model_fields:
        allowed = sorted(GenerationConfig.model_fields.keys() - _WITHOUT_MEANING - _OF_THE_JUDGE.keys())
        return f"there is no key {name}; there are {', '.join(allowed)}"
    return None
