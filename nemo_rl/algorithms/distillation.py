"""On-policy distillation (arXiv 2306.13649): how a run of it is put together, and re-exports.

One step: fresh weights to the engines, the student answers, the teacher says how it would have gone on after every
token of the answers, the student moves towards that (`runtime.run.train`). The direction of the divergence and the
treatment of rare tokens are values of the loss (`losses.distillation`). Invariant: the teacher never changes.
"""

from collections.abc import Mapping

from nemo_rl.algorithms.rollout.start import RolloutRecipe, start_run
from nemo_rl.algorithms.rollout.teacher import TeacherScores, check_teacher_fits, check_vocab_equality
from nemo_rl.algorithms.runtime.roles import Role
from nemo_rl.algorithms.runtime.run import Run, Stage
from nemo_rl.algorithms.runtime.run import train as distillation_train
from nemo_rl.config import DistillationConfig, DistillationMasterConfig
from nemo_rl.data.datasets.setup import setup_response_data
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.losses.distillation import DistillationLossFn
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.seed import set_seed

__all__ = ["DistillationConfig", "MasterConfig", "check_vocab_equality", "distillation_train", "recipe", "setup"]

MasterConfig = DistillationMasterConfig


def setup(config: DistillationMasterConfig, started_at: float = 0.0) -> Run:
    """Build a distillation run and start its workers; arguments and errors as `grpo.setup`."""
    return start_run(config, recipe(config), started_at)


def recipe(config: DistillationMasterConfig) -> RolloutRecipe:
    """What makes a run that samples one of distillation; starts nothing.

    Raises:
        ConfigError, DataError: the configuration, the data or the teacher cannot be used.
    """
    set_seed(config.distillation.seed)
    tokenizer = get_tokenizer(config.policy.tokenizer)
    vocab_size = check_teacher_fits(config, tokenizer)
    generation = config.policy.generation
    assert generation is not None, "the configuration was checked"

    def stages(roles: Mapping[str, Policy]) -> list[Stage]:
        k = config.distillation.topk_logits_k
        return [TeacherScores(roles["teacher"], k, vocab_size, temperature=generation.temperature)]

    return RolloutRecipe(
        tokenizer=tokenizer,
        data=setup_response_data(tokenizer, config.data, config.env),
        loss_fn=DistillationLossFn(config.loss_fn),
        roles={"policy": Role(config.policy), "teacher": Role(config.teacher, trains=False)},
        stages=stages,
        needs_reward=False,
    )
