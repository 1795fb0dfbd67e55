"""Set up runs of on-policy distillation (arXiv 2306.13649), and re-export the names that such a run needs.

In one step (`runtime.run.train`) the engines get the current weights, the student answers, the teacher scores the next
token after every token of the answers, and the student is trained towards these scores. The direction of the divergence
and the treatment of rare tokens are options of the loss (`losses.supervised`). Invariant: the teacher's weights never
change.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.algorithms.recipe import Recipe, Sampling
from nemo_rl.algorithms.rollout.environments import response_data
from nemo_rl.algorithms.rollout.source import check_source
from nemo_rl.algorithms.runtime.run import Run, Stage
from nemo_rl.algorithms.runtime.run import train_with_restarts as distillation_train
from nemo_rl.algorithms.setup.user_parts import NOTHING, UserParts
from nemo_rl.algorithms.start import start_run
from nemo_rl.algorithms.teaching.stages import MakeStages, span_teachers
from nemo_rl.algorithms.teaching.teachers import TeacherRoutes, TeacherScores, compare_vocabularies, role_of
from nemo_rl.algorithms.teaching.token_weights import weight_of
from nemo_rl.config import DistillationConfig, DistillationMasterConfig, PolicyConfig, TokenizerConfig
from nemo_rl.data.interfaces import TokenizerType
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.losses.cross_tokenizer import CrossTokenizerLossFn
from nemo_rl.losses.loss_function import AnyLossFunction
from nemo_rl.losses.supervised import DistillationLossFn
from nemo_rl.models.huggingface.load import load_model_config
from nemo_rl.models.policy.interfaces import ScoringModel
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.seed import set_seed


def check_teacher_fits(config: DistillationMasterConfig, tokenizer: TokenizerType) -> int | None:
    """Compare the vocabularies of teachers and student, from their tokenizers and model configurations.

    Args:
        tokenizer: The student's tokenizer.

    Returns:
        The number of token ids that teachers may use, or None if they may use all ids of their vocabularies.

    Raises:
        ConfigError: The vocabularies differ, or k is larger than the vocabulary.
    """
    student, k = config.policy, config.distillation.topk_logits_k
    teachers = {name: role.section for name, role in config.models.items() if not role.trains}
    num_teachers = []
    for name, teacher in teachers.items():
        other = get_tokenizer(teacher.tokenizer, section=name)
        compare_vocabularies(tokenizer, other, student.model_name, teacher.model_name, name)
        num_teachers.append(_vocab_size(teacher, name))
    num_usable = min(_vocab_size(student, "policy"), *num_teachers)
    if k > num_usable:
        raise ConfigError(
            f"distillation.topk_logits_k={k} is more than the {num_usable} entries of the vocabulary. "
            f"Set it to at most {num_usable}."
        )
    return num_usable if max(num_teachers) > num_usable else None


def _token_teachers(config: DistillationMasterConfig, tokenizer: TokenizerType, vocab_size: int | None) -> MakeStages:
    """Return a function that builds the stages of teachers with the student's tokenizer.

    Args:
        tokenizer: The tokenizer of all models.
        vocab_size: The result of `check_teacher_fits`.
    """
    k, temperature = config.distillation.topk_logits_k, config.policy.sampling.temperature
    routes = TeacherRoutes({name: role_of(name) for name in config.teachers}, "teacher") if config.teachers else None

    weights = {role: weight_of(section, tokenizer, role) for role, section in config.sections_of_teachers.items()}

    def stages(roles: Mapping[str, ScoringModel]) -> list[Stage]:
        return [
            TeacherScores(roles[role], k, vocab_size, temperature, role, routes, weight)
            for role, weight in weights.items()
        ]

    return stages


def check_vocab_equality(tokenizer: TokenizerType, student_model_name: str, teacher_model_name: str) -> None:
    """Refuse a teacher whose tokenizer gives a token another id than `tokenizer`, the student's.

    Args:
        student_model_name: Hub id or folder of the student, for the message.
        teacher_model_name: Hub id or folder of the teacher.

    Raises:
        ConfigError: The vocabularies differ, or the teacher has no tokenizer.
    """
    other = get_tokenizer(TokenizerConfig.build(name=teacher_model_name), section="teacher")
    compare_vocabularies(tokenizer, other, student_model_name, teacher_model_name)


def _vocab_size(model: PolicyConfig, section: str) -> int:
    """Return the number of rows of the model's output head, which may exceed the number of tokens."""
    config = load_model_config(model.model_name, model.hf_config_overrides, section=section)
    return int(config.get_text_config().vocab_size)


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
    """Build a distillation run and start its workers. Arguments and errors are those of `grpo.setup`."""
    user_parts = UserParts(tokenizer, train_dataset, val_dataset, environments or {}, loss_fn)
    config = user_parts.checked(master_config, DistillationMasterConfig)
    return start_run(config, recipe(config, user_parts), started_at)


def recipe(config: DistillationMasterConfig, user_parts: UserParts = NOTHING) -> Recipe:
    """Build the recipe of distillation, with the parts that the program passes, without starting anything.

    Raises:
        ConfigError, DataError: the configuration, the data or the teacher cannot be used.
    """
    set_seed(config.distillation.seed)
    tokenizer = user_parts.tokenizer_of(config.policy)
    check_source(config.distillation.rollout_source, "distillation.rollout_source")
    crosses = config.loss_fn.crosses_tokenizers
    vocab_size = None if crosses else check_teacher_fits(config, tokenizer)
    data = user_parts.data(config, lambda: response_data(tokenizer, config), sampled=True)
    built_in = (CrossTokenizerLossFn if crosses else DistillationLossFn)(config.loss_fn)
    return Recipe(
        tokenizer=tokenizer,
        data=data,
        loss_fn=user_parts.loss(built_in, config.loss_fn),
        roles=config.models,
        stages=span_teachers(config, data, tokenizer) if crosses else _token_teachers(config, tokenizer, vocab_size),
        sampling=Sampling(needs_reward=False, environments=user_parts.running_environments),
    )
