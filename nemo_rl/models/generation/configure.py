"""What NeMo RL's programs do to `policy.generation` before they hand it on; here a run does the same by itself."""

from collections.abc import MutableMapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.config import GenerationConfig
from nemo_rl.utils.errors import NotBuiltError


def configure_generation_config[Config: GenerationConfig | MutableMapping[str, Any]](
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    is_eval: bool = False,
    has_refit_draft_weights: bool = False,
    trains_mtp: bool = False,
) -> Config:
    """Fill in what the tokenizer knows: the token that ends an answer, and in a dict the one that pads.

    Args:
        config: `policy.generation`, which is changed.
        tokenizer: of the policy.
        is_eval: has no effect: engines of a run get its weights, those of an evaluation read them.
        has_refit_draft_weights: must be False.
        trains_mtp: must be False.

    Returns:
        `config`.

    Raises:
        NotBuiltError: draft models or multi-token prediction are asked for.
    """
    if has_refit_draft_weights or trains_mtp:
        raise NotBuiltError("draft models and multi-token prediction belong to speculative decoding, not built yet.")
    if config.get("stop_token_ids") is None and tokenizer.eos_token_id is not None:
        config["stop_token_ids"] = [tokenizer.eos_token_id]
    if not isinstance(config, GenerationConfig):
        config["_pad_token_id"] = tokenizer.pad_token_id
    return config
