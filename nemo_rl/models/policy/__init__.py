"""The policy: the model under training, its controller and its workers. Re-exports its configuration only."""

from nemo_rl.config import (
    DTensorConfig,
    DynamicBatchingConfig,
    OptimizerConfig,
    PolicyConfig,
    SequencePackingConfig,
    TokenizerConfig,
)

__all__ = [
    "DTensorConfig",
    "DynamicBatchingConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "SequencePackingConfig",
    "TokenizerConfig",
]
