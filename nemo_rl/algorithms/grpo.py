"""Build runs of group relative policy optimisation (arXiv 2402.03300), and re-export NeMo RL's names.

In one step (`runtime.run.train`) the engines get the current weights and answer the prompts, log-probabilities are
computed (`scoring.PolicyScoring`), `CreditAssignment` of this module computes advantages, and the policy is updated. A
variant (DAPO, GSPO, Dr.GRPO, RLOO, REINFORCE++, CISPO ...) differs only in its rollout source, its advantage estimator
and its loss, which this module chooses.

Invariants: an error that can be found before Ray starts is raised before Ray starts. No code that this module calls
gets a raw configuration dict. Samples without a reward are excluded from all statistics. Samples with a reward are
included, even if the loss excludes them. `Trajectory` keeps the environment's reward unchanged for metrics.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nemo_rl.algorithms.credit.advantages import AdvantageEstimator, AdvantageExtras, make_advantage_estimator
from nemo_rl.algorithms.credit.group_statistics import spread
from nemo_rl.algorithms.credit.joined_rows import JoinedRows
from nemo_rl.algorithms.credit.reward_shaping import effort_metrics, effort_penalty, scale_rewards, training_rewards
from nemo_rl.algorithms.credit.turns import padded, padded_rewards, set_invalid_tool_calls, set_malformed_thinking
from nemo_rl.algorithms.recipe import Recipe, Sampling
from nemo_rl.algorithms.rollout.environments import response_data
from nemo_rl.algorithms.rollout.source import check_source
from nemo_rl.algorithms.runtime.run import Run, Stage, StepBatch
from nemo_rl.algorithms.runtime.run import train_with_restarts as grpo_train
from nemo_rl.algorithms.scoring import forward_passes, policy_scoring
from nemo_rl.algorithms.setup.user_parts import NOTHING, UserParts
from nemo_rl.algorithms.start import start_run
from nemo_rl.algorithms.teaching.stages import teacher_stages
from nemo_rl.algorithms.teaching.teachers import TEACHER_LOGPROBS
from nemo_rl.compat.public_names import public_names
from nemo_rl.config import (
    AsyncGRPOConfig,
    EffortLevelConfig,
    GRPOConfig,
    GRPOMasterConfig,
    RewardPenaltyConfig,
    RewardPenaltyTokenIdsConfig,
    Role,
)
from nemo_rl.data.effort_levels import with_effort_levels
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.penalties import ReviewSettings
from nemo_rl.experience.trajectory import Trajectory, is_right
from nemo_rl.losses.loss_function import LossFunction
from nemo_rl.losses.policy_gradient import ClippedPGLossFn
from nemo_rl.losses.reductions import masked_mean
from nemo_rl.models.batch_rows import BatchRows
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.seed import set_seed

__all__ = [
    "AsyncGRPOConfig",
    "GRPOConfig",
    "MasterConfig",
    "RewardPenaltyConfig",
    "RewardPenaltyTokenIdsConfig",
    "async_grpo_train",
    "grpo_train",
    "recipe",
    "setup",
]

MasterConfig = GRPOMasterConfig
async_grpo_train = grpo_train
"""Alias for NeMo RL's function name. `grpo.overlap` decides whether sampling and training overlap."""
__getattr__ = public_names(
    __name__,
    {
        "ColocatablePolicyInterface": "nemo_rl.models.policy.interfaces",
        "EnvironmentInterface": "nemo_rl.environments.interfaces",
        "GenerationInterface": "nemo_rl.models.generation.interfaces",
        "Logger": "nemo_rl.utils.logger",
        "StatefulDataLoader": "torchdata.stateful_dataloader",
        "TokenizerType": "nemo_rl.data.interfaces",
        "refit_policy_generation": "nemo_rl.algorithms.rollout.sync_setup",
        "shutdown_environments": "nemo_rl.environments.user_environments",
    },
)

logger = logging.getLogger(__name__)

_OUTLIER = 50.0
"""A larger advantage leaves the other samples of the step almost without effect."""


