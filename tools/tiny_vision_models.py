"""Make small real vision-language models with their processors, for tests and the quick start of images.

They are genuine Hugging Face checkpoints without a download: model, tokenizer, chat template and image processor.
Invariant: the same arguments give the same bytes on every machine.

    uv run python tools/tiny_vision_models.py qwen2_5_vl --output /tmp/tiny-qwen2_5_vl
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from tiny_models import TinyShape, config_fields, make_char_tokenizer, save_tiny_checkpoint, tiny_config
from transformers import (
    AutoModelForImageTextToText,
    Idefics3Config,
    Idefics3ImageProcessor,
    Idefics3Processor,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    SmolVLMConfig,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

from nemo_rl.utils.errors import ConfigError

TinyVisionArch = Literal["qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm"]

QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
END_OF_UTTERANCE = "<end_of_utterance>"
IDEFICS_TOKENS = (
    END_OF_UTTERANCE,
    "<fake_token_around_image>",
    "<image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)

QWEN_TEMPLATE = (
    "{% set image_count = namespace(value=0) %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The published template of Qwen2.5-VL without its standard system turn and without videos."""

QWEN_TOOLS_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system' }}{% for tool in tools %}"
    "{{ '\\n' + tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content or [] %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if message.tool_calls %}{{ '[' }}{% for call in message.tool_calls %}"
    "{{ (', ' if not loop.first else '') + call.function.name + '(' }}"
    "{% for name, value in call.function.arguments.items() %}"
    "{{ (', ' if not loop.first else '') + name + '=' + value | tojson }}{% endfor %}{{ ')' }}"
    "{% endfor %}{{ ']' }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""A template with tools, whose calls vLLM's parser `pythonic` reads, and with images."""

