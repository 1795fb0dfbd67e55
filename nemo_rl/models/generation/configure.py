"""Complete the section `policy.generation` for programs written for NeMo RL. Runs complete it themselves."""

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
    """Fill in token ids from the tokenizer: the token that ends an answer and, in a dict, the padding token.

    Args:
        config: The section `policy.generation`, which is changed in place.
        is_eval: Has no effect. Engines of a run receive its weights, and engines of an evaluation load them.
        has_refit_draft_weights: Has no effect. Engines get the weights of `policy.draft` in every sync.
        trains_mtp: Has no effect. Engines that propose with the policy's own layers get these layers in every sync.

    Returns:
        `config`.
    """
    if config.get("stop_token_ids") is None and tokenizer.eos_token_id is not None:
        config["stop_token_ids"] = [tokenizer.eos_token_id]
    if not isinstance(config, GenerationConfig):
        config["_pad_token_id"] = tokenizer.pad_token_id
    return config