def setup(
    master_config: GRPOMasterConfig | Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None = None,
    dataset: Any = None,
    val_dataset: Any = None,
    *,
    environments: Mapping[str, Any] | None = None,
    loss_fn: LossFunction | None = None,
    started_at: float = 0.0,
) -> Run:
    """Build a GRPO run and start its workers. Omitted arguments are built from the configuration.

    Args:
        master_config: the configuration: an object, or a dict with the keys of a configuration file.
        dataset: training prompts: an `AllTaskProcessedDataset` with your own processors, or anything with `len()`
            and `[i]` that gives a `DatumSpec`.
        val_dataset: validation prompts of the same kinds. If only `dataset` is given, there is no validation.
        environments: environments that reward answers, by task name: classes, objects, actors or clients, as
            `environments.user_environments.environment_of` accepts them.
        loss_fn: a `LossFunction`. A loss of your own gets `prev_logprobs` in every batch.
        started_at: `time.perf_counter()` at process start, to report the time to the first step.

    Raises:
        ConfigError, DataError, CheckpointError: the configuration, the data or a checkpoint cannot be used; raised
            before Ray starts.
        ResourceInsufficientError: the cluster has fewer resources than requested.
    """
    user_parts = UserParts(tokenizer, dataset, val_dataset, environments or {}, loss_fn)
    config = user_parts.checked(master_config, GRPOMasterConfig)
    return start_run(config, recipe(config, user_parts), started_at)


def recipe(config: GRPOMasterConfig, user_parts: UserParts = NOTHING) -> Recipe:
    """Build the GRPO recipe from configuration and user-supplied parts. No process is started.

    Raises:
        ConfigError, DataError: the configuration or the data cannot be used.
    """
    grpo = config.grpo
    set_seed(grpo.seed)
    tokenizer = user_parts.tokenizer_of(config.policy)
    loss_fn: LossFunction = user_parts.loss(ClippedPGLossFn(config.loss_fn), config.loss_fn)
    credit = CreditAssignment(make_advantage_estimator(grpo, config.loss_fn), grpo, config.effort_levels)
    marks_malformed = grpo.malformed_thinking_advantage is not None
    review = ReviewSettings(config.reward_penalties, config.effort_levels, marks_malformed)
    review.make(tokenizer)  # raises errors of the review's settings before Ray starts
    needs_prev, needs_reference = forward_passes(config, loss_fn, for_credit=credit.needs_logprobs)
    keeps_reference = needs_reference or config.keeps_reference
    data = user_parts.data(
        config, lambda: response_data(tokenizer, config, user_parts.running_environments), sampled=True
    )

    def stages(roles: Mapping[str, Policy]) -> list[Stage]:
        scoring = policy_scoring(config, roles["policy"], needs_prev or config.has_teachers, needs_reference)
        return [scoring, *teachers(roles), credit]

    data = with_effort_levels(data, config.effort_levels, grpo.seed, tokenizer, config.data)
    teachers = teacher_stages(config, data, tokenizer)
    check_source(grpo.rollout_source, "grpo.rollout_source")
    return Recipe(
        tokenizer=tokenizer,
        data=data,
        loss_fn=loss_fn,
        roles=config.models | {"policy": Role(config.policy, keeps_reference=keeps_reference)},
        stages=stages,
        sampling=Sampling(not config.has_teachers, user_parts.running_environments, review),
    )


