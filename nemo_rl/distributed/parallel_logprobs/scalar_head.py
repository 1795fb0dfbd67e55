"""The scalar head of reward models and critics: one number for each hidden state.

A head does not know what it scores: the model's inputs say which K tokens it sees, the last ones of rows for scores of
rows, or those before the targets for values of tokens. Every rank that sees a token has the whole head.

Invariant: the numbers are float32 or wider, whatever the dtype of the weights, because a loss compares them with
returns, and bfloat16 would round each to three digits.
"""

import torch
from torch import Tensor

from nemo_rl.distributed.parallel_logprobs.head import widen


def scalar_outputs(hidden_KD: Tensor, weight_1D: Tensor, bias_1: Tensor | None = None) -> Tensor:
    """Return the outputs `[K]` of a scalar head; differentiable in all arguments.

    Args:
        hidden_KD: `[K, D]` hidden states.
        weight_1D: `[1, D]`.
        bias_1: `[1]`.

    Returns:
        `[K]` float32 (float64 for float64 inputs).
    """
    outputs_K = torch.mv(widen(hidden_KD), widen(weight_1D)[0])  # not a view, of which FSDP would warn
    return outputs_K if bias_1 is None else outputs_K + widen(bias_1)


def initial_head(hidden_size: int, seed: int) -> Tensor:
    """Return the first weight `[1, D]` of a new scalar head, float32 on the CPU; the same on every rank.

    The standard deviation is `1 / (D + 1)`, so that for hidden states with elements of about 1 the outputs have a
    standard deviation of about `1 / sqrt(D)`: a new critic's values are small compared with rewards of 1, for any width
    of the model.

    Args:
        hidden_size: D.
        seed: run seed.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((1, hidden_size), generator=generator) / (hidden_size + 1)
