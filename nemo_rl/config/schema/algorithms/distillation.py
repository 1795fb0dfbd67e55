"""Define the keys of on-policy distillation: `distillation`, its `loss_fn`, and `teacher`.

Invariant: the student is the section `policy`, as in every algorithm. The teacher is a second policy section whose
weights never change.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from nemo_rl.config.base.availability import OnlyWith
from nemo_rl.config.base.names import PartName
from nemo_rl.config.base.section import derived
from nemo_rl.config.base.value_types import Amount, AmountOrMinusOne, Count, Factor, FactorOrZero
from nemo_rl.config.schema.algorithms.rollout_training import Epochs, RolloutTrainingConfig
from nemo_rl.config.schema.algorithms.teachers import TokenWeightsConfig
from nemo_rl.config.schema.model.generation import GenerationConfig
from nemo_rl.config.schema.model.parallel import OptimizerConfig, SchedulerConfig
from nemo_rl.config.schema.model.policy import SchedulerList
from nemo_rl.config.schema.named_part import NamedPartConfig
from nemo_rl.config.schema.second_model import SecondModelConfig

OFF_POLICY = "distillation on written texts, and several teachers of one sample"


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
            *("alpha", "ce_loss_scale", "dynamic_loss_scaling", "kd_loss_mode", "normalize_teacher_by_vocab"),
            *("projection_matrix_paths", "reverse_kl", "student_vocab_size", "sum_weights_metric"),
            *("teacher_gold_loss", "teacher_vocab_sizes", "teacher_weights", "teacher_xtoken_loss", "temperature"),
        ),
        OFF_POLICY,
    )
    neutral: ClassVar[dict[str, tuple[float | str, ...]]] = {
        **dict.fromkeys(("alpha", "temperature"), (1.0,)),
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
    gold_loss: bool = False
    """Allow teachers with other tokenizers. Tokens with equal texts are compared one by one, all others by the sizes of
    their probabilities."""
    xtoken_loss: bool = False
    """Allow teachers with other tokenizers. Tokens of both are grouped into classes of tokens that begin with the same
    text, or as teacher.projection_matrix_path has them, and classes are compared."""
    vocab_topk: Count | None = None
    """With gold_loss or xtoken_loss: number of most likely tokens of each model that are compared at the beginning of
    a text that both models know; null: distillation.topk_logits_k."""
    uncommon_topk: Annotated[Count | None, OnlyWith("gold_loss")] = None
    """Number of most likely tokens in no class that are compared by size; null: as vocab_topk."""
    exact_token_match_only: bool = False
    """With gold_loss or xtoken_loss: compare only where the next text is one token of both models."""
    kl_loss_weight: FactorOrZero = 1.0
    """With gold_loss or xtoken_loss: factor of the divergence over tokens or classes that both models have."""
    uncommon_loss_weight: Annotated[FactorOrZero, OnlyWith("gold_loss")] = 1.0
    """Factor of the difference of the sorted probabilities of all other tokens."""

    @property
    def crosses_tokenizers(self) -> bool:
        """Return True if teachers may have other tokenizers."""
        return self.gold_loss or self.xtoken_loss


class TeacherLossConfig(DistillationLossConfig):
    """The divergence between teacher and student at each token of written texts."""

    later: ClassVar[dict[str, str]] = {
        key: feature for key, feature in DistillationLossConfig.later.items() if key != "ce_loss_scale"
    }
    idle: ClassVar[dict[str, str]] = {"zero_outside_topk": "all other tokens are compared as one"}

    vocab_topk: Count | None = 64
    """Number of most likely tokens of each model that are compared at the beginning of a text that both models know.
    null: 64."""
    ce_loss_scale: FactorOrZero = 0.1
    """Factor of the negative log-likelihood of the texts, which is added."""


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

    weight: Factor = 1.0
    """Factor of what the policy learns from this teacher: of the loss in distillation, of the advantages in GRPO."""
    token_weights: TokenWeightsConfig = Field(default_factory=TokenWeightsConfig)
    """Further factors, one for each token."""
    projection_matrix_path: str | None = None
    """With loss_fn.xtoken_loss: file of classes of tokens, which tools/make_projection.py makes; null: classes are made
    at the start of the run."""
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
