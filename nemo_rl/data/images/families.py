"""Describe how families of models read images: the tokens of an image, its tensors, and the positions of tokens.

A chat template writes one placeholder for each image. `ImageFamily.tokens_of` replaces it by the tokens that the model
reads. This happens once, when a row becomes a datum. Engines and trainers get the replaced tokens. Invariant: tokens
and tensors are those of the family's processor in transformers (tests compare them), and the number of placeholder
tokens of a row is the number of features that the model makes of its images.

A family is a small picklable value: the settings of the image processor, and token ids. Its image processor is built
in each process that makes pixels.
"""

import hashlib
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from nemo_rl.data.images.image import Image
from nemo_rl.data.interfaces import TokenizerType
from nemo_rl.data.model_rows import PositionRule, RowInputs
from nemo_rl.files.hub_download import described_source
from nemo_rl.utils.errors import ConfigError, DataError


@dataclass(frozen=True)
class ItemKind:
    """The items that a row contributes to an argument of the model's forward."""

    shape: tuple[int, ...]
    """Shape of one item."""
    dtype: torch.dtype = torch.float32
    leading_axis: bool = False
    """Whether the argument has a first axis of size 1 before the items."""


@dataclass(frozen=True)
class ImageFamily:
    """A family of models with its image processor.

    Attributes:
        settings: the image processor as JSON text.
        placeholder: id of the token that the model replaces by a feature of an image.
        never_sampled: ids of tokens that stand for images, sounds or videos, which an answer must not contain.
    """

    settings: str
    placeholder: int
    never_sampled: tuple[int, ...]

    @cached_property
    def digest(self) -> str:
        """Return a hash of the settings. Pixels of an image are equal if it is equal."""
        return hashlib.sha256(self.settings.encode()).hexdigest()[:16]

    @property
    def kinds(self) -> Mapping[str, ItemKind]:
        """Return the arguments of the model's forward that hold images."""
        raise NotImplementedError

    def tokens_of(self, image: Image) -> list[int]:
        """Return the token ids that replace the placeholder of an image."""
        raise NotImplementedError

    def num_patches(self, image: Image) -> int:
        """Return the number of patches of an image that the model's tower reads."""
        raise NotImplementedError

    def tensors_of(self, image: Image) -> dict[str, Tensor]:
        """Return the items of an image for each of `kinds`, `[n, ...]` on the CPU.

        Raises:
            DataError: the image processor makes other numbers of items than `tokens_of` says.
        """
        raise NotImplementedError

    def blank(self) -> tuple[list[int], dict[str, Tensor]]:
        """Return tokens and tensors of a smallest image, for forward passes that have no image (`rows`)."""
        raise NotImplementedError

    def positions(self, images: Sequence[Image]) -> PositionRule | None:
        """Return the rule for the positions of a row's tokens, or None for 0 to n - 1."""
        return None

    def is_embed(self, tokens: Sequence[int]) -> Tensor:
        """Return which of an image's tokens are replaced by features, `[n]` bool."""
        return torch.tensor(tokens) == self.placeholder

    def state_dict(self) -> dict[str, Any]:
        """Return the family as plain values, for a checkpoint (`family_from_state`)."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {"class": type(self).__name__, **values}

    def processed(self, image: Image) -> Mapping[str, Tensor]:
        """Return the result of the family's image processor for one image."""
        made: Mapping[str, Tensor] = image_processor(self.settings)(images=[image.picture()], return_tensors="pt")
        return made


@lru_cache(maxsize=8)
def image_processor(settings: str) -> Any:
    """Build the image processor of transformers that JSON settings describe."""
    import transformers

    values = json.loads(settings)
    return getattr(transformers, values["image_processor_type"]).from_dict(values)


