"""Random batches for the tests of losses, and the global counts by which a loss divides."""

from collections.abc import Sequence

import torch


def random_batch(
    num_rows: int,
    num_tokens: int,
    *,
    seed: int = 0,
    masked_rows: Sequence[int] = (),
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Make log-probabilities `[B, T - 1]` and a batch with masks and reference log-probabilities.

    Every row has an unmasked token: the one at position 1.

    Args:
        num_rows: B.
        num_tokens: T.
        seed: of all random values.
        masked_rows: rows whose `sample_mask` is 0.
        dtype: of all tensors.

    Returns:
        Log-probabilities between -2.05 and -0.05, and `token_mask` `[B, T]`, `sample_mask` `[B]` and
        `reference_policy_logprobs` `[B, T]`.
    """
    generator = torch.Generator().manual_seed(seed)

    def logprobs(width: int) -> torch.Tensor:
        return -0.05 - 2 * torch.rand(num_rows, width, generator=generator, dtype=dtype)

    token_mask = (torch.rand(num_rows, num_tokens, generator=generator) < 0.6).to(dtype)
    token_mask[:, 1] = 1
    sample_mask = torch.ones(num_rows, dtype=dtype)
    sample_mask[list(masked_rows)] = 0
    data = {"token_mask": token_mask, "sample_mask": sample_mask, "reference_policy_logprobs": logprobs(num_tokens)}
    return logprobs(num_tokens - 1), data


def denominators(data: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the numbers of unmasked rows and of unmasked target tokens, as a loss takes them."""
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    return {"global_valid_seqs": float(data["sample_mask"].sum()), "global_valid_toks": float(mask.sum())}
