"""Make a step's batch from rollouts of the policy.

    engines get the policy's weights ─► rollouts ─► [B, T] tensors ─► check of the engines (first batch)

Invariants: rows are ordered by group, sample and conversation, not by when they finished. A token counts in the loss
only if the policy wrote it. If the algorithm learns from rewards, a sample counts only if it has a reward. Losses and
their metrics treat rows as sequences. Rewards and metrics of rollouts belong to samples, which may have several rows.
"""

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

import numpy as np
import torch
from torch import Tensor

from nemo_rl.algorithms.rollout.refit import Refitter
from nemo_rl.algorithms.rollout.source import Group, RolloutSource, numbered
from nemo_rl.algorithms.rollout.sync_setup import SyncProbe
from nemo_rl.algorithms.runtime.run import Phase, StepBatch
from nemo_rl.algorithms.runtime.step_record import StepRecorder
from nemo_rl.data.model_rows import ROW_INPUTS, RowInputs, completed
from nemo_rl.data.packing import PROMPT_GROUPS
from nemo_rl.data.routed_experts import ROUTED_EXPERTS, joined_experts, padded_experts
from nemo_rl.data.streams.prompt_stream import GroupRewards, Prompts
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.idle_shares import IdleShares
from nemo_rl.experience.metrics import OF_AN_ENVIRONMENT, metrics_by_environment, rollout_metrics
from nemo_rl.experience.rows import rows_of, rows_per_update
from nemo_rl.experience.runners.stored import stored_columns, whole
from nemo_rl.experience.trajectory import Outcome, Trajectory, is_right
from nemo_rl.experience.trajectory_log import TrajectoryLog
from nemo_rl.losses.divergence import after_mask, sequence_error_metrics
from nemo_rl.models.batch_rows import BatchRows


class Versioned(Protocol):
    """Interface of a model that counts its updates."""

    weight_version: int


