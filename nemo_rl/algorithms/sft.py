"""Supervised fine-tuning: next-token likelihood of the assistant's turns. How a run is put together, and re-exports.

Invariant: only what an assistant wrote counts, each token once.
"""

from functools import partial

from nemo_rl.algorithms.runtime.run import Run
from nemo_rl.algorithms.runtime.run import train as sft_train
from nemo_rl.algorithms.supervised.start import SupervisedRecipe, start_run
from nemo_rl.config import SFTConfig, SFTMasterConfig
from nemo_rl.data.collate_fn import sft_collate_fn
from nemo_rl.data.datasets.setup import setup_sft_data
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.losses.likelihood import NLLLossFn
from nemo_rl.utils.seed import set_seed

__all__ = ["MasterConfig", "SFTConfig", "recipe", "setup", "sft_train"]

MasterConfig = SFTMasterConfig


def setup(config: SFTMasterConfig, started_at: float = 0.0) -> Run:
    """Build an SFT run and start its workers; arguments and errors as `grpo.setup`."""
    return start_run(config, recipe(config), started_at)


def recipe(config: SFTMasterConfig) -> SupervisedRecipe:
    """What makes a run of written data one of SFT; starts nothing.

    Raises:
        ConfigError, DataError: the configuration or the data cannot be used.
    """
    set_seed(config.sft.seed)
    tokenizer = get_tokenizer(config.policy.tokenizer)
    return SupervisedRecipe(
        tokenizer=tokenizer,
        data=setup_sft_data(tokenizer, config.data),
        collate=partial(
            sft_collate_fn,
            tokenizer=tokenizer,
            make_sequence_length_divisible_by=config.policy.make_sequence_length_divisible_by,
            only_unmask_final=config.sft.only_unmask_final,
        ),
        loss_fn=NLLLossFn(),
        validated_names=(("loss", "val_loss"), ("num_valid_samples", "num_valid_samples")),
    )
