"""Count the floating-point operations of a model's forward and backward pass, and list the peaks of devices.

Model FLOPs utilisation (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): observed tokens per second times
`6 N + 12 L H Q T` over the device's peak, with N parameters, L layers, H heads of dimension Q, sequences of T tokens. N
excludes an input embedding that is not also the output head: looking up rows multiplies nothing. A forward pass alone
is a third. Recomputation (activation checkpointing, logits of the chunked head) does not count.
"""

from typing import Any

from transformers import PretrainedConfig

PEAK_BF16_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.4,
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A10": 125.0,
    "RTX 4090": 165.2,
    "RTX A6000": 154.8,
}
"""Part of a device's name -> dense bfloat16 peak, from the makers' data sheets; the first match counts."""


def peak_tflops(device_name: str) -> float | None:
    """Return the dense bfloat16 TFLOP/s of a device; None if unknown."""
    names = device_name.replace("-", " ")
    return next((peak for part, peak in PEAK_BF16_TFLOPS.items() if part in names), None)


def flops_per_token(config: PretrainedConfig, num_parameters: int, num_tokens: int, *, backward: bool) -> float:
    """Return the operations for one token of a sequence.

    Args:
        config: configuration of the model.
        num_parameters: all parameters of the model, tied ones once.
        num_tokens: T, length of the sequences.
        backward: count a training step instead of a forward pass.
    """
    text: Any = config.get_text_config()
    tied = bool(text.tie_word_embeddings)
    multiplied = num_parameters - (0 if tied else text.vocab_size * text.hidden_size)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    scores = 12 * text.num_hidden_layers * text.num_attention_heads * head_dim * num_tokens
    return (6.0 * multiplied + scores) / (1 if backward else 3)
