"""Set up runs of supervised fine-tuning, which train on the tokens of the assistant's turns.

With a teacher, the model is also trained towards the teacher's predictions of these tokens. Invariant: only tokens of
assistant turns count in the loss, each once.
"""

from nemo_rl.algorithms.recipe import Recipe, no_stages
from nemo_rl.algorithms.runtime.run import train_with_restarts as sft_train
from nemo_rl.algorithms.setup.user_parts import NOTHING, UserParts
from nemo_rl.algorithms.start import SupervisedSetup
from nemo_rl.algorithms.supervised import collate_by
from nemo_rl.algorithms.teaching.stages import MakeStages, teachers_of_texts
from nemo_rl.config import SFTConfig, SFTMasterConfig
from nemo_rl.config.base.names import SFT_VALIDATION_METRICS
from nemo_rl.data.collate_fn import sft_collate_fn
from nemo_rl.data.datasets.setup import setup_sft_data
from nemo_rl.losses.cross_tokenizer import CrossTokenizerLossFn
from nemo_rl.losses.loss_function import LossFunction
from nemo_rl.losses.supervised import NLLLossFn
from nemo_rl.utils.seed import set_seed

__all__ = ["MasterConfig", "SFTConfig", "recipe", "setup", "sft_train"]

MasterConfig = SFTMasterConfig


def recipe(config: SFTMasterConfig, user_parts: UserParts = NOTHING) -> Recipe:
    """Build the recipe of SFT without starting anything. `user_parts` are the parts that the caller passes.

    Raises:
        ConfigError, DataError: the configuration or the data cannot be used.
    """
    set_seed(config.sft.seed)
    tokenizer = user_parts.tokenizer_of(config.policy)
    names = tuple(SFT_VALIDATION_METRICS.items())
    configured: LossFunction = NLLLossFn()
    loss_fn: LossFunction = user_parts.loss(configured, config.loss_fn)
    stages: MakeStages = no_stages
    names = names if loss_fn is configured else names[:1]
    if config.sections_of_teachers:
        stages, loss = teachers_of_texts(config, tokenizer), config.teacher_loss_fn
        loss_fn = CrossTokenizerLossFn(loss, loss.ce_loss_scale, len(config.sections_of_teachers))
        names = (*SFT_VALIDATION_METRICS.items(), *((name, name) for name in ("nll", "forward_kl", "reverse_kl")))
    return Recipe(
        tokenizer=tokenizer,
        data=user_parts.data(config, lambda: setup_sft_data(tokenizer, config.data)),
        collate=collate_by(sft_collate_fn, config.policy, tokenizer, only_unmask_final=config.sft.only_unmask_final),
        loss_fn=loss_fn,
        roles=config.models,
        stages=stages,
        validated_names=names,
    )


setup = SupervisedSetup(SFTMasterConfig, recipe)
"""Build an SFT run and start its workers. Arguments and errors are those of `grpo.setup`."""
