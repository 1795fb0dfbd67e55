"""Define the keys of SFT, DPO and reward-model training: common keys (steps, policy, data), and `sft`, `dpo`, `rm`."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from nemo_rl.config.base.section import Section, Seed, derived
from nemo_rl.config.base.value_types import AmountOrMinusOne, Count, Factor, FactorOrZero, Number, Tokens
from nemo_rl.config.schema.algorithms.rollout_training import Epochs
from nemo_rl.config.schema.data import DataConfig, DatasetDefaults
from nemo_rl.config.schema.model.generation import GenerationConfig
from nemo_rl.config.schema.model.parallel import DynamicBatchingConfig, SequencePackingConfig
from nemo_rl.config.schema.model.policy import AttributeName, PolicyConfig, RewardModelConfig

CountOrAll = AmountOrMinusOne
"""A count, or -1 for all of the data."""
StepSeparator = Annotated[str, Field(min_length=1)]
"""Text after each step of an answer."""

_PAIR_TRAIN_TOKENS = "${mul:2,${mul:${..max_total_sequence_length},${..train_micro_batch_size}}}"
_PAIR_LOGPROB_TOKENS = "${mul:2,${mul:${..max_total_sequence_length},${..logprob_batch_size}}}"


class SupervisedConfig(Section):
    """Steps, epochs and validation of supervised training."""

    max_num_steps: CountOrAll = 60
    """Training stops after this number of steps; -1: no limit."""
    max_num_epochs: Epochs = 1
    """Training stops after this many passes over the training data; -1: no limit. With data.train.<i>.weight one pass
    has as many rows as all data sets together."""
    max_idle_steps: Count = 5
    """The run ends with an error after this number of consecutive steps without an update: no sample counts in the
    loss, or the gradients are not finite."""
    seed: Seed = 42
    """Seed of data order and initialisation."""
    val_period: CountOrAll = 10
    """Number of steps between two validations; 0 or -1: only at start or end."""
    val_at_start: bool = True
    """Validate before the first step."""
    val_at_end: bool = False
    """Validate after the last step."""
    val_batches: CountOrAll = 8
    """Number of batches of one validation; -1: all of the data."""
    val_global_batch_size: Count = 32
    """Number of samples (pairs in DPO and reward models) of one validation batch."""
    val_micro_batch_size: Count = 1
    """Number of samples of a rank's validation microbatch, if neither packing nor dynamic batching is on."""


class SupervisedPolicyConfig(PolicyConfig):
    """The model that supervised training updates."""

    generation: GenerationConfig | None = None
    """Must be null, because the policy does not sample answers."""


class PairDynamicBatchingConfig(DynamicBatchingConfig):
    """Microbatches of pairs with a token budget."""

    train_mb_tokens: Tokens = derived(_PAIR_TRAIN_TOKENS)
    """Number of padded tokens of a training microbatch of pairs."""
    logprob_mb_tokens: Tokens = derived(_PAIR_LOGPROB_TOKENS)
    """Number of padded tokens of a microbatch for log-probabilities."""


class PairSequencePackingConfig(SequencePackingConfig):
    """Packing of several pairs into one row, which contains both answers of each pair."""

    train_mb_tokens: Tokens = derived(_PAIR_TRAIN_TOKENS)
    """Number of tokens of a packed row of pairs in training."""
    logprob_mb_tokens: Tokens = derived(_PAIR_LOGPROB_TOKENS)
    """Number of tokens of a packed row for log-probabilities."""


class PairPolicyConfig(SupervisedPolicyConfig):
    """The model that is trained on pairs of answers, with batch sizes that count pairs."""

    train_global_batch_size: Count = 128
    """Number of pairs of one optimizer update."""
    train_micro_batch_size: Count = 2
    """Number of pairs of a rank's microbatch."""
    dynamic_batching: PairDynamicBatchingConfig = Field(default_factory=PairDynamicBatchingConfig)
    """Microbatches by token budget."""
    sequence_packing: PairSequencePackingConfig = Field(default_factory=PairSequencePackingConfig)
    """Packing of sequences."""


class SupervisedDatasetDefaults(DatasetDefaults):
    """Values of keys that entries of data.train and data.validation do not set."""

    idle: ClassVar[dict[str, str]] = {"env_name": "nothing is rewarded here"}

    env_name: str | None = None
    """Not used, because nothing is rewarded."""
    processor: str | None = "sft_processor"
    """Function that converts a row to tokens. vlm_hf_data_processor means the same as sft_processor, which for pairs is
    the default function for pairs."""


