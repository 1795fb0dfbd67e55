"""How far the trained policy and the generation engine disagree on the sampled tokens.

`policy_gradient` always reports these. Invariant: nothing here is differentiable, and each metric is divided by the
global token count, so parts of a batch add up.

Legend: `B` samples, `T` predicted positions.
"""

import math

import torch
from torch import Tensor

from nemo_rl.losses.kl import calculate_kl
from nemo_rl.losses.policy_batch import PolicyBatch
from nemo_rl.losses.ratios import bounded_exp
from nemo_rl.losses.reductions import masked_mean


@torch.no_grad()
def mismatch_metrics(batch: PolicyBatch, global_valid_toks: Tensor | float) -> dict[str, Tensor]:
    """Metrics of train/generation mismatch, with p the policy at the update's start, g the engine.

    Returns:
        token_mult_prob_error: mean of `exp(|log p - log g|)`; 1 when both agree exactly.
        gen_kl_error: k3 estimate of `KL(g || p)`.
        policy_kl_error: k3 estimate of `KL(p || g)`, without importance weights.
        js_divergence_error: mean of the two k3 estimates towards the mixture `(p + g) / 2`.
        approx_entropy: `-mean(p_now / g * log p_now)`, the current policy's entropy estimated by
            importance sampling, in nats per token.
    """
    policy_BT, engine_BT = batch.prev_logprobs_BT, batch.generation_logprobs_BT
    current_BT = batch.logprobs_BT.detach()
    mixture_BT = torch.logaddexp(policy_BT, engine_BT) - math.log(2)
    js_BT = 0.5 * (_k3(policy_BT, mixture_BT) + _k3(engine_BT, mixture_BT))
    per_token = {
        "token_mult_prob_error": bounded_exp((policy_BT - engine_BT).abs()),
        "gen_kl_error": _k3(engine_BT, policy_BT),
        "policy_kl_error": _k3(policy_BT, engine_BT),
        "js_divergence_error": js_BT,
        "approx_entropy": -bounded_exp(current_BT - engine_BT) * current_BT,
    }
    return {
        name: masked_mean(values_BT, batch.mask_BT, global_normalization_factor=global_valid_toks)
        for name, values_BT in per_token.items()
    }


def _k3(logprobs_BT: Tensor, logprobs_reference_BT: Tensor) -> Tensor:
    return calculate_kl(logprobs_BT, logprobs_reference_BT, "k3", output_clamp_value=None)
