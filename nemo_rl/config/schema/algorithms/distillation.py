"""Define the keys of on-policy distillation: `distillation`, its `loss_fn`, and `teacher`.

Invariant: the student is the section `policy`, as in every algorithm. The teacher is a second policy section whose
weights never change.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from nemo_rl.config.base.names import PartName
from nemo_rl.config.base.section import derived
from nemo_rl.config.base.value_types import Amount, AmountOrMinusOne, Count
from nemo_rl.config.schema.algorithms.rollout_training import Epochs, RolloutTrainingConfig
from nemo_rl.config.schema.model.generation import GenerationConfig
from nemo_rl.config.schema.model.parallel import OptimizerConfig, SchedulerConfig
from nemo_rl.config.schema.model.policy import SchedulerList
from nemo_rl.config.schema.named_part import NamedPartConfig
from nemo_rl.config.schema.second_model import SecondModelConfig

CROSS_TOKENIZER = "distillation across tokenizers"


class DistillationConfig(RolloutTrainingConfig):
    """On-policy distillation: the student answers, and the teacher predicts the next token after every token."""

    num_prompts_per_step: Count = 128
    """Number of prompts drawn from the data for each training step."""
    num_generations_per_prompt: Count = 1
    """Number of answers that the student samples for each prompt."""
    max_num_steps: Amount = 1000
    """Training stops after this many steps."""
    max_num_epochs: Epochs = 10
    """Training stops after this many passes over the training data; -1: no limit. With data.train.<i>.weight one pass
    has as many prompts as all data sets together have rows."""
    topk_logits_k: Count = 64
    """Number of logits that the teacher sends for each token: those of its k most likely tokens."""
    val_period: AmountOrMinusOne = 20
    """Number of steps between two validations; 0 or -1: only at start or end."""
    val_batch_size: Count | None = 64
    """Number of prompts in one validation batch; null: all in one batch."""
    max_val_samples: Amount | None = 512
    """Prompts validated in total, equally many of each data set if it has so many; null: all of the validation data."""


class DistillationLossConfig(NamedPartConfig):
    """The divergence between teacher and student at each token, both at `policy.generation.temperature`."""

    later: ClassVar[dict[str, str]] = dict.fromkeys(
        (
            *("alpha", "ce_loss_scale", "dynamic_loss_scaling", "exact_token_match_only", "gold_loss", "kd_loss_mode"),
            *("kl_loss_weight", "normalize_teacher_by_vocab", "projection_matrix_paths", "reverse_kl"),
            *("student_vocab_size", "sum_weights_metric", "teacher_gold_loss", "teacher_vocab_sizes"),
            *("teacher_weights", "teacher_xtoken_loss", "temperature", "uncommon_topk", "vocab_topk", "xtoken_loss"),
        ),
        CROSS_TOKENIZER,
    )
    neutral: ClassVar[dict[str, tuple[float | str, ...]]] = {
        **dict.fromkeys(("alpha", "kl_loss_weight", "temperature"), (1.0,)),
        "kd_loss_mode": ("sum",),
    }

    name: Annotated[str, PartName(("distillation",))] = "distillation"
    """distillation: the divergence that the keys below describe; or the dotted path of a class."""
    kl_type: Literal["forward", "reverse", "mixed", "jensen_shannon"] = "mixed"
    """forward: KL(teacher || student), which covers all tokens that the teacher finds likely; reverse: KL(student ||
    teacher), which favours the teacher's most likely tokens; mixed: a weighted sum; jensen_shannon: both compared with
    the weighted mean of teacher and student, which is bounded."""
    mixed_kl_weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """With mixed: weight of the forward part; the reverse part has the remaining weight. With jensen_shannon: also the
    weight of the teacher in the mean."""
    zero_outside_topk: bool = False
    """true: treat the teacher's probability outside its top-k as 0, and compare over the whole vocabulary; false:
    compare both models only within the top-k."""


class TeacherConfig(SecondModelConfig):
    """The model that scores the student's answers. Unset shared keys follow `policy`."""

    trains: ClassVar[bool] = False
    place: ClassVar[str] = "teacher"
    idle: ClassVar[dict[str, str]] = dict.fromkeys(
        (
            *("train_global_batch_size", "max_grad_norm", "optimizer", "scheduler", "generation"),
            "offload_optimizer_for_logprob",
        ),
        "the teacher is frozen and only scores",
    )

    precision: Literal["bfloat16", "float16", "float32"] = derived("${policy.precision}")
    """Number format of the forward pass."""
    train_global_batch_size: Count = derived("${policy.train_global_batch_size}")
    """Not used: nothing is trained."""
    train_micro_batch_size: Count = derived("${policy.train_micro_batch_size}")
    """Used only as the default of logprob_batch_size."""
    optimizer: OptimizerConfig | None = None
    """Not used: the teacher's weights never change."""
    scheduler: SchedulerList | SchedulerConfig | None = None
    """Not used."""
    generation: GenerationConfig | None = None
    """Not used: the teacher is frozen (inference only)."""