class SupervisedDataConfig(DataConfig):
    """Training and validation data: conversations, or pairs of answers."""

    ignored: ClassVar[dict[str, str]] = {"add_system_prompt": DataConfig.ignored["add_system_prompt"]}

    default: SupervisedDatasetDefaults = Field(default_factory=SupervisedDatasetDefaults)
    """Values of keys that entries leave out."""
    add_bos: bool = True
    """Add the beginning-of-sequence token if the chat template does not."""
    add_eos: bool = True
    """Add the end-of-sequence token if the chat template does not end with it."""
    add_generation_prompt: bool = True
    """Treat the header of an assistant turn as prompt, as in generation; false: the header counts in the loss."""


class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning: steps, epochs and validation."""

    only_unmask_final: bool = False
    """Train only on the last assistant turn of a conversation instead of all assistant turns."""


PreferenceLossName = Literal["sigmoid", "ipo", "hinge", "robust", "rpo", "simpo", "orpo", "kto"]


class DPOConfig(SupervisedConfig):
    """Direct preference optimisation: steps, validation and the loss."""

    max_num_steps: CountOrAll = 150
    """Training stops after this number of steps; -1: no limit."""
    val_period: CountOrAll = 25
    """Number of steps between two validations; 0 or -1: only at start or end."""
    val_global_batch_size: Count = 8
    """Number of pairs of one validation batch."""
    reference_policy_kl_penalty: Factor = 0.05
    """Beta: the factor of a log-probability ratio in the reward."""
    preference_loss: PreferenceLossName = "sigmoid"
    """Loss on a pair: sigmoid (DPO), ipo, hinge, robust (noisy labels), rpo (DPO plus likelihood of the chosen answer),
    simpo and orpo (both without a reference); or kto, a loss on single answers labelled desirable or undesirable, for
    which batch sizes count answers."""
    preference_loss_weight: FactorOrZero = 1.0
    """Weight of the preference loss."""
    sft_loss_weight: FactorOrZero = 0.0
    """Weight of the negative log-likelihood of the chosen answer."""
    preference_average_log_probs: bool = False
    """Divide log-ratios by the length of the answer. ipo, simpo and orpo always do this."""
    sft_average_log_probs: bool = derived("${.preference_average_log_probs}")
    """Divide the log-likelihood of the chosen answer by its length. rpo and orpo always do this."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs whose labels are assumed to be swapped, for sigmoid and robust."""
    target_margin: FactorOrZero = 0.5
    """SimPO's gamma: amount by which the reward of the chosen answer should exceed that of the rejected answer."""
    desirable_weight: Factor = 1.0
    """KTO's weight of desirable answers, lambda_D."""
    undesirable_weight: Factor = 1.0
    """KTO's weight of undesirable answers, lambda_U."""


class RMConfig(SupervisedConfig):
    """Reward-model training: steps, validation and the losses of each reward_model_type."""

    max_num_steps: CountOrAll = -1
    """Training stops after this number of steps; -1: no limit."""
    val_period: CountOrAll = 16
    """Number of steps between two validations; 0 or -1: only at start or end."""
    val_at_start: bool = False
    """Validate before the first step."""
    val_batches: CountOrAll = -1
    """Number of batches of one validation; -1: all of the data."""
    margin: FactorOrZero = 0.0
    """Difference of scores (chosen minus rejected) at which the loss of a pair is ln 2."""
    center_rewards_coefficient: FactorOrZero = 0.0
    """Weight of (chosen + rejected)^2, which keeps scores centred on 0."""
    attribute_weights: dict[AttributeName, FactorOrZero] = Field(default_factory=dict)
    """For regression: weights of the squared errors of attributes, relative to each other; 1 for an attribute that is
    left out. With 0 an attribute is only validated."""
    min_score: Number | None = None
    """For regression: the smallest score of a row. A row with a smaller score cannot be used; null: no limit."""
    max_score: Number | None = None
    """For regression: the largest score of a row. A row with a larger score cannot be used; null: no limit."""
    step_separator: StepSeparator = "\n"
    """For process: text that is put after each step of an answer. The score of a step is read at its last token."""


class ScoringModelConfig(RewardModelConfig):
    """A head for scores instead of an output head for the vocabulary."""

    enabled: bool = True
    """Give the model a head for scores."""


class RMPolicyConfig(PairPolicyConfig):
    """The model that learns to score answers. Batch sizes count pairs with bradley_terry, and otherwise answers."""

    reward_model_cfg: ScoringModelConfig = Field(default_factory=ScoringModelConfig)
    """The head for scores; must stay enabled."""