IDEFICS_TEMPLATE = (
    "<|im_start|>"
    "{% for message in messages %}"
    "{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}"
    "{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}"
    "{% endfor %}<end_of_utterance>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""The published template of SmolVLM and, but for its first token, of Idefics3. Contents must be lists of parts."""


@dataclass(frozen=True)
class TinyVisionShape:
    """Sizes of a tiny vision-language model.

    The defaults give about 0.2 to 0.4 million parameters, and 4 image tokens for an image of 28 x 28 pixels.

    Attributes:
        text: sizes of the decoder; its vocabulary is that of the tokenizer.
        tower_hidden_size: width of the vision tower, with heads of 32.
        tower_intermediate_size: width inside the tower's MLP.
        tower_layers: layers of the tower.
        patch_size: side of a patch in pixels.
        merge_size: patches per side that become one image token.
        tile_size: side of the square that Idefics3 and SmolVLM scale each image to.
        split_images: whether Idefics3 and SmolVLM enlarge each image to 2 x 2 tiles and add the whole image.
    """

    text: TinyShape = field(
        default_factory=lambda: TinyShape(
            hidden_size=64,
            intermediate_size=128,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            initializer_range=0.125,
        )
    )
    tower_hidden_size: int = 64
    tower_intermediate_size: int = 128
    tower_layers: int = 2
    patch_size: int = 7
    merge_size: int = 2
    tile_size: int = 28
    split_images: bool = False

    @property
    def token_size(self) -> int:
        """Side in pixels of the square that becomes one image token."""
        return self.patch_size * self.merge_size


def make_vision_processor(arch: TinyVisionArch, shape: TinyVisionShape | None = None) -> ProcessorMixin:
    """Make the processor of images and text, with the family's special tokens and chat template.

    Args:
        arch: "qwen2_5_vl", "qwen3_vl", "idefics3" or "smolvlm".
        shape: sizes; the default shape when None.

    Returns:
        The processor. Its `tokenizer` has one token for each UTF-8 byte.

    Raises:
        ConfigError: unknown architecture.
    """
    return _family(arch).processor(shape or TinyVisionShape())


def make_tiny_vision_model(
    arch: TinyVisionArch = "qwen2_5_vl",
    shape: TinyVisionShape | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Make a randomly initialised vision-language model whose token ids are those of `make_vision_processor`.

    Args:
        arch: "qwen2_5_vl", "qwen3_vl", "idefics3" or "smolvlm".
        shape: sizes; the default shape when None.
        seed: seed of the initial weights. The caller's random state is not changed.
        dtype: dtype of the weights; they are drawn in float32 and then cast.

    Returns:
        The model in eval mode, on CPU.

    Raises:
        ConfigError: unknown architecture.
    """
    family, shape = _family(arch), shape or TinyVisionShape()
    tokenizer = family.tokenizer()
    shape = replace(shape, text=replace(shape.text, vocab_size=len(tokenizer)))
    config = family.config(shape, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    return model.to(dtype).eval()


@dataclass(frozen=True)
class _Family:
    tokenizer: Callable[[], PreTrainedTokenizerFast]
    processor: Callable[[TinyVisionShape], ProcessorMixin]
    config: Callable[[TinyVisionShape, PreTrainedTokenizerFast], PretrainedConfig]


def _family(arch: str) -> _Family:
    if arch not in _FAMILIES:
        raise ConfigError(f"arch={arch!r} is not one of {sorted(_FAMILIES)}.")
    return _FAMILIES[arch]


def _qwen_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = make_char_tokenizer(extra_tokens=QWEN_TOKENS)
    tokenizer.chat_template = QWEN_TEMPLATE
    return tokenizer


def _qwen_processor(
    shape: TinyVisionShape, processor_class: type, make_video: Callable[..., Any], normal: dict[str, Any]
) -> ProcessorMixin:
    tokenizer = _qwen_tokenizer()
    sizes = {
        "patch_size": shape.patch_size,
        "merge_size": shape.merge_size,
        "size": {"shortest_edge": shape.token_size**2, "longest_edge": 64 * shape.token_size**2},
        **normal,
    }
    return processor_class(
        Qwen2VLImageProcessor(**sizes), tokenizer, make_video(**sizes), chat_template=tokenizer.chat_template
    )


def _qwen2_5_vl_processor(shape: TinyVisionShape) -> ProcessorMixin:
    # Without a choice here, transformers warns in every process, although no video is read.
    make_video = partial(Qwen2VLVideoProcessor, cap_pixels_per_frame=True)
    return _qwen_processor(shape, Qwen2_5_VLProcessor, make_video, {})


def _qwen3_vl_processor(shape: TinyVisionShape) -> ProcessorMixin:
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return _qwen_processor(shape, Qwen3VLProcessor, Qwen3VLVideoProcessor, half)


def _qwen_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in zip(names, QWEN_TOKENS, strict=True)}


def _qwen_tower(shape: TinyVisionShape) -> dict[str, Any]:
    return {
        "depth": shape.tower_layers,
        "hidden_size": shape.tower_hidden_size,
        "intermediate_size": shape.tower_intermediate_size,
        "num_heads": shape.tower_hidden_size // 32,
        "out_hidden_size": shape.text.hidden_size,
        "patch_size": shape.patch_size,
        "spatial_merge_size": shape.merge_size,
        "initializer_range": shape.text.initializer_range,
    }


def _qwen2_5_vl_config(shape: TinyVisionShape, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    mrope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    # A window of 2 x 2 image tokens in all layers but the last: a larger image has several windows.
    window = {"window_size": 2 * shape.token_size, "fullatt_block_indexes": [shape.tower_layers - 1]}
    return Qwen2_5_VLConfig(
        text_config={**config_fields(shape.text), "rope_parameters": mrope},
        vision_config={**_qwen_tower(shape), **window},
        tie_word_embeddings=shape.text.tie_embeddings,
        **_qwen_ids(tokenizer),
    )


def _qwen3_vl_config(shape: TinyVisionShape, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    mrope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    deep = {"deepstack_visual_indexes": list(range(shape.tower_layers)), "num_position_embeddings": 64}
    return Qwen3VLConfig(
        text_config={**config_fields(shape.text), "rope_parameters": mrope},
        vision_config={**_qwen_tower(shape), **deep},
        tie_word_embeddings=shape.text.tie_embeddings,
        **_qwen_ids(tokenizer),
    )


def _idefics_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = make_char_tokenizer(extra_tokens=IDEFICS_TOKENS)
    tokenizer.chat_template = IDEFICS_TEMPLATE
    tokenizer.eos_token = END_OF_UTTERANCE
    return tokenizer


def _idefics_sizes(shape: TinyVisionShape) -> dict[str, Any]:
    sides = 2 if shape.split_images else 1
    return {
        "size": {"longest_edge": sides * shape.tile_size},
        "max_image_size": {"longest_edge": shape.tile_size},
        "do_image_splitting": shape.split_images,
    }


def _idefics3_processor(shape: TinyVisionShape) -> ProcessorMixin:
    tokenizer = _idefics_tokenizer()
    return Idefics3Processor(
        Idefics3ImageProcessor(**_idefics_sizes(shape)),
        tokenizer,
        image_seq_len=(shape.tile_size // shape.token_size) ** 2,
        chat_template=tokenizer.chat_template,
    )


def _smolvlm_processor(shape: TinyVisionShape) -> ProcessorMixin:
    tokenizer, sizes = _idefics_tokenizer(), _idefics_sizes(shape)
    return SmolVLMProcessor(
        SmolVLMImageProcessor(**sizes),
        tokenizer,
        SmolVLMVideoProcessor(size=sizes["size"], max_image_size=sizes["max_image_size"]),
        image_seq_len=(shape.tile_size // shape.token_size) ** 2,
        chat_template=tokenizer.chat_template,
    )


def _idefics_config(
    config_class: Callable[..., PretrainedConfig], shape: TinyVisionShape, tokenizer: PreTrainedTokenizerFast
) -> PretrainedConfig:
    text = tiny_config("llama", shape.text)
    text.eos_token_id = tokenizer.eos_token_id
    return config_class(
        text_config=text.to_dict(),
        vision_config={
            "hidden_size": shape.tower_hidden_size,
            "intermediate_size": shape.tower_intermediate_size,
            "num_hidden_layers": shape.tower_layers,
            "num_attention_heads": shape.tower_hidden_size // 32,
            "image_size": shape.tile_size,
            "patch_size": shape.patch_size,
            "initializer_range": shape.text.initializer_range,
        },
        scale_factor=shape.merge_size,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=shape.text.tie_embeddings,
    )


def _idefics3_config(shape: TinyVisionShape, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    return _idefics_config(Idefics3Config, shape, tokenizer)


def _smolvlm_config(shape: TinyVisionShape, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    return _idefics_config(SmolVLMConfig, shape, tokenizer)


_FAMILIES = {
    "qwen2_5_vl": _Family(_qwen_tokenizer, _qwen2_5_vl_processor, _qwen2_5_vl_config),
    "qwen3_vl": _Family(_qwen_tokenizer, _qwen3_vl_processor, _qwen3_vl_config),
    "idefics3": _Family(_idefics_tokenizer, _idefics3_processor, _idefics3_config),
    "smolvlm": _Family(_idefics_tokenizer, _smolvlm_processor, _smolvlm_config),
}


def main() -> None:
    """Write one random model with its processor."""
    parser = argparse.ArgumentParser(description="Write a tiny vision-language model as a Hugging Face folder.")
    parser.add_argument("arch", choices=sorted(_FAMILIES))
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights")
    parser.add_argument("--split-images", action="store_true", help="Idefics3 and SmolVLM: 2 x 2 tiles and the image")
    arguments = parser.parse_args()
    shape = TinyVisionShape(split_images=arguments.split_images)
    model = make_tiny_vision_model(arguments.arch, shape, seed=arguments.seed)
    save_tiny_checkpoint(arguments.output, model, make_vision_processor(arguments.arch, shape))


if __name__ == "__main__":
    main()
