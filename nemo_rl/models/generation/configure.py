"""Complete `policy.generation` for NeMo RL's programs, as runs of this library do by themselves."""

from collections.abc import MutableMapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.config import GenerationConfig


def configure_generation_config[Config: GenerationConfig | MutableMapping[str, Any]](
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    is_eval: bool = False,
    has_refit_draft_weights: bool = False,
    trains_mtp: bool = False,
) -> Config:
    """Fill in token ids from the tokenizer: the one that ends an answer and, in a dict, the padding token.

    Args:
        config: `policy.generation`; changed in place.
        is_eval: has no effect: engines of a run receive its weights, those of an evaluation load them.
        has_refit_draft_weights: has no effect: engines get the weights of `policy.draft` in every sync.
        trains_mtp: has no effect: engines that propose with the policy's own layers get them in every sync.

    Returns:
        `config`.
    """
    if config.get("stop_token_ids") is None and tokenizer.eos_token_id is not None:
        config["stop_token_ids"] = [tokenizer.eos_token_id]
    if not isinstance(config, GenerationConfig):
        config["_pad_token_id"] = tokenizer.pad_token_id
    return config