@dataclass(frozen=True)
class QwenImages(ImageFamily):
    """Qwen2.5-VL and Qwen3-VL: an image of any size becomes a grid of patches, and positions have three dimensions.

    Attributes:
        patch: height and width of a patch in pixels.
        merge: number of patches along each side that become one feature.
        temporal: number of frames of a patch; an image is repeated.
        channels: number of colors.
    """

    patch: int = 14
    merge: int = 2
    temporal: int = 2
    channels: int = 3

    @cached_property
    def kinds(self) -> Mapping[str, ItemKind]:
        """Return the patches `[n, c t p p]` and the grids `[images, 3]`."""
        width = self.channels * self.temporal * self.patch**2
        return {"pixel_values": ItemKind((width,)), "image_grid_thw": ItemKind((3,), torch.int64)}

    @cached_property
    def _pixels(self) -> tuple[int, int]:
        """Return the smallest and the largest number of pixels of a resized image."""
        size = json.loads(self.settings)["size"]
        return size["shortest_edge"], size["longest_edge"]

    def grid(self, image: Image) -> tuple[int, int]:
        """Return the numbers of rows and columns of an image's patches."""
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        fewest, most = self._pixels
        width, height = image.size
        try:
            rows, columns = smart_resize(
                height,
                width,
                factor=self.patch * self.merge,
                min_pixels=fewest,
                max_pixels=most,
            )
        except ValueError as error:
            raise DataError(f"{image} does not fit the model: {error}") from None
        return rows // self.patch, columns // self.patch

    def num_patches(self, image: Image) -> int:
        """Return the number of patches of the grid."""
        rows, columns = self.grid(image)
        return rows * columns

    def tokens_of(self, image: Image) -> list[int]:
        """Return the placeholder for each feature."""
        rows, columns = self.grid(image)
        return [self.placeholder] * (rows * columns // self.merge**2)

    def tensors_of(self, image: Image) -> dict[str, Tensor]:
        """Return the patches and the grid."""
        made = self.processed(image)
        grid = torch.tensor([[1, *self.grid(image)]])
        if not torch.equal(made["image_grid_thw"], grid):
            found = made["image_grid_thw"].tolist()
            raise DataError(f"{image}: the image processor made the grid {found}, not {grid.tolist()}.")
        return {"pixel_values": made["pixel_values"].float(), "image_grid_thw": grid}

    def blank(self) -> tuple[list[int], dict[str, Tensor]]:
        """Return an image with one feature."""
        shapes = {name: kind.shape for name, kind in self.kinds.items()}
        pixels = torch.zeros(self.merge**2, *shapes["pixel_values"])
        return [self.placeholder], {
            "pixel_values": pixels,
            "image_grid_thw": torch.tensor([[1, self.merge, self.merge]]),
        }

    def positions(self, images: Sequence[Image]) -> PositionRule:
        """Return the rule of M-RoPE (arXiv:2409.12191, section 2.1)."""
        sizes = [tuple(side // self.merge for side in self.grid(image)) for image in images]
        return GridPositions(self.placeholder, tuple(sizes))


@dataclass(frozen=True)
class GridPositions:
    """Positions `[3, n]` of M-RoPE: text advances all three, and features of an image have time, row and column.

    Attributes:
        placeholder: id of the token of a feature.
        sizes: rows and columns of features of each image.
    """

    placeholder: int
    sizes: tuple[tuple[int, ...], ...]

    def __call__(self, token_ids: Tensor, inputs: RowInputs) -> Tensor:
        """Return the positions of a row, `[3, n]` int64."""
        positions = torch.empty(3, len(token_ids), dtype=torch.int64)
        places = (token_ids == self.placeholder).nonzero().flatten().tolist()
        end, following, used = 0, 0, 0
        for rows, columns in self.sizes:
            if used >= len(places):
                break  # a row that ends before its last image
            start, length = places[used], rows * columns
            positions[:, end:start] = torch.arange(following, following + start - end)
            following += start - end
            stop = min(start + length, len(token_ids))
            place = torch.arange(length)[: stop - start]
            positions[0, start:stop] = following
            positions[1, start:stop] = following + place // columns
            positions[2, start:stop] = following + place % columns
            end, following, used = stop, following + max(rows, columns), used + length
        positions[:, end:] = torch.arange(following, following + len(token_ids) - end)
        return positions


@dataclass(frozen=True)
class IdeficsImages(ImageFamily):
    """Idefics3 and SmolVLM: an image becomes square tiles of one size, and each tile has the same number of features.

    Attributes:
        tile: height and width of a tile in pixels.
        features: number of features of a tile.
        patches: number of patches of a tile.
        around: token ids before and after the features of a tile.
        whole: token ids that announce the tile with the whole image.
        parts: token ids that announce the tile in a row and a column, by row and column.
        line: token ids of a line break, after a row of tiles.
        last_line: token ids of the two line breaks after the last row.
        channels: number of colors.
    """

    tile: int = 364
    features: int = 169
    patches: int = 676
    around: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    parts: tuple[tuple[tuple[int, ...], ...], ...] = ()
    line: tuple[int, ...] = ()
    last_line: tuple[int, ...] = ()
    channels: int = 3

    @cached_property
    def kinds(self) -> Mapping[str, ItemKind]:
        """Return the tiles `[1, n, c, h, w]`."""
        return {"pixel_values": ItemKind((self.channels, self.tile, self.tile), leading_axis=True)}

    def _grid(self, image: Image) -> tuple[int, int]:
        """Return the numbers of rows and columns of an image's tiles, or (0, 0) for the whole image alone."""
        width, height = image.size
        _, rows, columns = image_processor(self.settings).get_number_of_image_patches(height, width, {})
        return rows, columns

    def num_tiles(self, image: Image) -> int:
        """Return the number of tiles of an image, with the one that shows all of it."""
        rows, columns = self._grid(image)
        return rows * columns + 1

    def num_patches(self, image: Image) -> int:
        """Return the number of patches of all tiles."""
        return self.num_tiles(image) * self.patches

    def tokens_of(self, image: Image) -> list[int]:
        """Return the tokens of all tiles, each with the tokens that announce it."""
        rows, columns = self._grid(image)
        tile = [self.placeholder] * self.features
        tokens: list[int] = []
        if max(rows, columns) > len(self.parts):
            raise DataError(f"{image} has {rows} x {columns} tiles, for which the model has no tokens.")
        for row in range(rows):
            for column in range(columns):
                tokens += [*self.around, *self.parts[row][column], *tile]
            tokens += self.line if row < rows - 1 else self.last_line
        return [*tokens, *self.around, *self.whole, *tile, *self.around]

    def tensors_of(self, image: Image) -> dict[str, Tensor]:
        """Return the tiles, of which the last one is the whole image."""
        made = self.processed(image)
        tiles = made["pixel_values"][0].float()
        expected = (self.num_tiles(image), self.channels, self.tile, self.tile)
        if tuple(tiles.shape) != expected or not made["pixel_attention_mask"].all():
            raise DataError(f"{image}: the image processor made {list(tiles.shape)}, not {list(expected)} full tiles.")
        return {"pixel_values": tiles}

    def blank(self) -> tuple[list[int], dict[str, Tensor]]:
        """Return one tile. The model would drop a tile of zeros."""
        tokens = [*self.around, *self.whole, *[self.placeholder] * self.features, *self.around]
        return tokens, {"pixel_values": torch.ones(1, self.channels, self.tile, self.tile)}


def family_from_state(state: Mapping[str, Any]) -> ImageFamily:
    """Rebuild a family from its `state_dict`."""
    values = dict(state)
    kind: type[ImageFamily] = {each.__name__: each for each in (QwenImages, IdeficsImages)}[values.pop("class")]
    return kind(**values)


def _qwen(config: Any, settings: dict[str, Any], tokenizer: TokenizerType) -> QwenImages:
    return QwenImages(
        settings=json.dumps(settings, sort_keys=True),
        placeholder=config.image_token_id,
        never_sampled=media_tokens(config),
        patch=settings["patch_size"],
        merge=settings["merge_size"],
        temporal=settings["temporal_patch_size"],
    )


_MOST_TILES = 6
"""Largest number of rows and of columns of tiles for which Idefics3 has tokens."""


def _idefics(config: Any, settings: dict[str, Any], tokenizer: TokenizerType) -> IdeficsImages:
    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    vision = config.vision_config
    patches = (vision.image_size // vision.patch_size) ** 2
    sides = range(1, _MOST_TILES + 1)
    return IdeficsImages(
        settings=json.dumps(settings, sort_keys=True),
        placeholder=config.image_token_id,
        never_sampled=media_tokens(config),
        tile=settings["max_image_size"]["longest_edge"],
        features=patches // config.scale_factor**2,
        patches=patches,
        around=ids("<fake_token_around_image>"),
        whole=ids("<global-img>"),
        parts=tuple(tuple(ids(f"<row_{row}_col_{column}>") for column in sides) for row in sides),
        line=ids("\n"),
        last_line=ids("\n\n"),
    )


@dataclass(frozen=True)
class TowerInputs:
    """Arguments of `get_image_features` of a model, for images without content."""

    arguments: Mapping[str, Tensor]
    """Tensors on the CPU, by name."""
    num_patches: int
    """Number of patches of the images."""
    num_features: int
    """Number of features of the images, each of which replaces a token."""


def tower_inputs(config: PretrainedConfig, count: int) -> TowerInputs:
    """Return `count` smallest images for the tower of a model, whose `model_type` is one of `FAMILIES`."""
    vision: Any = config.vision_config
    if config.model_type in ("idefics3", "smolvlm"):
        patches = count * (vision.image_size // vision.patch_size) ** 2
        tiles = torch.ones(1, count, vision.num_channels, vision.image_size, vision.image_size)
        return TowerInputs({"pixel_values": tiles}, patches, patches // config.scale_factor**2)
    merge, channels = vision.spatial_merge_size, getattr(vision, "in_channels", None) or vision.in_chans
    patches = count * merge**2
    pixels = torch.ones(patches, channels * vision.temporal_patch_size * vision.patch_size**2)
    grid = torch.tensor([[1, merge, merge]]).repeat(count, 1)
    return TowerInputs({"pixel_values": pixels, "image_grid_thw": grid}, patches, count)


PROJECTORS = ("merger", "deepstack_merger_list", "connector")
"""Names of the modules that map features of a tower to the text model's size."""


def media_tokens(config: PretrainedConfig) -> tuple[int, ...]:
    """Return the ids of the tokens that stand for images and videos in a model of a family."""
    ids = (getattr(config, name, None) for name in ("image_token_id", "video_token_id"))
    return tuple(token for token in ids if isinstance(token, int))


FAMILIES: dict[str, Callable[[Any, dict[str, Any], TokenizerType], ImageFamily]] = {
    "qwen2_5_vl": _qwen,
    "qwen3_vl": _qwen,
    "idefics3": _idefics,
    "smolvlm": _idefics,
}
"""Families by the `model_type` of their configuration."""
REFUSED = {
    "gemma3": "tokens of an image see each other in both directions, which engines on CPUs do not compute",
    "gemma4": "tokens of an image see each other in both directions, which engines on CPUs do not compute",
    "llava_onevision": "transformers and vLLM make different tokens of several images",
    "mllama": "its images are read by cross-attention",
}
"""Other models that read images, with the reason why they cannot be used with images."""


def require_family(config: PretrainedConfig, model_name: str, section: str = "policy") -> None:
    """Refuse a model whose images the library does not read.

    Raises:
        ConfigError: the model reads only text, or belongs to another family.
    """
    if config.model_type in FAMILIES:
        return
    reason = REFUSED.get(config.model_type, f"it is a {config.model_type} model")
    raise ConfigError(
        f"{section}.model_name={model_name!r} cannot read images here: {reason}. Models that can: "
        f"{', '.join(FAMILIES)}. Set {section}.is_vlm=false to train on text alone."
    )


def image_family(
    tokenizer: TokenizerType, name: str, overrides: Mapping[str, Any] | None = None, section: str = "policy"
) -> ImageFamily:
    """Describe the images of a model.

    Args:
        tokenizer: tokenizer of the model.
        name: folder or hub id with the configuration of the model, and with the settings of its image processor.
        overrides: settings of the image processor to change, such as `size`.
        section: section of the configuration that names the model, for messages.

    Raises:
        ConfigError: the model is of no family, a package is missing, or there is no image processor.
    """
    try:
        config = AutoConfig.from_pretrained(described_source(name), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{section}.tokenizer.name={name!r} has no configuration of a model, which its images need: {error}"
        ) from error
    require_family(config, name, section)
    return FAMILIES[config.model_type](config, _settings(name, dict(overrides or {})), tokenizer)


def _settings(name: str, overrides: dict[str, Any]) -> dict[str, Any]:
    if importlib.util.find_spec("torchvision") is None:
        raise ConfigError(
            "Images need the package torchvision, which the extra `vision` installs: uv sync --extra vision."
        )
    from transformers import AutoImageProcessor

    try:
        made = AutoImageProcessor.from_pretrained(described_source(name), trust_remote_code=False, **overrides)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{name!r} has no image processor that can be loaded: {error}") from error
    values: dict[str, Any] = json.loads(made.to_json_string())
    values["image_processor_type"] = type(made).__name__
    return values
