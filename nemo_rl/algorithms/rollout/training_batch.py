"""Rollouts to the `[B, T]` batch that losses are computed on.

Invariant: rows keep the order of the trajectories; a token counts in the loss only if the policy wrote it, and a sample
only if it has a reward, where the algorithm learns from rewards.
"""

from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.trajectory import Outcome, Trajectory


class TrainingBatch(TypedDict, total=False):
    """What policy and losses read. B samples, T tokens of the longest sample."""

    input_ids: Tensor  # [B, T] int64, right-padded with pad_token_id
    input_lengths: Tensor  # [B] int64
    token_mask: Tensor  # [B, T] float32, 1 on tokens the policy wrote, 0 on all else
    sample_mask: Tensor  # [B] float32, 0 removes the sample from the loss
    generation_logprobs: Tensor  # [B, T] float32, 0 wherever token_mask is 0
    teacher_topk_logits: Tensor  # [B, T, k] float32, after token t, over the temperature; distillation only
    teacher_topk_indices: Tensor  # [B, T, k] int64
    advantages: Tensor  # [B, T] float32
    prev_logprobs: Tensor  # [B, T] float32; absent when the update is exactly on-policy
    reference_policy_logprobs: Tensor  # [B, T] float32; absent without a KL term


def build_training_batch(
    trajectories: Sequence[Trajectory], pad_token_id: int, *, mask_truncated: bool, needs_reward: bool = True
) -> BatchedDataDict[TrainingBatch]:
    """Lay trajectories out as tensors.

    Args:
        trajectories: B rollouts.
        pad_token_id: id written behind the end of a sample.
        mask_truncated: take samples that hit a length limit out of the loss (overlong filtering).
        needs_reward: take samples without a reward out of the loss.
    """
    lengths = [trajectory.length for trajectory in trajectories]
    shape = (len(lengths), max(lengths))
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    token_mask = np.zeros(shape, dtype=np.float32)
    generation_logprobs = np.zeros(shape, dtype=np.float32)
    for row, trajectory in enumerate(trajectories):
        start = 0
        for message in trajectory.message_log:
            stop = start + message["token_ids"].numel()
            input_ids[row, start:stop] = message["token_ids"].numpy()
            if (written := message.get("generation_logprobs")) is not None:
                token_mask[row, start:stop] = 1.0
                generation_logprobs[row, start:stop] = written.numpy()
            start = stop
    batch: dict[str, Any] = {
        "input_ids": torch.from_numpy(input_ids),
        "input_lengths": torch.tensor(lengths, dtype=torch.int64),
        "token_mask": torch.from_numpy(token_mask),
        "sample_mask": torch.tensor([_weight(t, mask_truncated, needs_reward) for t in trajectories]),
        "generation_logprobs": torch.from_numpy(generation_logprobs),
    }
    return BatchedDataDict(batch)


def _weight(trajectory: Trajectory, mask_truncated: bool, needs_reward: bool) -> float:
    if needs_reward and not trajectory.has_reward:
        return 0.0
    if mask_truncated and trajectory.outcome == Outcome.TRUNCATED:
        return 0.0
    return trajectory.loss_multiplier


def mask_mismatched_sequences(batch: BatchedDataDict[TrainingBatch], threshold: float) -> dict[str, float]:
    """Take samples out of the loss whose training and generation log-probs disagree too much.

    Sets `sample_mask` to 0 where the mean over the sample's tokens of `exp(|prev - generation|)` exceeds
    `threshold`.

    Returns:
        Metrics: largest and mean ratio, number of samples masked.
    """
    mask = batch["token_mask"] * batch["sample_mask"][:, None]
    difference = (batch["prev_logprobs"] - batch["generation_logprobs"]).abs()
    ratios = (difference.exp() * mask).sum(1) / mask.sum(1).clamp(min=1)
    exceeds = ratios > threshold
    batch["sample_mask"] = batch["sample_mask"] * (~exceeds)
    return {
        "max_seq_mult_prob_error": float(ratios.max()),
        "mean_seq_mult_prob_error": float(ratios.mean()),
        "num_masked_seqs": float(exceeds.sum()),
    }
