"""Keys of `dpo`: direct preference optimisation and its variants.

Invariant: a variant is a value of `preference_loss`; it changes the loss and nothing else.
"""

from typing import Annotated, Literal

from pydantic import Field

from nemo_rl.config.base.numbers import Count, Factor, FactorOrZero
from nemo_rl.config.base.section import derived
from nemo_rl.config.schema.algorithms.supervised import CountOrAll, SupervisedConfig

PreferenceLossName = Literal["sigmoid", "ipo", "hinge", "robust", "rpo", "simpo", "orpo", "kto"]


class DPOConfig(SupervisedConfig):
    """Direct preference optimisation: steps, validation and the loss."""

    max_num_steps: CountOrAll = 150
    """Training stops after this many steps; -1: never."""
    val_period: CountOrAll = 25
    """Validate every this many steps; 0 or -1: only at start or end."""
    val_global_batch_size: Count = 8
    """Pairs of one validation batch."""
    reference_policy_kl_penalty: Factor = 0.05
    """Beta: the factor that turns a log-probability ratio into a reward."""
    preference_loss: PreferenceLossName = "sigmoid"
    """Loss on a pair: sigmoid (DPO), ipo, hinge, robust (noisy labels), rpo (DPO plus likelihood of the chosen answer),
    simpo and orpo (both without a reference); or kto, a loss on single answers labelled desirable or undesirable, for
    which batch sizes count answers."""
    preference_loss_weight: FactorOrZero = 1.0
    """Weight of the preference loss."""
    sft_loss_weight: FactorOrZero = 0.0
    """Weight of the negative log-likelihood of the chosen answer."""
    preference_average_log_probs: bool = False
    """Divide log-ratios by answer length; ipo, simpo and orpo always do."""
    sft_average_log_probs: bool = derived("${.preference_average_log_probs}")
    """Divide the log-likelihood of the chosen answer by its length; rpo and orpo always do."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs whose labels are assumed to be swapped, for sigmoid and robust."""
    target_margin: FactorOrZero = 0.5
    """SimPO's gamma: reward by which the chosen answer should lead."""
    desirable_weight: Factor = 1.0
    """KTO's weight of desirable answers, lambda_D."""
    undesirable_weight: Factor = 1.0
    """KTO's weight of undesirable answers, lambda_U."""
