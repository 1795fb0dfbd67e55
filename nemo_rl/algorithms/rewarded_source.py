"""Build the source of groups of an algorithm that learns from rewards: overlap, dynamic sampling, a user's own class.

Invariant: groups are compared by the rewards that advantages are computed from, after scaling.
"""

from collections.abc import Callable
from functools import partial

from nemo_rl.algorithms.credit.reward_shaping import scale_rewards
from nemo_rl.algorithms.rollout.ahead import with_overlap
from nemo_rl.algorithms.rollout.source import DynamicSampling, FreshRollouts, RolloutSource, source_wrapper
from nemo_rl.config import RewardedTrainingConfig


def rewarded_source(section: str, algorithm: RewardedTrainingConfig) -> Callable[[FreshRollouts], RolloutSource]:
    """Check the keys of the source, and return a function that builds it around freshly sampled groups.

    Args:
        section: name of the algorithm's section.

    Raises:
        ConfigError: the class that `rollout_source.name` names cannot be used.
    """
    wrap_source = source_wrapper(algorithm.rollout_source, f"{section}.rollout_source")
    factor = algorithm.batch_multiplier if algorithm.use_dynamic_sampling else 1.0

    def build(fresh: FreshRollouts) -> RolloutSource:
        rollouts = with_overlap(fresh, int(algorithm.num_prompts_per_step * factor), algorithm)
        if algorithm.use_dynamic_sampling:
            rollouts = DynamicSampling(
                rollouts,
                algorithm.num_prompts_per_step,
                algorithm.dynamic_sampling_max_gen_batches,
                partial(scale_rewards, config=algorithm.reward_scaling),
            )
        return wrap_source(rollouts)

    return build