@dataclass(frozen=True)
class StoredVersion:
    """Stored version of the policy's weights, part of the position in the data (`stored_parts.StoredPart`)."""

    policy: Versioned
    """The model under training."""

    def state_dict(self) -> dict[str, Any]:
        """Return the version."""
        return {"version": self.policy.weight_version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue counting from a stored version."""
        self.policy.weight_version = state["version"]


def age(trajectory: Trajectory, version: int) -> int:
    """Return the age in versions of the oldest weights that wrote a trajectory, or 0 if it has no sampled tokens."""
    return max((version - span.version for span in trajectory.all_weight_versions), default=0)


def check_staleness(trajectories: Sequence[Trajectory], version: int, max_staleness: int) -> None:
    """Check that no trajectory is older than its source allows.

    Args:
        version: Version of the policy's current weights.
        max_staleness: Limit of the source, `RolloutSource.max_staleness`.

    Raises:
        ValueError: A trajectory is older.
    """
    oldest = max((age(trajectory, version) for trajectory in trajectories), default=0)
    if oldest > max_staleness:
        raise ValueError(
            f"The rollout source gave a group that was sampled {oldest} weight versions ago; its max_staleness is "
            f"{max_staleness}. Drop such groups in the source, or raise its max_staleness."
        )


def num_stale_tokens(trajectories: Sequence[Trajectory], version: int, *, mixes_weights: bool = False) -> Tensor | None:
    """Return the position after each row's last token that older weights wrote.

    Weights only become newer during an answer, so all tokens that the policy wrote before that position are stale.

    Args:
        trajectories: Rollouts with B rows.
        version: Version of the policy's current weights.
        mixes_weights: Whether answers continue with the key-value cache of older weights. The probabilities of later
            tokens then depend on two versions, so these tokens count as written by older weights.

    Returns:
        `[B]` int64, 0 for a row without stale tokens. None if no row has stale tokens.
    """
    positions = []
    for row in rows_of(trajectories):
        is_mixed = mixes_weights and age(row, version) > 0
        ends = [*(span.start for span in row.weight_versions[1:]), row.length]
        spans = zip(row.weight_versions, ends, strict=False)  # a row without sampled tokens has no span
        positions.append(max((end for span, end in spans if is_mixed or span.version < version), default=0))
    return torch.tensor(positions) if any(positions) else None


def age_metrics(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """Return mean and maximum of `age` over trajectories, or no metrics without trajectories."""
    ages = [age(trajectory, version) for trajectory in trajectories]
    return {"avg_trajectory_age": sum(ages) / len(ages), "max_trajectory_age": float(max(ages))} if ages else {}


@dataclass(kw_only=True, eq=False)
class RolloutBatches:
    """Source that makes batches from rollouts (`runtime.run.BatchSource`)."""

    rollouts: RolloutSource
    """Source of the trajectories. The program may replace it before the first step."""
    prompts: Prompts
    """Stream of the prompts, which is told the prompts that were trained on."""
    refitter: Refitter
    """Object that sends the policy's current weights to the engines."""
    probe: SyncProbe
    """Check that the engines compute the policy's log-probabilities."""
    layout: Callable[[Sequence[Trajectory]], BatchedDataDict[Any]]
    """`build_training_batch` with all arguments bound except the trajectories."""
    trajectory_log: TrajectoryLog
    """Logger of conversations and rewards."""
    idle: IdleShares
    """Object that measures how long trainer, engines and environments are idle."""
    engine_load: Callable[[], dict[str, float]] = dict
    """Function that returns `GenerationInterface.load_metrics`, logged under `generation/`."""
    recorder: StepRecorder | None = None
    """Recorder of steps for a replay. If None, no step is recorded."""
    tasks: Collection[str] = ()
    """Names of the run's environments. If there are several, each has its own metrics."""
    samples_per_update: int | None = None
    """Number of samples of one optimizer update, `policy.train_global_batch_size`. If None, all samples of a step."""
    mixes_weights: bool = False
    """Whether answers continue with the key-value cache of older weights, as in `num_stale_tokens`."""

    def __post_init__(self) -> None:
        self._built = self.rollouts

    @property
    def was_changed(self) -> bool:
        """Return True if the program has replaced `rollouts`."""
        return self.rollouts is not self._built

    def next_batch(self, step: int, phase: Phase) -> StepBatch:
        """Return the batch of a step, made from rollouts. See `BatchSource.next_batch`.

        Raises:
            ValueError: The source gave a group that is older than its `max_staleness` allows.
            DataError: Samples have branches, and their rows do not divide into optimizer updates.
        """
        waiting = self._waiting(phase)
        with phase("weight_sync"), waiting("idle/refit_bubble"), self.idle.trainer_waits():
            self.refitter.ensure_fresh()
        exposed, starved = waiting("exposed_generation"), waiting("idle/buffer_starvation")
        with phase("generation"), exposed, starved, self.idle.trainer_waits():
            given = sorted(self.rollouts.next_groups(step), key=lambda group: group.order)
        self.refitter.before_training()
        groups = [group for group in given if group.trains]
        trajectories = numbered(groups)
        tensors = self.layout(trajectories)
        version, max_staleness = self.refitter.weight_version, self.rollouts.max_staleness
        check_staleness(trajectories, version, max_staleness)
        num_stale_B = num_stale_tokens(trajectories, version, mixes_weights=self.mixes_weights)
        self.probe.check(tensors, num_stale_B)
        rewards = _rewards(given)
        overlap = age_metrics(trajectories, version) | _discarded(given) if max_staleness else {}
        batch = StepBatch(
            tensors,
            trajectories,
            num_prompts=len(groups),
            metrics=rollout_metrics(trajectories)
            | metrics_by_environment(trajectories, self.tasks, OF_AN_ENVIRONMENT)
            | overlap
            | self.prompts.metrics(rewards)
            | self.rollouts.metrics,
            metrics_under={
                "refit": self.refitter.last_sync,
                "idle": self.idle.since_last_call(),
                "generation": self.engine_load(),
            },
            rows_per_update=rows_per_update(trajectories, self.samples_per_update or len(trajectories)),
            prompts=[group.prompt for group in given if group.prompt is not None],
            rewards=rewards,
            num_stale_B=num_stale_B,
        )
        if self.recorder is not None:
            self.recorder.begin(step, batch, phase)
        return batch

    def _waiting(self, phase: Phase) -> Phase:
        """Return `phase` if sampling runs ahead, because NeMo RL reports waits only then. Otherwise measure nothing."""
        return phase if self.rollouts.max_staleness else lambda _: nullcontext()

    def trained(self, step: int, batch: StepBatch) -> None:
        """Acknowledge the prompts of a trained batch, as `BatchSource.trained` does."""
        self.trajectory_log.write_training(step, batch.trajectories, batch.tensors)
        if self.recorder is not None:
            self.recorder.write(step, batch)
        self.prompts.acknowledge(batch.prompts)
        self.prompts.finish_step(step, batch.rewards)


def _rewards(groups: Sequence[Group]) -> GroupRewards:
    """Return the rewards of each group's samples by prompt. Groups whose prompt is not from the stream are left out."""
    return {
        group.prompt: [t.reward for t in group.trajectories if t.reward is not None and t.has_reward]
        for group in groups
        if group.prompt is not None
    }


def _discarded(groups: Sequence[Group]) -> dict[str, float]:
    """Return the number of sampled tokens that are not used in an update, as a metric."""
    tokens = sum(t.response_length for group in groups if not group.trains for t in group.trajectories)
    return {"num_discarded_tokens": float(tokens)}


class TrainingBatch(TypedDict, total=False):
    """The tensors that policy and losses read. B rows, T tokens of the longest row."""

    input_ids: Tensor  # [B, T] int64, right-padded with pad_token_id
    input_lengths: Tensor  # [B] int64
    token_mask: Tensor  # [B, T] float32, 1 on tokens the policy wrote, 0 on all else
    sample_mask: Tensor  # [B] float32, 0 removes the row from the loss
    generation_logprobs: Tensor  # [B, T] float32, 0 wherever token_mask is 0
    prompt_groups: Tensor  # [B] int64, equal for the rows of one prompt
    teacher_topk_logits: Tensor  # [B, T, k] float32, for the token after t; distillation only
    teacher_topk_indices: Tensor  # [B, T, k] int64
    advantages: Tensor  # [B, T] float32
    values: Tensor  # [B, T] float32, of the state before token t; with a critic only
    values_after: Tensor  # [B] float32, of the state after the last token; with bootstrap_truncated only
    returns: Tensor  # [B, T] float32, targets of the critic
    prev_logprobs: Tensor  # [B, T] float32; absent when the update is exactly on-policy
    reference_policy_logprobs: Tensor  # [B, T] float32; absent without a KL term
    positive_examples: Tensor  # [B] float32, 1 on answers with a positive reward
    routed_experts: Tensor  # [B, T, L, k] experts of L layers, -1 if unknown; absent without router replay
    row_inputs: list[RowInputs]  # B; absent where rows are token ids only
    num_counted_samples: Tensor  # [B] float32, all equal: rows with a token that counts; absent with prev_logprobs


def build_training_batch(
    trajectories: Sequence[Trajectory], pad_token_id: int, *, mask_truncated: bool, needs_reward: bool = True
) -> BatchedDataDict[TrainingBatch]:
    """Convert trajectories to tensors, with one row for each conversation (`experience.rows.rows_of`).

    Args:
        trajectories: Rollouts with B conversations in total. If all of their tokens are stored in other processes, the
            batch refers to the stored tokens (`models.batch_rows`).
        pad_token_id: Id written after the end of a sample.
        mask_truncated: Exclude samples that hit a length limit from the loss (overlong filtering).
        needs_reward: Exclude samples without a reward from the loss.
    """
    trajectories = rows_of(trajectories)
    weights = [_weight(trajectory, mask_truncated, needs_reward) for trajectory in trajectories]
    lengths = [trajectory.length for trajectory in trajectories]
    columns = {
        "input_lengths": torch.tensor(lengths, dtype=torch.int64),
        "sample_mask": torch.tensor(weights),
        PROMPT_GROUPS: torch.tensor([trajectory.group_index for trajectory in trajectories]),
    } | _inputs_column(trajectories)
    if all(trajectory.stored is not None for trajectory in trajectories):
        return BatchedDataDict(columns | stored_columns(trajectories, max(lengths), pad_token_id))
    return BatchedDataDict(columns | _token_columns(whole(trajectories), max(lengths), pad_token_id))


def _inputs_column(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Return the column of further inputs of rows, or nothing if no row has any."""
    if all(trajectory.row_inputs is None for trajectory in trajectories):
        return {}
    return {ROW_INPUTS: completed([trajectory.row_inputs for trajectory in trajectories])}


def _token_columns(trajectories: Sequence[Trajectory], width: int, pad_token_id: int) -> dict[str, Any]:
    """Return the columns with a value per token."""
    shape = (len(trajectories), width)
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
    columns: dict[str, Any] = {
        "input_ids": torch.from_numpy(input_ids),
        "token_mask": torch.from_numpy(token_mask),
        "generation_logprobs": torch.from_numpy(generation_logprobs),
    }
    experts = padded_experts((joined_experts(trajectory.message_log) for trajectory in trajectories), width)
    if experts is not None:
        columns[ROUTED_EXPERTS] = experts
    return columns


def _weight(trajectory: Trajectory, mask_truncated: bool, needs_reward: bool) -> float:
    if needs_reward and not trajectory.has_reward:
        return 0.0
    if mask_truncated and trajectory.outcome == Outcome.TRUNCATED:
        return 0.0
    return trajectory.loss_multiplier


def mask_sequences(
    batch: BatchedDataDict[TrainingBatch], errors_B: Tensor, rewards: Sequence[float | None], threshold: float | None
) -> dict[str, float]:
    """Set `sample_mask` to 0 for rows whose training and generation log-probabilities differ by more than a threshold.

    Args:
        errors_B: The `sequence_errors` of the rows.
        rewards: Rewards of the samples of the rows. A positive reward marks a right answer.
        threshold: Largest error of rows that stay in the loss. If None, no row is masked.

    Returns:
        Metrics: largest, smallest and mean error of the rows with a token that counts, before and after masking, or 0
            if there is no such row; the number of masked rows; and the share of masked rows with a right answer.
    """
    rows = BatchRows.of(batch)
    exceeds_B = errors_B > (math.inf if threshold is None else threshold)
    before = _error_metrics(errors_B, rows.counted())
    batch["sample_mask"] = batch["sample_mask"] * (~exceeds_B)
    after = _error_metrics(errors_B, rows.counted())
    right_B = torch.tensor([is_right(reward) for reward in rewards])
    num_masked = float(exceeds_B.sum())
    return before | after_mask(after) | masked_metrics(num_masked, float((right_B & exceeds_B).sum()))


def masked_metrics(num_masked: float = 0.0, num_right: float = 0.0) -> dict[str, float]:
    """Return the number of masked rows and the share of right answers among them, which is 0 if no row is masked."""
    return {"num_masked_seqs": num_masked, "masked_correct_pct": num_right / max(num_masked, 1.0)}


def _error_metrics(errors_B: Tensor, counted_B: Tensor) -> dict[str, float]:
    num_samples = int(counted_B.sum())
    if num_samples == 0:
        return dict.fromkeys(sequence_error_metrics(errors_B, counted_B, 0), 0.0)
    return {name: float(value) for name, value in sequence_error_metrics(errors_B, counted_B, num_samples).items()}
