"""Make small real models and tokenizers for tests and the quick start.

They are genuine Hugging Face checkpoints without a download. Invariant: the same arguments give the same bytes on every
machine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from nemo_rl.utils.errors import ConfigError

TinyArch = Literal["llama", "qwen2", "qwen3"]

PAD_TOKEN = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
VOCABULARY_MULTIPLE = 8
"""Unused special tokens bring the vocabulary to a multiple of this number, so that it shards evenly."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

PAIR_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|answer|>' if message['role'] == 'assistant' else '<|question|>' }}{{ message['content'] }}"
    "{{ '<|end|>' if message['role'] == 'assistant' else '' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|answer|>' }}{% endif %}"
)

_CONFIG_CLASSES: dict[str, Callable[..., PretrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}


@dataclass(frozen=True)
class TinyShape:
    """Sizes of a tiny decoder.

    The defaults give about one million parameters, head dimension 32 (which vLLM's CPU attention
    supports), and sizes that divide by two for tensor-parallel tests.

    Attributes:
        vocab_size: rows of the embedding, at least the tokenizer's length.
        hidden_size: model width, equal to `num_heads * head_dim`.
        intermediate_size: width inside the gated MLP.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key/value heads (grouped-query attention).
        max_positions: longest sequence in tokens.
        tie_embeddings: whether the output head is the embedding matrix.
        initializer_range: standard deviation of the initial weights. About `hidden_size ** -0.5` lets a narrow model
            attend to single tokens after few steps; the default is that of wide models.
    """

    vocab_size: int = 264
    hidden_size: int = 128
    intermediate_size: int = 512
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    max_positions: int = 2048
    tie_embeddings: bool = True
    initializer_range: float = 0.02


def make_char_tokenizer(model_max_length: int = 2048, extra_tokens: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token for each UTF-8 byte, and thus for each ASCII character.

    Every string encodes and decodes exactly; there is no unknown token. The special tokens are
    `<|endoftext|>` (padding), `<|im_start|>`, `<|im_end|>` (end of turn, the EOS token) and a few
    reserved ones, 264 in total. It has a chat template for system, user and assistant turns.

    Args:
        model_max_length: longest sequence in tokens that the tokenizer declares.
        extra_tokens: further special tokens, such as those of images; they come before the reserved ones.

    Returns:
        The tokenizer.

    Example:
        >>> tokenizer = make_char_tokenizer()
        >>> len(tokenizer("37+85=")["input_ids"])
        6
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = [PAD_TOKEN, TURN_START, TURN_END, *extra_tokens]
    missing = -(len(alphabet) + len(specials)) % VOCABULARY_MULTIPLE
    specials += [f"<|reserved_{index}|>" for index in range(missing)]
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PAD_TOKEN,
        padding_side="right",
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def make_pair_tokenizer(model_max_length: int = 2048) -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token for each two digits, besides one for each byte, and another chat template.

    Its special tokens have other ids than those of `make_char_tokenizer`, and other names except for padding. There are
    360 tokens.

    Args:
        model_max_length: longest sequence in tokens that the tokenizer declares.

    Example:
        >>> make_pair_tokenizer().tokenize("37+85=")
        ['37', '+', '85', '=']
    """
    pairs = [f"{left}{right}" for left in "0123456789" for right in "0123456789"]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *pairs]
    merges = [(pair[0], pair[1]) for pair in pairs]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = (PAD_TOKEN, "<|question|>", "<|answer|>", "<|end|>")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token=PAD_TOKEN,
        padding_side="right",
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
        chat_template=PAIR_CHAT_TEMPLATE,
    )


def make_tiny_model(
    arch: TinyArch = "qwen2",
    shape: TinyShape | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Make a randomly initialised causal language model of the given architecture.

    Args:
        arch: "llama", "qwen2" or "qwen3".
        shape: sizes; the default shape when None.
        seed: seed of the initial weights. The caller's random state is not changed.
        dtype: dtype of the weights; they are drawn in float32 and then cast.

    Returns:
        The model in eval mode, on CPU.

    Raises:
        ConfigError: unknown architecture, or heads that do not divide the width.
    """
    config = tiny_config(arch, shape or TinyShape())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.to(dtype).eval()


def tiny_config(arch: TinyArch, shape: TinyShape) -> PretrainedConfig:
    """Build the Hugging Face config of a tiny model, with the token ids of `make_char_tokenizer`.

    Raises:
        ConfigError: unknown architecture, or heads that do not divide the width.
    """
    if arch not in _CONFIG_CLASSES:
        raise ConfigError(f"arch={arch!r} is not one of {sorted(_CONFIG_CLASSES)}.")
    if shape.hidden_size % shape.num_heads or shape.num_heads % shape.num_kv_heads:
        raise ConfigError(
            f"hidden_size={shape.hidden_size} must divide by num_heads={shape.num_heads}, and "
            f"num_heads by num_kv_heads={shape.num_kv_heads}."
        )
    return _CONFIG_CLASSES[arch](**config_fields(shape))


def config_fields(shape: TinyShape) -> dict[str, Any]:
    """Return the fields of a tiny decoder's config that all architectures share."""
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.hidden_size // shape.num_heads,
        "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": shape.tie_embeddings,
        "initializer_range": shape.initializer_range,
        "use_cache": True,
        "bos_token_id": None,
        "pad_token_id": 256,
        "eos_token_id": 258,
    }


def save_tiny_checkpoint(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | ProcessorMixin
) -> None:
    """Write a model and its tokenizer as one Hugging Face folder (safetensors), readable by all users.

    Args:
        folder: folder to write; created if missing.
        model: the model; its weights are stored in their current dtype.
        tokenizer: the model's tokenizer, or its processor of images and text.
    """
    text: Any = getattr(tokenizer, "tokenizer", tokenizer)
    model.generation_config.pad_token_id = text.pad_token_id
    model.generation_config.eos_token_id = text.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)


def save_mixture(folder: Path) -> None:
    """Save a Qwen3-MoE model with 4 of 32 experts for each token."""
    tokenizer = make_char_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=264,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        initializer_range=0.15,
    )
    torch.manual_seed(0)
    save_tiny_checkpoint(folder, Qwen3MoeForCausalLM(config).float(), tokenizer)
