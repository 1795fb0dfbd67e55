"""Keys that SFT, DPO and reward-model training share: steps, the policy and the data.

Invariant: nothing here generates, so `policy.generation` is null, and a training step is one optimizer update.
"""

from typing import ClassVar

from pydantic import Field

from nemo_rl.config.base.numbers import AmountOrMinusOne, Count, Tokens
from nemo_rl.config.base.section import Section, Seed, derived
from nemo_rl.config.schema.algorithms.rollout_training import Epochs
from nemo_rl.config.schema.data import DataConfig, DatasetDefaults
from nemo_rl.config.schema.model.generation import GenerationConfig
from nemo_rl.config.schema.model.parallel import DynamicBatchingConfig, SequencePackingConfig
from nemo_rl.config.schema.model.policy import PolicyConfig

CountOrAll = AmountOrMinusOne
"""A count, or -1 for all."""

_PAIR_TRAIN_TOKENS = "${mul:2,${mul:${..max_total_sequence_length},${..train_micro_batch_size}}}"
_PAIR_LOGPROB_TOKENS = "${mul:2,${mul:${..max_total_sequence_length},${..logprob_batch_size}}}"


class SupervisedConfig(Section):
    """Steps, epochs and validation of supervised training."""

    max_num_steps: CountOrAll = 60
    """Training stops after this many steps; -1: never."""
    max_num_epochs: Epochs = 1
    """Training stops after this many passes over the training data; -1: no limit. With data.train.<i>.weight a pass
    is as many rows as all data sets have."""
    max_idle_steps: Count = 5
    """The run ends with an error after this many steps in a row without an update: no sample counts in the loss, or the
    gradients are not finite."""
    seed: Seed = 42
    """Seed of data order and initialisation."""
    val_period: CountOrAll = 10
    """Validate every this many steps; 0 or -1: only at start or end."""
    val_at_start: bool = True
    """Validate before the first step."""
    val_at_end: bool = False
    """Validate after the last step."""
    val_batches: CountOrAll = 8
    """Batches of one validation; -1: all of the data."""
    val_global_batch_size: Count = 32
    """Samples (pairs in DPO and reward models) of one validation batch."""
    val_micro_batch_size: Count = 1
    """Samples of one validation pass of a rank, if neither packing nor dynamic batching is on."""


class SupervisedPolicyConfig(PolicyConfig):
    """The model that supervised training updates."""

    generation: GenerationConfig | None = None
    """Must be null: the policy samples no answers."""


class PairDynamicBatchingConfig(DynamicBatchingConfig):
    """Microbatches of pairs with a token budget."""

    train_mb_tokens: Tokens = derived(_PAIR_TRAIN_TOKENS)
    """Padded tokens of one training microbatch of pairs."""
    logprob_mb_tokens: Tokens = derived(_PAIR_LOGPROB_TOKENS)
    """Padded tokens of one log-prob microbatch."""


class PairSequencePackingConfig(SequencePackingConfig):
    """Several pairs end to end in one row; both answers of a pair are in the same row."""

    train_mb_tokens: Tokens = derived(_PAIR_TRAIN_TOKENS)
    """Tokens of one packed row of pairs in training."""
    logprob_mb_tokens: Tokens = derived(_PAIR_LOGPROB_TOKENS)
    """Tokens of one packed row in log-prob passes."""


class PairPolicyConfig(SupervisedPolicyConfig):
    """The model that is trained on pairs of answers; its batch sizes count pairs."""

    train_global_batch_size: Count = 128
    """Pairs of one optimizer update."""
    train_micro_batch_size: Count = 2
    """Pairs of one pass of a rank."""
    dynamic_batching: PairDynamicBatchingConfig = Field(default_factory=PairDynamicBatchingConfig)
    """Microbatches by token budget."""
    sequence_packing: PairSequencePackingConfig = Field(default_factory=PairSequencePackingConfig)
    """Packing of sequences."""


class SupervisedDatasetDefaults(DatasetDefaults):
    """Values for every entry of data.train and data.validation that does not set them."""

    idle: ClassVar[dict[str, str]] = {"env_name": "nothing is rewarded here"}

    env_name: str | None = None
    """Not used: nothing is rewarded here."""
    processor: str | None = "sft_processor"
    """Function that turns a row into tokens; for pairs, sft_processor means the usual one of pairs."""


class SupervisedDataConfig(DataConfig):
    """Training and validation data: conversations, or pairs of answers."""

    ignored: ClassVar[dict[str, str]] = {"add_system_prompt": DataConfig.ignored["add_system_prompt"]}

    default: SupervisedDatasetDefaults = Field(default_factory=SupervisedDatasetDefaults)
    """Values for entries that leave them out."""
    add_bos: bool = True
    """Add the beginning-of-sequence token where the chat template does not."""
    add_eos: bool = True
    """Add the end-of-sequence token where the chat template does not end with one."""
    add_generation_prompt: bool = True
    """Count the header of an assistant turn as prompt, as in generation; false: it is trained on."""
