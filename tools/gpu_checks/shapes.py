"""Define the checks' models: tiny ones whose numbers reveal wrong attention, and one of real size for speed."""

from dataclasses import dataclass
from typing import Any

import torch

_TINY: dict[str, Any] = {
    "vocab_size": 264,  # as in `tiny_models.make_char_tokenizer`
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,  # large weights, so that a wrongly attended token changes the numbers
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "pad_token_id": 256,
    "eos_token_id": 258,
}


@dataclass(frozen=True)
class Shape:
    """One model.

    Attributes:
        model_type: its architecture in transformers.
        fields: fields of its configuration.
        dtype: dtype of the weights on disk.
    """

    model_type: str
    fields: dict[str, Any]
    dtype: torch.dtype = torch.float32


SHAPES = {
    "qwen2": Shape("qwen2", _TINY),
    "qwen3": Shape("qwen3", _TINY | {"head_dim": 32}),
    "gemma3": Shape(
        "gemma3_text",
        _TINY
        | {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 5,
        },
    ),
    "qwen2.5-1.5b": Shape(
        "qwen2",
        {
            "vocab_size": 151936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
        torch.bfloat16,
    ),
}
"""Shapes by name."""
TINY = ("qwen2", "qwen3", "gemma3")
"""Full attention with biases, with norms of queries and keys, and with sliding windows."""
TINY_ON_CPU = ("qwen2", "gemma3")
"""The two shapes that differ most."""
