"""Set up runs of on-policy distillation (arXiv 2306.13649), and re-export what belongs to them.

One step (`runtime.run.train`): the engines get the current weights, the student answers, the teacher scores the next
token after every token of the answers, and the student is trained towards these scores. The direction of the divergence
and the treatment of rare tokens are options of the loss (`losses.distillation`). Invariant: the teacher's weights never
change.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.algorithms.rollout.ahead import with_overlap
from nemo_rl.algorithms.rollout.environments import response_data
from nemo_rl.algorithms.rollout.source import FreshRollouts, RolloutSource, source_wrapper
from nemo_rl.algorithms.rollout.start import RolloutRecipe, start_run
from nemo_rl.algorithms.runtime.run import Run, Stage
from nemo_rl.algorithms.runtime.run import train_with_restarts as distillation_train
from nemo_rl.algorithms.setup.user_parts import NOTHING, UserParts
from nemo_rl.algorithms.teacher import TeacherScores, check_teacher_fits, check_vocab_equality
from nemo_rl.config import DistillationConfig, DistillationMasterConfig
from nemo_rl.losses.distillation import DistillationLossFn
from nemo_rl.losses.loss_function import AnyLossFunction
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.seed import set_seed

__all__ = ["DistillationConfig", "MasterConfig", "check_vocab_equality", "distillation_train", "recipe", "setup"]

MasterConfig = DistillationMasterConfig


def setup(
    master_config: DistillationMasterConfig | Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None = None,
    train_dataset: Any = None,
    val_dataset: Any = None,
    *,
    environments: Mapping[str, Any] | None = None,
    loss_fn: AnyLossFunction | None = None,
    started_at: float = 0.0,
) -> Run:
    """Build a distillation run and start its workers; arguments and errors as in `grpo.setup`."""
    user_parts = UserParts(tokenizer, train_dataset, val_dataset, environments or {}, loss_fn)
    config = user_parts.checked(master_config, DistillationMasterConfig)
    return start_run(config, recipe(config, user_parts), started_at)


def recipe(config: DistillationMasterConfig, user_parts: UserParts = NOTHING) -> RolloutRecipe:
    """Build the recipe of distillation, with the parts that the program passes; start nothing.

    Raises:
        ConfigError, DataError: the configuration, the data or the teacher cannot be used.
    """
    set_seed(config.distillation.seed)
    tokenizer = user_parts.tokenizer_of(config.policy)
    vocab_size = check_teacher_fits(config, tokenizer)
    generation = config.policy.generation
    assert generation is not None, "the configuration was checked"

    algorithm = config.distillation
    wrap_source = source_wrapper(algorithm.rollout_source, "distillation.rollout_source")

    def source(fresh: FreshRollouts) -> RolloutSource:
        return wrap_source(with_overlap(fresh, algorithm.num_prompts_per_step, algorithm))

    def stages(roles: Mapping[str, Policy]) -> list[Stage]:
        k = config.distillation.topk_logits_k
        return [TeacherScores(roles["teacher"], k, vocab_size, temperature=generation.temperature)]

    return RolloutRecipe(
        tokenizer=tokenizer,
        data=user_parts.data(config, lambda: response_data(tokenizer, config), sampled=True),
        loss_fn=user_parts.loss(DistillationLossFn(config.loss_fn), config.loss_fn),
        roles=config.models,
        stages=stages,
        source=source,
        needs_reward=False,
        environments=user_parts.running_environments,
    )
