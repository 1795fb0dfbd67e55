"""Define the keys of a model other than the policy: the values that follow `policy`, and its devices.

A field of type `SecondModelConfig` in a master configuration adds a model with the field's name. `config.rules.models`
reads the placement from here.
"""

from typing import ClassVar, Literal, override

from pydantic import Field

from nemo_rl.config.base.section import derived
from nemo_rl.config.base.value_types import Count, Tokens
from nemo_rl.config.schema.model.generation import GenerationConfig
from nemo_rl.config.schema.model.policy import PlacementConfig, PolicyConfig


class SecondModelConfig(PolicyConfig):
    """A model besides the policy, such as a critic. Unset lengths and batch sizes follow `policy`."""

    place: ClassVar[str] = "second_model"
    idle: ClassVar[dict[str, str]] = {"generation": "only the policy samples"}

    precision: Literal["bfloat16", "float16", "float32"] = derived("${policy.precision}")
    """Number format of the forward and backward pass."""
    max_total_sequence_length: Tokens = derived("${policy.max_total_sequence_length}")
    """Largest number of tokens of a prompt and its answer together."""
    train_global_batch_size: Count = derived("${policy.train_global_batch_size}")
    """Number of samples of one optimizer update, over all ranks."""
    train_micro_batch_size: Count = derived("${policy.train_micro_batch_size}")
    """Number of samples of a rank's microbatch in training."""
    invariant_gradients: bool = derived("${policy.invariant_gradients}")
    """Compute updates and scores whose bits do not depend on microbatches and on the number of data-parallel ranks."""
    generation: GenerationConfig | None = None
    """Not used, because only the policy samples."""
    colocated: PlacementConfig = Field(default_factory=PlacementConfig)
    """Sharing of devices with another model."""

    @property
    @override
    def placement(self) -> PlacementConfig:
        return self.colocated
