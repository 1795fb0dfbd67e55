"""Re-exports sequence packing and microbatch plans."""

from nemo_rl.data.packing.algorithms import (
    ConcatenativePacker,
    FirstFitDecreasingPacker,
    FirstFitPacker,
    FirstFitShufflePacker,
    ModifiedFirstFitDecreasingPacker,
    PackingAlgorithm,
    SequencePacker,
    get_packer,
)
from nemo_rl.data.packing.families import Family, find_families
from nemo_rl.data.packing.metrics import PackingMetrics
from nemo_rl.data.packing.plan import (
    FixedSize,
    MicrobatchPlan,
    MicrobatchStrategy,
    Packed,
    TokenBudget,
    plan_families,
    plan_microbatches,
)

__all__ = [
    "ConcatenativePacker",
    "Family",
    "FirstFitDecreasingPacker",
    "FirstFitPacker",
    "FirstFitShufflePacker",
    "FixedSize",
    "MicrobatchPlan",
    "MicrobatchStrategy",
    "ModifiedFirstFitDecreasingPacker",
    "Packed",
    "PackingAlgorithm",
    "PackingMetrics",
    "SequencePacker",
    "TokenBudget",
    "find_families",
    "get_packer",
    "plan_families",
    "plan_microbatches",
]
