"""Make a step's batch from rollouts of the policy.

    engines get the policy's weights ─► rollouts ─► [B, T] tensors ─► check of the engines (first batch)

Invariants: rows are ordered by group, then sample, then conversation, whatever the order in which they finished; a
token counts in the loss only if the policy wrote it, and a sample only if it has a reward, where the algorithm learns
from rewards. Losses and their metrics take each row as a sequence; rewards and metrics of rollouts are of samples.
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
from nemo_rl.data.stored_rows import NUM_STALE, NUM_WRITTEN, STORED_ROWS
from nemo_rl.data.streams.prompt_stream import GroupRewards, Prompts
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.idle_shares import IdleShares
from nemo_rl.experience.metrics import OF_AN_ENVIRONMENT, metrics_by_environment, rollout_metrics
from nemo_rl.experience.rows import rows_of, rows_per_update
from nemo_rl.experience.runners.stored import lay_out, whole
from nemo_rl.experience.trajectory import Outcome, Trajectory, is_right
from nemo_rl.experience.trajectory_log import TrajectoryLog
from nemo_rl.losses.divergence import after_mask, sequence_error_metrics, sequence_errors


class Versioned(Protocol):
    """A model whose updates are counted."""

    weight_version: int


@dataclass(frozen=True)
class StoredVersion:
    """The version of the policy's weights, stored with the position in the data as a `stored_parts.StoredPart`."""

    policy: Versioned
    """The model under training."""

    def state_dict(self) -> dict[str, Any]:
        """Return the version."""
        return {"version": self.policy.weight_version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue counting from a stored version."""
        self.policy.weight_version = state["version"]


def age(trajectory: Trajectory, version: int) -> int:
    """Return by how many versions the oldest weights that wrote a trajectory precede `version`, or 0 for no tokens."""
    return max((version - span.version for span in trajectory.all_weight_versions), default=0)


def check_staleness(trajectories: Sequence[Trajectory], version: int, max_staleness: int) -> None:
    """Check that no trajectory is older than its source states.

    Args:
        version: of the policy's current weights.
        max_staleness: as `RolloutSource.max_staleness`.

    Raises:
        ValueError: a trajectory is older.
    """
    oldest = max((age(trajectory, version) for trajectory in trajectories), default=0)
    if oldest > max_staleness:
        raise ValueError(
            f"The rollout source gave a group that was sampled {oldest} weight versions ago; its max_staleness is "
            f"{max_staleness}. Drop such groups in the source, or raise its max_staleness."
        )


def stale_tokens(trajectories: Sequence[Trajectory], version: int, *, mixes_weights: bool = False) -> Tensor | None:
    """Mark the tokens of a batch that older weights wrote.

    Args:
        trajectories: B rows, the longest of T tokens.
        version: of the policy's current weights.
        mixes_weights: answers continue with keys and values of older weights, so that no weights alone give the
            probabilities of their later tokens; these count as written by older weights.

    Returns:
        `[B, T]` bool, where only tokens that the policy wrote have a meaning; None if all are of the current version.
    """
    if all(age(trajectory, version) == 0 for trajectory in trajectories):
        return None
    stale_BT = torch.zeros(len(trajectories), max(t.length for t in trajectories), dtype=torch.bool)
    for row, trajectory in enumerate(trajectories):
        for span in trajectory.weight_versions:  # each begins where the one before it ends
            stale_BT[row, span.start :] = span.version < version or (mixes_weights and age(trajectory, version) > 0)
    return stale_BT


def num_stale_tokens(trajectories: Sequence[Trajectory], version: int, *, mixes_weights: bool = False) -> Tensor | None:
    """Return the position after each row's last stale token, `[B]` int64, or None if no token is stale."""
    ends = []
    for trajectory in trajectories:
        fresh = (span.start for span in trajectory.weight_versions if span.version >= version and not mixes_weights)
        is_stale = age(trajectory, version) > 0
        ends.append(next(fresh, trajectory.length) if is_stale else 0)
    return torch.tensor(ends) if any(ends) else None


def age_metrics(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """Return mean and maximum over trajectories of the age of the oldest weights that wrote them, in versions."""
    ages = [age(trajectory, version) for trajectory in trajectories]
    return {"avg_trajectory_age": sum(ages) / len(ages), "max_trajectory_age": float(max(ages))} if ages else {}


class RolloutBatches:
    """Makes batches of rollouts, as a `runtime.run.BatchSource`.

    Args:
        rollouts: gives the trajectories.
        prompts: the stream that the prompts come from; the prompts of trained batches are acknowledged there.
        refitter: keeps the engines at the policy's weights.
        probe: checks that the engines sample from the policy.
        trajectory_log: writes conversations and rewards.
        layout: `build_training_batch`, with all arguments but the trajectories bound.
        idle: measures how long trainer, engines and environments have nothing to do.
        engine_load: returns `GenerationInterface.load_metrics`, to be logged under `generation/`.
        tasks: names of the run's environments; several of them have their own metrics.
        samples_per_update: samples of one optimizer update, `policy.train_global_batch_size`; None: those of a step.
        recorder: records steps for a replay; None records none.
        mixes_weights: as `stale_tokens`.
    """

    def __init__(
        self,
        rollouts: RolloutSource,
        prompts: Prompts,
        refitter: Refitter,
        probe: SyncProbe,
        trajectory_log: TrajectoryLog,
        layout: Callable[[Sequence[Trajectory]], BatchedDataDict[Any]],
        idle: IdleShares,
        engine_load: Callable[[], dict[str, float]] = dict,
        tasks: Collection[str] = (),
        samples_per_update: int | None = None,
        recorder: StepRecorder | None = None,
        mixes_weights: bool = False,
    ):
        self.rollouts = rollouts
        """As passed; may be replaced before the first step."""
        self._prompts = prompts
        self._refitter = refitter
        self._probe = probe
        self._trajectory_log = trajectory_log
        self._layout = layout
        self._idle = idle
        self._engine_load = engine_load
        self._tasks = tasks
        self._samples_per_update = samples_per_update
        self._recorder = recorder
        self._mixes_weights = mixes_weights

    def next_batch(self, step: int, phase: Phase) -> StepBatch:
        """See `BatchSource.next_batch`.

        Raises:
            ValueError: the source gave a group that is older than it states.
            DataError: samples have branches, and do not divide into optimizer updates.
        """
        waiting = self._waiting(phase)
        with phase("weight_sync"), waiting("idle/refit_bubble"), self._idle.trainer_waits():
            self._refitter.ensure_fresh()
        exposed, starved = waiting("exposed_generation"), waiting("idle/buffer_starvation")
        with phase("generation"), exposed, starved, self._idle.trainer_waits():
            given = sorted(self.rollouts.next_groups(step), key=lambda group: group.order)
        self._refitter.before_training()
        groups = [group for group in given if group.trains]
        trajectories = numbered(groups)
        tensors = self._layout(trajectories)
        version, max_staleness = self._refitter.weight_version, self.rollouts.max_staleness
        check_staleness(trajectories, version, max_staleness)
        stale_BT = mark_stale(tensors, trajectories, version, mixes_weights=self._mixes_weights)
        self._probe.check(tensors, stale_BT)
        rewards = _rewards(given)
        overlap = age_metrics(trajectories, version) | _discarded(given) if max_staleness else {}
        batch = StepBatch(
            tensors,
            trajectories,
            num_prompts=len(groups),
            metrics=rollout_metrics(trajectories)
            | metrics_by_environment(trajectories, self._tasks, OF_AN_ENVIRONMENT)
            | overlap
            | self._prompts.metrics(rewards)
            | self.rollouts.metrics,
            metrics_under={
                "refit": self._refitter.last_sync,
                "idle": self._idle.since_last_call(),
                "generation": self._engine_load(),
            },
            rows_per_update=rows_per_update(trajectories, self._samples_per_update or len(trajectories)),
            prompts=[group.prompt for group in given if group.prompt is not None],
            rewards=rewards,
            stale_BT=stale_BT,
        )
        if self._recorder is not None:
            self._recorder.begin(step, batch, phase)
        return batch

    def _waiting(self, phase: Phase) -> Phase:
        """Return `phase` if sampling runs ahead, where NeMo RL names waits, or a phase that measures nothing."""
        return phase if self.rollouts.max_staleness else lambda _: nullcontext()

    def trained(self, step: int, batch: StepBatch) -> None:
        """See `BatchSource.trained`."""
        self._trajectory_log.write_training(step, batch.trajectories, batch.tensors)
        if self._recorder is not None:
            self._recorder.write(step, batch)
        self._prompts.acknowledge(batch.prompts)
        self._prompts.finish_step(step, batch.rewards)


def mark_stale(
    tensors: BatchedDataDict[Any], trajectories: Sequence[Trajectory], version: int, *, mixes_weights: bool = False
) -> Tensor | None:
    """Return `stale_tokens` of the rows of trajectories, or write `NUM_STALE` into a batch of stored rows."""
    rows = rows_of(trajectories)
    if STORED_ROWS not in tensors:
        return stale_tokens(rows, version, mixes_weights=mixes_weights)
    num_stale_B = num_stale_tokens(rows, version, mixes_weights=mixes_weights)
    if num_stale_B is not None:
        tensors[NUM_STALE] = num_stale_B
    return None


def _rewards(groups: Sequence[Group]) -> GroupRewards:
    """Return the rewards of the samples of each group whose prompt is from the stream."""
    return {
        group.prompt: [t.reward for t in group.trajectories if t.reward is not None and t.has_reward]
        for group in groups
        if group.prompt is not None
    }


def _discarded(groups: Sequence[Group]) -> dict[str, float]:
    """Count the sampled tokens that no update uses."""
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
    teacher_topk_logits: Tensor  # [B, T, k] float32, after token t, over the temperature; distillation only
    teacher_topk_indices: Tensor  # [B, T, k] int64
    advantages: Tensor  # [B, T] float32
    values: Tensor  # [B, T] float32, of the state before token t; with a critic only
    values_after: Tensor  # [B] float32, of the state after the last token; with bootstrap_truncated only
    returns: Tensor  # [B, T] float32, what the critic is trained on
    prev_logprobs: Tensor  # [B, T] float32; absent when the update is exactly on-policy
    reference_policy_logprobs: Tensor  # [B, T] float32; absent without a KL term
    positive_examples: Tensor  # [B] float32, 1 on answers with a positive reward
    routed_experts: Tensor  # [B, T, L, k] experts of L layers, -1: not reported; absent without router replay
    row_inputs: list[RowInputs]  # B; absent where rows are token ids only
    num_counted_samples: Tensor  # [B] float32, all equal: rows with a token that counts; absent with prev_logprobs


def build_training_batch(
    trajectories: Sequence[Trajectory], pad_token_id: int, *, mask_truncated: bool, needs_reward: bool = True
) -> BatchedDataDict[TrainingBatch]:
    """Lay trajectories out as tensors, one row for each conversation of each (`experience.rows.rows_of`).

    Args:
        trajectories: rollouts with B conversations. If the tokens of all are stored elsewhere, so are those of the
            batch (`data.stored_rows`).
        pad_token_id: id written after the end of a sample.
        mask_truncated: exclude samples that hit a length limit from the loss (overlong filtering).
        needs_reward: exclude samples without a reward from the loss.
    """
    trajectories = rows_of(trajectories)
    weights_B = torch.tensor([_weight(t, mask_truncated, needs_reward) for t in trajectories])
    if all(trajectory.stored is not None for trajectory in trajectories):
        rows = lay_out(trajectories, pad_token_id)
        rows["sample_mask"] = weights_B
        return rows
    trajectories = whole(trajectories)
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
        "sample_mask": weights_B,
        "generation_logprobs": torch.from_numpy(generation_logprobs),
        PROMPT_GROUPS: torch.tensor([trajectory.group_index for trajectory in trajectories]),
    }
    experts = padded_experts((joined_experts(trajectory.message_log) for trajectory in trajectories), shape[1])
    if experts is not None:
        batch[ROUTED_EXPERTS] = experts
    if any(trajectory.row_inputs is not None for trajectory in trajectories):
        batch[ROW_INPUTS] = completed([trajectory.row_inputs for trajectory in trajectories])
    return BatchedDataDict(batch)


def _weight(trajectory: Trajectory, mask_truncated: bool, needs_reward: bool) -> float:
    if needs_reward and not trajectory.has_reward:
        return 0.0
    if mask_truncated and trajectory.outcome == Outcome.TRUNCATED:
        return 0.0
    return trajectory.loss_multiplier


def num_counted_samples(batch: BatchedDataDict[TrainingBatch]) -> int:
    """Count the rows of a batch that have a token that counts in the loss."""
    return int(_counted_samples(batch).sum())


def _counted_samples(batch: BatchedDataDict[TrainingBatch]) -> Tensor:
    """Return `[B]` bool: rows with a token that counts in the loss."""
    if STORED_ROWS in batch:
        return (batch[NUM_WRITTEN] > 0) & (batch["sample_mask"] != 0)
    return _counted(batch).any(1)


def mask_mismatched_sequences(
    batch: BatchedDataDict[TrainingBatch], rewards: Sequence[float | None], threshold: float | None
) -> dict[str, float]:
    """Measure how much training and generation log-probs of each row disagree, and mask those beyond a threshold.

    The error of a row is the mean over its tokens of `exp(|prev - generation|)`. Sets `sample_mask` to 0 where it
    exceeds `threshold`.

    Args:
        batch: with `prev_logprobs`.
        rewards: of the samples of the B rows; a positive one is a right answer.
        threshold: largest error that stays in the loss; None masks nothing.

    Returns:
        Metrics: largest, smallest and mean error of the rows with a token that counts, before and after masking (0 if
        there is no such row); the number of masked rows, and the share of them that was right.
    """
    counted_BT = _counted(batch)
    errors_B = sequence_errors(batch["prev_logprobs"][:, 1:], batch["generation_logprobs"][:, 1:], counted_BT)
    return mask_sequences(batch, errors_B, rewards, threshold)


def mask_sequences(
    batch: BatchedDataDict[TrainingBatch], errors_B: Tensor, rewards: Sequence[float | None], threshold: float | None
) -> dict[str, float]:
    """Do as `mask_mismatched_sequences`, with the errors of the rows."""
    exceeds_B = errors_B > (math.inf if threshold is None else threshold)
    before = _error_metrics(errors_B, _counted_samples(batch))
    batch["sample_mask"] = batch["sample_mask"] * (~exceeds_B)
    after = _error_metrics(errors_B, _counted_samples(batch))
    right_B = torch.tensor([is_right(reward) for reward in rewards])
    num_masked = float(exceeds_B.sum())
    return before | after_mask(after) | masked_metrics(num_masked, float((right_B & exceeds_B).sum()))


def masked_metrics(num_masked: float = 0.0, num_right: float = 0.0) -> dict[str, float]:
    """Build the metrics of masking: number of masked rows, and the share of them that was right (0 for none)."""
    return {"num_masked_seqs": num_masked, "masked_correct_pct": num_right / max(num_masked, 1.0)}


def _counted(batch: BatchedDataDict[TrainingBatch]) -> Tensor:
    """Return `[B, T - 1]` bool: predicted tokens that count in the loss."""
    return (batch["token_mask"][:, 1:] != 0) & (batch["sample_mask"][:, None] != 0)


def _error_metrics(errors_B: Tensor, counted_B: Tensor) -> dict[str, float]:
    num_samples = int(counted_B.sum())
    if num_samples == 0:
        return dict.fromkeys(sequence_error_metrics(errors_B, counted_B, 0), 0.0)
    return {name: float(value) for name, value in sequence_error_metrics(errors_B, counted_B, num_samples).items()}
