"""Control and run the policy, the model under training. Re-export only its configuration."""

from nemo_rl.config import (
    DTensorConfig,
    DynamicBatchingConfig,
    MegatronConfig,
    OptimizerConfig,
    PolicyConfig,
    SequencePackingConfig,
    TokenizerConfig,
)

__all__ = [
    "DTensorConfig",
    "DynamicBatchingConfig",
    "MegatronConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "SequencePackingConfig",
    "TokenizerConfig",
]
