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
from nemo_rl.data.packing.metrics import PackingMetrics
from nemo_rl.data.packing.plan import (
    FixedSize,
    MicrobatchPlan,
    MicrobatchStrategy,
    Packed,
    TokenBudget,
    plan_microbatches,
    plan_prefixes,
)
from nemo_rl.data.packing.prefixes import PROMPT_GROUPS, SHARED_PREFIXES, column_of, find_prefixes, prefixes_of

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
    "find_prefixes",
    "get_packer",
    "plan_microbatches",
    "plan_prefixes",
    "prefixes_of",
]
