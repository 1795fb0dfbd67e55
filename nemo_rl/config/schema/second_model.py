"""Keys of a model of a run other than the policy: what it takes over from `policy`, and where it runs.

A master configuration gets a further model as a field of type `SecondModelConfig`; the name of the field is the name of
the model. `config.rules.models` reads the placement from here.
"""

from typing import ClassVar, Literal, override

from pydantic import Field

from nemo_rl.config.base.section import derived
from nemo_rl.config.base.value_types import Count, Tokens
from nemo_rl.config.schema.model.generation import GenerationConfig
from nemo_rl.config.schema.model.policy import PlacementConfig, PolicyConfig


class SecondModelConfig(PolicyConfig):
    """A model next to the policy, such as a critic, with unset lengths and batch sizes taken from `policy`."""

    place: ClassVar[str] = "second_model"
    idle: ClassVar[dict[str, str]] = {"generation": "only the policy samples"}

    precision: Literal["bfloat16", "float16", "float32"] = derived("${policy.precision}")
    """Number format of the forward and backward pass."""
    max_total_sequence_length: Tokens = derived("${policy.max_total_sequence_length}")
    """Most tokens of a prompt and its answer together."""
    train_global_batch_size: Count = derived("${policy.train_global_batch_size}")
    """Samples of one optimizer update, over all ranks."""
    train_micro_batch_size: Count = derived("${policy.train_micro_batch_size}")
    """Samples of one forward and backward pass of a rank."""
    generation: GenerationConfig | None = None
    """Not used: only the policy samples."""
    colocated: PlacementConfig = Field(default_factory=PlacementConfig)
    """Sharing of devices with another model."""

    @property
    @override
    def placement(self) -> PlacementConfig:
        return self.colocated
