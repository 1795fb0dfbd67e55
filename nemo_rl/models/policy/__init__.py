"""The policy: the model under training, its controller and its workers. Re-exports its configuration only."""

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
