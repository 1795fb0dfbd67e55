"""Make a loss from a function of single tokens.

See `likelihood` and `policy_gradient` for losses written as classes. Invariant: mask and denominator are applied here,
so whatever the function computes, the result does not depend on microbatches, ranks, packing or padding.
"""

import functools
from collections.abc import Callable

from torch import Tensor

from nemo_rl.losses.loss_function import LossData, LossInputType, LossMetrics, LossType
from nemo_rl.losses.reductions import masked_mean

type PerToken = Callable[[Tensor, LossData], Tensor]
"""`(logprobs [B, T-1], data aligned with them) -> losses [B, T-1]`."""


class TokenLoss:
    """The mean of a function over all tokens that count; made by `token_loss`.

    `loss = sum(mask * per_token(logprobs, data)) / global_valid_toks`

    Args:
        per_token: computes the loss of every token, counted or not. Its first argument holds the log-probabilities
            `[B, T-1]` of tokens 1 to T-1, its second the batch, in which per-token tensors `[B, T]` are cut to the
            same tokens: column i of both belongs to the same token.
        needs_reference: whether the batch must hold `reference_policy_logprobs [B, T]`.
    """

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB
    rows_per_unit = 1

    def __init__(self, per_token: PerToken, needs_reference: bool = False) -> None:
        self.per_token = per_token
        self.needs_reference = needs_reference
        # Takes name, docstring and module from the function; the module decides how workers get the loss.
        functools.update_wrapper(self, per_token)

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: LossData,
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float,
    ) -> tuple[Tensor, LossMetrics]:
        """See `LossFunction`; the metrics are `loss` and `nll`, the plain negative log-likelihood.

        Raises:
            ValueError: the function's result has another shape than the log-probabilities.
        """
        aligned = _aligned(data, next_token_logprobs.shape[1] + 1)
        losses_BT = self.per_token(next_token_logprobs, aligned)
        if losses_BT.shape != next_token_logprobs.shape:
            raise ValueError(
                f"{getattr(self.per_token, '__name__', 'the loss')} returned shape {tuple(losses_BT.shape)}; a token "
                f"loss returns one value for each of the log-probabilities {tuple(next_token_logprobs.shape)}. "
                "For sums over sequences write a class, as nemo_rl.losses.loss_function.LossFunction."
            )
        mask_BT = aligned["token_mask"] * data["sample_mask"][:, None]
        loss = masked_mean(losses_BT, mask_BT, None, global_valid_toks)
        nll = masked_mean(-next_token_logprobs.detach(), mask_BT, None, global_valid_toks)
        return loss, {"loss": loss.detach(), "nll": nll}


def token_loss(per_token: PerToken) -> TokenLoss:
    """Make a loss from a function of single tokens; see `TokenLoss`.

    Example:
        >>> @token_loss
        ... def focal(logprobs, data):
        ...     return -((1 - logprobs.exp()) ** 2) * logprobs
        >>> policy.train(batch, focal)
    """
    return TokenLoss(per_token)


def _aligned(data: LossData, num_tokens: int) -> dict[str, object]:
    """Drop the first column of per-token tensors `[B, T, ...]`; keep everything else."""
    return {
        name: value[:, 1:] if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == num_tokens else value
        for name, value in data.items()
    }
