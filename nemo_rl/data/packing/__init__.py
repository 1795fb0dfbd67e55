"""Re-export sequence packing and microbatch plans."""

from nemo_rl.data.packing.algorithms import (
    ConcatenativePacker,
    FirstFitDecreasingPacker,
    FirstFitPacker,
    FirstFitShufflePacker,
    ModifiedFirstFitDecreasingPacker,
    PackingAlgorithm,
    PackingMetrics,
    SequencePacker,
    get_packer,
)
from nemo_rl.data.packing.plan import (
    PROMPT_GROUPS,
    SHARED_PREFIXES,
    FixedSize,
    MicrobatchPlan,
    MicrobatchStrategy,
    Packed,
    TokenBudget,
    column_of,
    plan_microbatches,
    plan_prefixes,
    prefixes_of,
)

__all__ = [
    "ConcatenativePacker",
    "FirstFitDecreasingPacker",
    "FirstFitPacker",
    "FirstFitShufflePacker",
    "FixedSize",
    "MicrobatchPlan",
    "MicrobatchStrategy",
    "ModifiedFirstFitDecreasingPacker",
    "PROMPT_GROUPS",
    "Packed",
    "PackingAlgorithm",
    "PackingMetrics",
    "SHARED_PREFIXES",
    "SequencePacker",
    "TokenBudget",
    "column_of",
    "get_packer",
    "plan_microbatches",
    "plan_prefixes",
    "prefixes_of",
]