class CreditAssignment:
    """Stage that computes advantages from rewards and writes them into the batch.

    Args:
        config: the section `grpo`.
    """

    def __init__(
        self,
        estimator: AdvantageEstimator,
        config: GRPOConfig,
        effort_levels: Mapping[str, EffortLevelConfig] | None = None,
    ):
        self._estimator = estimator
        self._config = config
        self._effort_levels = effort_levels or {}
        self._has_warned = False

    @property
    def needs_logprobs(self) -> bool:
        """True if the estimator reads `prev_logprobs` and `reference_policy_logprobs`."""
        return self._estimator.needs_logprobs

    name = "advantage_calculation"
    roles: tuple[str, ...] = ()

    def apply(self, batch: StepBatch) -> dict[str, float]:
        """Call `assign` as a stage of a run (`runtime.run.Stage`)."""
        return self.assign(batch.tensors, batch.trajectories)

    def assign(self, batch: BatchedDataDict[Any], trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Write `advantages [R, T]` and `positive_examples [R]` into the batch.

        Rewards, baselines and deviations belong to samples. The estimator gets each sample once, with its rows joined
        (`credit.joined_rows`). A sample that the loss leaves out (`sample_mask` 0) still enters baselines and
        deviations, because its reward shows how hard the prompt is; its own advantage is 0. Whitening over tokens uses
        the tokens that count.

        Args:
            batch: a training batch of R rows, those of the trajectories in order.
            trajectories: B rollouts, each of one row or, with branches, of several.

        Returns:
            Metrics: shaped reward of the samples, and spread of the advantages.
        """
        rows = BatchRows.of(batch)
        mask_RT = rows.advantage_mask()
        joined = JoinedRows.of(trajectories, batch["input_lengths"].clamp(max=mask_RT.shape[1]))
        mask_BT = joined.join(mask_RT)
        effort_penalty_B = effort_penalty(trajectories, self._effort_levels)
        total_B = training_rewards(trajectories, self._config) + effort_penalty_B
        rewards_B = total_B.float()
        extras = self._extras(trajectories) | {"total_rewards": total_B}
        if self.needs_logprobs:
            extras["logprobs_policy"] = joined.join(batch["prev_logprobs"])
            extras["logprobs_reference"] = joined.join(batch["reference_policy_logprobs"])
        if TEACHER_LOGPROBS in batch:
            extras["logprobs_policy"] = joined.join(batch["prev_logprobs"])
            extras["logprobs_teacher"] = joined.join(batch[TEACHER_LOGPROBS])
        advantages_BT = self._estimator.compute_advantage(None, rewards_B, mask_BT, **extras)
        self._set_fixed(advantages_BT, mask_BT, trajectories)
        advantages_RT = joined.cut(advantages_BT)
        batch["advantages"] = advantages_RT.float()
        positive_B = torch.tensor([float(is_right(t.penalized_reward)) for t in trajectories])
        batch["positive_examples"] = joined.repeat(positive_B)
        extremes = spread("advantages", advantages_RT, mask_RT, rows.advantage_counts())
        self._warn_of_outlier(max(extremes["advantages/max"], -extremes["advantages/min"]))
        return {
            "filtered_reward": float(
                masked_mean(rewards_B, joined.largest(batch["sample_mask"]) * extras["valid_mask"])
            ),
            **extremes,
            **effort_metrics(trajectories, self._effort_levels, effort_penalty_B),
        }

    def _warn_of_outlier(self, largest: float) -> None:
        """Warn once about an advantage that is much larger than all others of its step."""
        if largest > _OUTLIER and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "A sample has an advantage of %.4g and outweighs all others of this step. Its reward is divided by the "
                "deviation of rewards that are almost equal. Set grpo.use_leave_one_out_baseline=false, "
                "grpo.normalize_rewards=false, or bounds: grpo.advantage_clip_low and grpo.advantage_clip_high.",
                largest,
            )

    def _extras(self, trajectories: Sequence[Trajectory]) -> AdvantageExtras:
        """Return the estimator's arguments besides rewards and mask."""
        extras: AdvantageExtras = {
            "group_ids": torch.tensor([t.group_index for t in trajectories]),
            "valid_mask": torch.tensor([float(t.reward is not None) for t in trajectories]),
            "reward_components": self._components(trajectories),
            "turn_rewards": padded([t.penalized_turn_rewards for t in trajectories], 0.0, torch.float64),
            "turn_spans": padded([t.turn_spans for t in trajectories], (0, 0), torch.int64),
        }
        if any(t.has_steps for t in trajectories):
            extras["step_spans"], extras["step_rewards"] = padded_rewards(trajectories)
        return extras

    def _set_fixed(self, advantages: Tensor, mask_BT: Tensor, trajectories: Sequence[Trajectory]) -> None:
        """Set the advantages that the configuration fixes for certain tokens, in place."""
        config = self._config
        if config.invalid_tool_call_advantage is not None:
            set_invalid_tool_calls(advantages, mask_BT, trajectories, config.invalid_tool_call_advantage)
        if config.malformed_thinking_advantage is not None:
            set_malformed_thinking(advantages, mask_BT, trajectories, config.malformed_thinking_advantage)

    def _components(self, trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
        """Return reward components by name, each `[B]`, penalised and scaled. Shaping only changes total rewards."""
        names = sorted({name for t in trajectories for name in t.reward_components})
        rewards = {
            name: torch.tensor([t.after_penalties(t.reward_components.get(name, 0.0)) for t in trajectories])
            for name in names
        }
        return {name: scale_rewards(values_B, self._config.reward_scaling) for name, values_B in rewards.items()}
