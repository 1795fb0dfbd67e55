"""Build runs of group relative policy optimisation (arXiv 2402.03300), and re-export NeMo RL's names.

One step: fresh weights to the engines, rollouts, log-probabilities, advantages, update (`runtime.run.train`). Every
variant (DAPO, GSPO, Dr.GRPO, RLOO, REINFORCE++, CISPO ...) is a value chosen here: a rollout source, an advantage
estimator, a loss. Invariant: what can be refused before Ray starts is refused before; below this file no code sees a
raw configuration dict.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.algorithms.credit.advantages import make_advantage_estimator
from nemo_rl.algorithms.credit.assignment import CreditAssignment
from nemo_rl.algorithms.credit.reward_shaping import scale_rewards
from nemo_rl.algorithms.rollout.scoring import PolicyScoring
from nemo_rl.algorithms.rollout.source import DynamicSampling, FreshRollouts, RolloutSource, source_wrapper
from nemo_rl.algorithms.rollout.start import RolloutRecipe, start_run
from nemo_rl.algorithms.runtime.run import Run, Stage
from nemo_rl.algorithms.runtime.run import train_with_restarts as grpo_train
from nemo_rl.algorithms.setup.user_parts import NOTHING, UserParts
from nemo_rl.compat.public_names import public_names
from nemo_rl.config import GRPOConfig, GRPOMasterConfig, Role
from nemo_rl.data.datasets.setup import setup_response_data
from nemo_rl.losses.loss_function import LossFunction
from nemo_rl.losses.policy_gradient import ClippedPGLossFn
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.seed import set_seed

__all__ = ["GRPOConfig", "MasterConfig", "grpo_train", "recipe", "setup"]

MasterConfig = GRPOMasterConfig
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
    """Build a GRPO run and start its workers; arguments that are left out follow the configuration.

    Args:
        master_config: the configuration: an object, or the dict that a file would hold, which is checked like a file.
        tokenizer: tokenizer of the model and of the data.
        dataset: training prompts: an `AllTaskProcessedDataset` with your own processors, or anything with `len()`
            and `[i]` that gives a `DatumSpec`.
        val_dataset: validation prompts of the same kinds; with `dataset` alone there is no validation.
        environments: environments that reward answers, by task name: classes, objects, actors or clients; see
            `environments.user_environments.environment_of`.
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


def recipe(config: GRPOMasterConfig, user_parts: UserParts = NOTHING) -> RolloutRecipe:
    """Build the GRPO recipe from the configuration and user-supplied parts; start nothing.

    Raises:
        ConfigError, DataError: the configuration or the data cannot be used.
    """
    grpo = config.grpo
    set_seed(grpo.seed)
    tokenizer = user_parts.tokenizer_of(config.policy)
    loss_fn: LossFunction = user_parts.loss(ClippedPGLossFn(config.loss_fn), config.loss_fn)
    credit = CreditAssignment(make_advantage_estimator(grpo, config.loss_fn), grpo)
    needs_prev, needs_reference = forward_passes(config, loss_fn, credit)

    wrap_source = source_wrapper(grpo.rollout_source, "grpo.rollout_source")

    def stages(roles: Mapping[str, Policy]) -> list[Stage]:
        threshold, corrects = grpo.seq_logprob_error_threshold, corrects_staleness(config)
        return [PolicyScoring(roles["policy"], needs_prev, needs_reference, threshold, corrects), credit]

    def source(fresh: FreshRollouts) -> RolloutSource:
        rollouts: RolloutSource = fresh
        if grpo.use_dynamic_sampling:
            scale = partial(scale_rewards, config=grpo.reward_scaling)
            rollouts = DynamicSampling(fresh, grpo.num_prompts_per_step, grpo.dynamic_sampling_max_gen_batches, scale)
        return wrap_source(rollouts)

    return RolloutRecipe(
        tokenizer=tokenizer,
        data=user_parts.data(config, lambda: setup_response_data(tokenizer, config.data, config.env), sampled=True),
        loss_fn=loss_fn,
        roles=config.models | {"policy": Role(config.policy, keeps_reference=needs_reference)},
        stages=stages,
        source=source,
        prompt_factor=grpo.batch_multiplier if grpo.use_dynamic_sampling else 1.0,
        environments=user_parts.running_environments,
    )


def corrects_staleness(config: GRPOMasterConfig) -> bool:
    """Return whether the loss handles stale tokens with `prev_logprobs` of the current policy.

    Importance weights account for the difference to the policy that sampled; a forced ratio of 1 ignores it on purpose.
    """
    return config.loss_fn.use_importance_sampling_correction or config.loss_fn.force_on_policy_ratio


def forward_passes(config: GRPOMasterConfig, loss_fn: LossFunction, credit: CreditAssignment) -> tuple[bool, bool]:
    """Return whether a run needs `prev_logprobs` and reference log-probabilities; see `rollout.scoring`.

    This holds for batches of the policy's current weights; `PolicyScoring` adds `prev_logprobs` to batches with stale
    tokens. A loss of another kind than the configured one always gets `prev_logprobs`, and reference log-probabilities
    if it or the configured loss needs them.
    """
    grpo = config.grpo
    samples = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    several_updates = samples > config.policy.train_global_batch_size
    on_policy = config.loss_fn.force_on_policy_ratio or not several_updates
    own = not isinstance(loss_fn, ClippedPGLossFn)
    needs_prev = own or not on_policy or grpo.seq_logprob_error_threshold is not None
    needs_reference = getattr(loss_fn, "needs_reference", False)
    if own:
        needs_reference = needs_reference or ClippedPGLossFn(config.loss_fn).needs_reference
    return needs_prev or credit.needs_logprobs, needs_reference or credit.needs_logprobs
