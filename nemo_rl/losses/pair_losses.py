"""Losses of one pair of answers, computed from their rewards.

`losses.preference` reduces them over a batch. A variant of DPO is a row of `VARIANTS`: a function of two rewards, and
whether rewards are averages over tokens and relative to a reference. Invariant: each function is the formula of its
paper, with m = reward_chosen - reward_rejected; rewards are already multiplied by beta.

Legend: `P` pairs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from nemo_rl.utils.errors import ConfigError

type PairLossFn = Callable[[Tensor, Tensor], Tensor]
"""(chosen_P, rejected_P) rewards -> loss_P."""


def logistic_pair_loss(chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """`-log sigmoid(chosen - rejected)`: the Bradley-Terry model's negative log-likelihood."""
    return -logsigmoid(chosen_P - rejected_P)


def smoothed_logistic_pair_loss(chosen_P: Tensor, rejected_P: Tensor, *, e: float) -> Tensor:
    """`-(1 - e) log sigmoid(m) - e log sigmoid(-m)`: conservative DPO, for labels wrong with probability e.

    Mitchell, "A note on DPO with noisy preferences and relationship to IPO" (2023), equation 3.
    """
    margin_P = chosen_P - rejected_P
    return -(1 - e) * logsigmoid(margin_P) - e * logsigmoid(-margin_P)


def robust_pair_loss(chosen_P: Tensor, rejected_P: Tensor, *, e: float) -> Tensor:
    """`(-(1 - e) log sigmoid(m) + e log sigmoid(-m)) / (1 - 2e)`: unbiased under noise, arXiv 2403.00409."""
    margin_P = chosen_P - rejected_P
    return (-(1 - e) * logsigmoid(margin_P) + e * logsigmoid(-margin_P)) / (1 - 2 * e)


def ipo_pair_loss(chosen_P: Tensor, rejected_P: Tensor, *, beta: float) -> Tensor:
    """`(m / beta - 1 / (2 beta))^2` on mean log-ratios, arXiv 2310.12036, equation 17."""
    return ((chosen_P - rejected_P) / beta - 1 / (2 * beta)) ** 2


def hinge_pair_loss(chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """`max(0, 1 - m)`: SLiC, arXiv 2305.10425, on DPO's rewards."""
    return torch.relu(1 - (chosen_P - rejected_P))


def margin_pair_loss(chosen_P: Tensor, rejected_P: Tensor, *, margin: float) -> Tensor:
    """`-log sigmoid(m - margin)`: SimPO, arXiv 2405.14734, equation 6; reward models with a margin."""
    return -logsigmoid(chosen_P - rejected_P - margin)


def odds_ratio_pair_loss(chosen_P: Tensor, rejected_P: Tensor, *, beta: float) -> Tensor:
    """`-beta log sigmoid(log odds_chosen - log odds_rejected)`: ORPO, arXiv 2403.07691, equation 7.

    odds = p / (1 - p), p the geometric mean of the answer's token probabilities; rewards are beta log p.
    """
    return -beta * logsigmoid(_log_odds(chosen_P / beta) - _log_odds(rejected_P / beta))


def _log_odds(logprob_P: Tensor) -> Tensor:
    # A probability of 1 has infinite odds. Rows without tokens have this probability and must stay finite.
    logprob_P = logprob_P.clamp(max=-1e-7)
    return logprob_P - torch.log(-torch.expm1(logprob_P))


@dataclass(frozen=True)
class CentredMargin:
    """`-log sigmoid(m - margin) + c (chosen + rejected)^2`: a reward model whose scores stay around 0.

    The margin as in Llama 2 (arXiv 2307.09288, equation 2), the centring as in arXiv 2312.09244, section 3.
    """

    margin: float
    coefficient: float

    def __call__(self, chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
        """Return the loss of each pair."""
        loss_P = margin_pair_loss(chosen_P, rejected_P, margin=self.margin)
        return loss_P + self.coefficient * (chosen_P + rejected_P) ** 2


@dataclass(frozen=True)
class Variant:
    """One preference loss."""

    pair_loss: PairLossFn
    """Loss of a pair from its rewards."""
    average: bool = False
    """Rewards are means over tokens, whatever the configuration says."""
    needs_reference: bool = True
    """Rewards are relative to the reference policy."""
    sft_average: bool = False
    """The likelihood term is a mean over tokens, whatever the configuration says."""


type VariantFactory = Callable[[float, float, float], Variant]
"""(beta, label smoothing e, target margin) -> variant."""

VARIANTS: dict[str, VariantFactory] = {
    "sigmoid": lambda beta, e, margin: Variant(partial(smoothed_logistic_pair_loss, e=e)),
    "robust": lambda beta, e, margin: Variant(partial(robust_pair_loss, e=e)),
    "rpo": lambda beta, e, margin: Variant(partial(smoothed_logistic_pair_loss, e=e), sft_average=True),
    "hinge": lambda beta, e, margin: Variant(hinge_pair_loss),
    "ipo": lambda beta, e, margin: Variant(partial(ipo_pair_loss, beta=beta), average=True),
    "simpo": lambda beta, e, margin: Variant(
        partial(margin_pair_loss, margin=margin), average=True, needs_reference=False
    ),
    "orpo": lambda beta, e, margin: Variant(
        partial(odds_ratio_pair_loss, beta=beta), average=True, needs_reference=False, sft_average=True
    ),
}


def make_variant(name: str, beta: float, label_smoothing: float, target_margin: float) -> Variant:
    """Build the preference loss of a name.

    Raises:
        ConfigError: no loss has this name.
    """
    if name not in VARIANTS:
        raise ConfigError(f"dpo.preference_loss={name!r} is unknown; choose one of {', '.join(VARIANTS)}.")
    return VARIANTS[name](beta, label_smoothing, target_margin)
