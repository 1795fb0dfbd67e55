"""Set up runs of on-policy distillation (arXiv 2306.13649), and re-export the names that such a run needs.

In one step (`runtime.run.train`) the engines get the current weights, the student answers, the teacher scores the next
token after every token of the answers, and the student is trained towards these scores. The direction of the divergence
and the treatment of rare tokens are options of the loss (`losses.supervised`). Invariant: the teacher's weights never
change.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.algorithms.recipe import Recipe, Sampling
from nemo_rl.algorithms.rollout.environments import response_data
from nemo_rl.algorithms.rollout.source import check_source
from nemo_rl.algorithms.runtime.run import Run, Stage, StepBatch
from nemo_rl.algorithms.runtime.run import train_with_restarts as distillation_train
from nemo_rl.algorithms.setup.user_parts import NOTHING, UserParts
from nemo_rl.algorithms.start import start_run
from nemo_rl.config import DistillationConfig, DistillationMasterConfig, PolicyConfig, TokenizerConfig
from nemo_rl.data.interfaces import TokenizerType
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.losses.loss_function import AnyLossFunction
from nemo_rl.losses.supervised import DistillationLossFn
from nemo_rl.models.huggingface.load import load_model_config
from nemo_rl.models.policy.interfaces import ScoringModel
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.seed import set_seed

logger = logging.getLogger(__name__)

SKIP_CHECK = "NRL_SKIP_DISTILLATION_TOKENIZER_CHECK"
"""Environment variable that turns an error about different vocabularies into a warning. The name is that of NeMo RL."""
_NUM_SHOWN = 3


@dataclass(frozen=True)
class TeacherScores:
    """Stage that adds the teacher's top-k logits to a batch (`runtime.run.Stage`)."""

    teacher: ScoringModel
    """The model that scores tokens."""
    k: int
    """Number of logits per token."""
    vocab_size: int | None = None
    """Only ids below this number are returned. None allows all ids."""
    temperature: float = 1.0
    """Temperature that divides the logits, as for the student."""

    name = "teacher_logprob_inference"
    roles = ("teacher",)

    def apply(self, batch: StepBatch) -> dict[str, float]:
        """Write `teacher_topk_logits` (float32, divided by the temperature) and `teacher_topk_indices`, `[B, T, k]`."""
        scored = self.teacher.get_topk_logits(batch.tensors, self.k, vocab_size=self.vocab_size)
        batch.tensors["teacher_topk_logits"] = scored["topk_logits"] / self.temperature
        batch.tensors["teacher_topk_indices"] = scored["topk_indices"]
        return {}


def check_teacher_fits(config: DistillationMasterConfig, tokenizer: TokenizerType) -> int | None:
    """Compare the vocabularies of teacher and student, from their tokenizers and model configurations.

    Args:
        tokenizer: The student's tokenizer.

    Returns:
        The number of token ids that the teacher may use, or None if it may use all ids of its vocabulary.

    Raises:
        ConfigError: The vocabularies differ, or k is larger than the vocabulary.
    """
    student, teacher = config.policy, config.teacher
    other = get_tokenizer(teacher.tokenizer, section="teacher")
    compare_vocabularies(tokenizer, other, student.model_name, teacher.model_name)
    num_student, num_teacher = _vocab_size(student, "policy"), _vocab_size(teacher, "teacher")
    num_usable, k = min(num_student, num_teacher), config.distillation.topk_logits_k
    if k > num_usable:
        raise ConfigError(
            f"distillation.topk_logits_k={k} is more than the {num_usable} entries of the vocabulary. "
            f"Set it to at most {num_usable}."
        )
    return num_usable if num_teacher > num_usable else None


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


def compare_vocabularies(student: TokenizerType, teacher: TokenizerType, student_name: str, teacher_name: str) -> None:
    """Check that every token has the same id in both tokenizers.

    Raises:
        ConfigError: A token has different ids. With the environment variable `SKIP_CHECK` this is only logged.
    """
    difference = _difference(student.get_vocab(), teacher.get_vocab())
    if difference is None:
        return
    message = (
        f"teacher.model_name={teacher_name!r} has another vocabulary than policy.model_name={student_name!r}: "
        f"{difference}. Distillation compares probabilities token by token, so both need the same tokens under the "
        "same ids: choose models of one family"
    )
    if os.environ.get(SKIP_CHECK, "0") not in ("", "0", "false"):
        logger.warning("%s. Ignored, because %s is set.", message, SKIP_CHECK)
        return
    raise ConfigError(f"{message}, or set {SKIP_CHECK}=1 if the tokens that differ never occur.")


def _difference(student: Mapping[str, int], teacher: Mapping[str, int]) -> str | None:
    """Describe how two vocabularies differ, or return None if they do not."""
    if student == teacher:
        return None
    tokens = sorted({*student, *teacher}, key=lambda token: (student.get(token, -1), teacher.get(token, -1)))
    differing = [token for token in tokens if student.get(token) != teacher.get(token)]
    examples = ", ".join(
        f"{token!r} is {_id(teacher, token)} for the teacher and {_id(student, token)} for the student"
        for token in differing[:_NUM_SHOWN]
    )
    return f"{len(differing)} of {len(tokens)} tokens differ, e.g. {examples}"


def _id(vocabulary: Mapping[str, int], token: str) -> str:
    return f"id {vocabulary[token]}" if token in vocabulary else "unknown"


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
    vocab_size = check_teacher_fits(config, tokenizer)
    generation = config.policy.sampling
    check_source(config.distillation.rollout_source, "distillation.rollout_source")

    def stages(roles: Mapping[str, Policy]) -> list[Stage]:
        k = config.distillation.topk_logits_k
        return [TeacherScores(roles["teacher"], k, vocab_size, temperature=generation.temperature)]

    return Recipe(
        tokenizer=tokenizer,
        data=user_parts.data(config, lambda: response_data(tokenizer, config), sampled=True),
        loss_fn=user_parts.loss(DistillationLossFn(config.loss_fn), config.loss_fn),
        roles=config.models,
        stages=stages,
        sampling=Sampling(needs_reward=False, environments=user_parts.running_environments),
    )
