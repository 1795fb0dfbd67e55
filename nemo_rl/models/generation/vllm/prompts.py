"""Make vLLM's input for a prompt, with or without images.

vLLM gets the tokens as they are in the row, with one placeholder for each feature, and pixels that are already
normalised. It expands nothing and runs no image processor. Invariant: the tokens of the prompt are those of the row.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import BatchFeature
from vllm.inputs.engine import mm_input
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

from nemo_rl.data.images.families import IdeficsImages, QwenImages
from nemo_rl.data.images.rows import RowImages
from nemo_rl.utils.errors import GenerationError


def prompt_of(token_ids: list[int], images: RowImages | None, cache_salt: str | None = None) -> Any:
    """Return the argument `prompt` of `LLMEngine.add_request`.

    Args:
        token_ids: all tokens before the response.
        images: the images of the row, whose tokens were checked (`require_images`), or None.
        cache_salt: keys and values are shared only between prompts with the same salt.
    """
    salt = {} if cache_salt is None else {"cache_salt": cache_salt}
    if images is None or not images.images:
        return {"prompt_token_ids": token_ids, **salt}
    ranges = [
        PlaceholderRange(offset=each.start, length=len(each.tokens), is_embed=_embedded(images, each.tokens))
        for each in images.ranges(token_ids)
    ]
    hashes = [f"{image.digest}-{images.family.digest}" for image in images.images]
    return mm_input(token_ids, _items(images), {"image": hashes}, {"image": ranges}, **salt)


def _embedded(images: RowImages, tokens: list[int]) -> torch.Tensor | None:
    """Return which tokens are replaced by features, or None if all are."""
    mask = images.family.is_embed(tokens)
    return None if bool(mask.all()) else mask


def _items(images: RowImages) -> MultiModalKwargsItems:
    tensors = {name: given.values for name, given in images.row_inputs().inputs.items()}
    fields: Mapping[str, MultiModalFieldConfig]
    if isinstance(images.family, QwenImages):
        fields = {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", tensors["image_grid_thw"].prod(-1)),
            "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }
    elif isinstance(images.family, IdeficsImages):
        num_tiles = torch.tensor([images.family.num_tiles(image) for image in images.images])
        tensors["pixel_attention_mask"] = torch.ones(tensors["pixel_values"][:, 0].shape, dtype=torch.int64)
        tensors["num_patches"] = num_tiles
        fields = {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", num_tiles),
            "pixel_attention_mask": MultiModalFieldConfig.flat_from_sizes("image", num_tiles),
            "num_patches": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }
    else:
        name = type(images.family).__name__
        raise GenerationError(f"vLLM gets no images of {name}. Use policy.generation.backend=hf.")
    return MultiModalKwargsItems.from_hf_inputs(BatchFeature(tensors), fields)
