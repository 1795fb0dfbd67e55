"""Metrics over finished rollouts that several environments share: pure functions of tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor


def calculate_pass_rate_per_prompt(prompts: Tensor | Sequence[str], is_correct: Tensor) -> float:
    """Return the share of distinct prompts with at least one correct answer.

    Args:
        prompts: [B, S] token ids (any dtype) or B texts; equal rows are one prompt.
        is_correct: [B] bool or number; nonzero is correct.

    Returns:
        A number in [0, 1]; 0.0 for an empty batch.
    """
    if len(prompts) == 0:
        return 0.0
    if isinstance(prompts, Tensor):
        _, prompt_of_row = torch.unique(prompts, dim=0, return_inverse=True)
    else:
        number: dict[str, int] = {}
        prompt_of_row = torch.tensor([number.setdefault(text, len(number)) for text in prompts])
    num_prompts = int(prompt_of_row.max()) + 1
    num_correct = torch.zeros(num_prompts, dtype=torch.int64)
    num_correct.index_add_(0, prompt_of_row, (is_correct != 0).long())
    return (num_correct > 0).double().mean().item()
