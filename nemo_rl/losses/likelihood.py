"""The negative log-likelihood, the loss of supervised fine-tuning.

Invariant: a token that counts and has probability 0 makes the loss infinite; no value is clamped.
"""

from torch import Tensor

from nemo_rl.losses.loss_function import LossData, LossInputType, LossMetrics, LossType
from nemo_rl.losses.reductions import masked_sum, safe_divide


class NLLLossFn:
    """Mean negative log-likelihood over all tokens that count in the global batch."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB
    rows_per_unit = 1
    needs_reference = False

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: LossData,
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float,
    ) -> tuple[Tensor, LossMetrics]:
        """Compute `-sum(mask * log p) / global_valid_toks`.

        Args:
            next_token_logprobs: `[B, T-1]`, log-probabilities of tokens 1..T-1.
            data: Holds `token_mask [B, T]` and `sample_mask [B]`.
            global_valid_seqs: Unused; part of the call of every loss.
            global_valid_toks: Tokens that count in the whole global batch.

        Returns:
            Scalar loss, and `loss`, `num_unmasked_tokens`, `num_valid_samples`.
        """
        sample_mask_B = data["sample_mask"].to(next_token_logprobs.dtype)
        mask_BT = data["token_mask"][:, 1:].to(next_token_logprobs.dtype) * sample_mask_B[:, None]
        loss = safe_divide(-masked_sum(next_token_logprobs, mask_BT), global_valid_toks)
        metrics: LossMetrics = {
            "loss": loss.detach(),
            "num_unmasked_tokens": mask_BT.sum(),
            "num_valid_samples": sample_mask_B.sum(),
        }
        return loss, metrics
