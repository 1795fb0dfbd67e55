"""Find the tokens that end a model's response."""

from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig

from nemo_rl.models.huggingface.load import load_model_config


def stop_token_ids(
    model_name: str,
    tokenizer_eos: int | None,
    configured: Sequence[int] | None,
    config_overrides: dict[str, Any] | None = None,
) -> tuple[int, ...]:
    """Return the stop tokens that the tokenizer, the model and the run's configuration name, each once.

    Chat models often end a turn with another token than their tokenizer's end of sequence (Gemma, Llama 3, Phi,
    Qwen); their generation_config.json lists all of them. Models without that file list them in config.json.

    Args:
        model_name: local folder or hub id.
        tokenizer_eos: `eos_token_id` of the tokenizer, if it has one.
        configured: further ids.
        config_overrides: changes to the model's Hugging Face config.

    Raises:
        ConfigError: the model cannot be found.
    """
    try:
        generation = GenerationConfig.from_pretrained(model_name)
    except OSError:
        generation = GenerationConfig.from_model_config(load_model_config(model_name, config_overrides))
    of_model = generation.eos_token_id
    ids = [] if tokenizer_eos is None else [tokenizer_eos]
    ids += of_model if isinstance(of_model, list) else [] if of_model is None else [of_model]
    return tuple(dict.fromkeys([*ids, *(configured or ())]))
