"""From a configuration to the parts of a GRPO run.

With `assemble_distillation` and `assemble_supervised` the only place that knows which class serves which key; what
elsewhere would be an `if` in a loop is a value chosen here. Order: everything that can be refused without a worker
(tokenizer, data, loss), then Ray and the workers, then what connects them. Invariant: below this file no code sees a
raw configuration dict, and nothing that can be refused early is refused late.
"""

from nemo_rl.algorithms.credit.advantages import make_advantage_estimator
from nemo_rl.algorithms.credit.assignment import CreditAssignment
from nemo_rl.algorithms.grpo import GRPORun
from nemo_rl.algorithms.rollout.assemble import RolloutPlan, start_rollouts
from nemo_rl.algorithms.rollout.rollout_source import DynamicSampling, FreshRollouts, RolloutSource
from nemo_rl.algorithms.rollout.scoring import PolicyScoring
from nemo_rl.algorithms.runtime.run_folders import open_folders
from nemo_rl.config import GRPOConfig, GRPOMasterConfig
from nemo_rl.data.datasets.setup import setup_response_data
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.losses.policy_gradient import ClippedPGLossFn
from nemo_rl.utils.seed import set_seed


def assemble_grpo(config: GRPOMasterConfig, started_at: float = 0.0) -> GRPORun:
    """Build a GRPO run.

    Args:
        config: a checked configuration.
        started_at: `time.perf_counter()` at process start, to report the time to the first step.

    Raises:
        ConfigError, DataError: the configuration or the data cannot be used; raised before Ray starts.
        ResourceInsufficientError: the cluster lacks what is asked for.
    """
    grpo = config.grpo
    set_seed(grpo.seed)
    tokenizer = get_tokenizer(config.policy.tokenizer)
    data = setup_response_data(tokenizer, config.data, config.env)
    loss_fn = ClippedPGLossFn(config.loss_fn)
    credit = CreditAssignment(make_advantage_estimator(grpo, config.loss_fn), grpo)
    needs_prev, needs_reference = forward_passes(config, loss_fn, credit)
    plan = RolloutPlan(
        tokenizer,
        data,
        open_folders(config, len(data.train)),
        needs_reference=needs_reference,
        prompt_factor=grpo.batch_multiplier if grpo.use_dynamic_sampling else 1.0,
        started_at=started_at,
    )
    parts = start_rollouts(config, plan)
    policy = parts.workers.policy
    return GRPORun(
        session=parts.session,
        refitter=parts.refitter,
        probe=parts.probe,
        source=_source(grpo, parts.source),
        scoring=PolicyScoring(policy, needs_prev, needs_reference, grpo.seq_logprob_error_threshold),
        credit=credit,
        policy=policy,
        loss_fn=loss_fn,
        trajectory_log=parts.trajectory_log,
        pad_token_id=tokenizer.pad_token_id,
        mask_truncated=grpo.overlong_filtering,
        closers=parts.closers,
    )


def forward_passes(config: GRPOMasterConfig, loss_fn: ClippedPGLossFn, credit: CreditAssignment) -> tuple[bool, bool]:
    """Whether a run needs `prev_logprobs` and reference log-probabilities; see `algorithms.scoring`."""
    grpo = config.grpo
    samples = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    several_updates = samples > config.policy.train_global_batch_size
    on_policy = config.loss_fn.force_on_policy_ratio or not several_updates
    needs_prev = not on_policy or grpo.seq_logprob_error_threshold is not None
    return needs_prev or credit.needs_logprobs, loss_fn.needs_reference or credit.needs_logprobs


def _source(grpo: GRPOConfig, fresh: FreshRollouts) -> RolloutSource:
    if not grpo.use_dynamic_sampling:
        return fresh
    return DynamicSampling(fresh, grpo.num_prompts_per_step, grpo.dynamic_sampling_max_gen_batches)
