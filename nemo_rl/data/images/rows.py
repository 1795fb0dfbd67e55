"""Make the model's inputs from the images of a row.

    datum ─► RowImages(family, images) ─► RowInputs: pixels when they are read, positions by the family's rule
                │  travels as references                │
                ▼                                       ▼
         engine: tokens, ranges, items           trainer: arguments of the forward pass

Invariant: the tokens of a row have one placeholder for each feature of its images. `ranges` checks this before each
use, so an image that was forgotten, added or cut is found before a model reads the row.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_rl.data.images.families import ImageFamily, ItemKind, family_from_state
from nemo_rl.data.images.image import Image
from nemo_rl.data.model_rows import IMAGES, RowInput, RowInputs
from nemo_rl.utils.errors import DataError

CACHE_BYTES = 512 << 20
"""Largest number of bytes of pixels that a process keeps for later rows."""


class ImageRange:
    """The tokens of one image in a row."""

    def __init__(self, start: int, tokens: list[int]) -> None:
        self.start = start
        """Index of the first token."""
        self.tokens = tokens
        """Token ids of the image."""

    @property
    def stop(self) -> int:
        """Return the index after the last token."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, eq=False)
class RowImages:
    """The images of a row, in the order of their tokens."""

    family: ImageFamily
    images: tuple[Image, ...]

    def row_inputs(self) -> RowInputs:
        """Return the inputs of the model. Pixels are made when they are first read."""
        inputs = {name: _ImageItems(self, name, kind) for name, kind in self.family.kinds.items()}
        return RowInputs(inputs, self.family.positions(self.images), self)

    def ranges(self, token_ids: Sequence[int]) -> list[ImageRange]:
        """Find the tokens of each image in a row.

        Raises:
            DataError: the row has other tokens than its images need.
        """
        found, start = [], 0
        for number, image in enumerate(self.images):
            tokens = self.family.tokens_of(image)
            first = _index(token_ids, self.family.placeholder, start)
            begin = first - tokens.index(self.family.placeholder)
            if begin < start or list(token_ids[begin : begin + len(tokens)]) != tokens:
                raise DataError(
                    f"A row lacks the {len(tokens)} tokens of its image {number + 1} of {len(self.images)} ({image})."
                )
            found.append(ImageRange(begin, tokens))
            start = begin + len(tokens)
        if _index(token_ids, self.family.placeholder, start) < len(token_ids):
            raise DataError(
                f"A row has tokens of images after those of its {len(self.images)} images (token "
                f"{self.family.placeholder}). A row must not contain the model's placeholders as text."
            )
        return found

    @property
    def num_patches(self) -> int:
        """Return the number of patches that the model's tower reads."""
        return sum(self.family.num_patches(image) for image in self.images)

    def patches(self, token_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Return the index of the first token of each image in a row, and its number of patches."""
        found = zip(self.ranges(token_ids), self.images, strict=True)
        return [(tokens.start, self.family.num_patches(image)) for tokens, image in found]

    def named_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """Return the token ids, with a negative number for each token of an image that depends on the image.

        Rows with equal tokens but other images have no common prefix in these numbers.
        """
        named = list(token_ids)
        for image, found in zip(self.images, self.ranges(token_ids), strict=True):
            named[found.start : found.stop] = [-int(image.digest[:15], 16) - 1] * len(found.tokens)
        return named

    def followed_by(self, images: Sequence[Image]) -> "RowImages":
        """Return these images and those of a later message."""
        return RowImages(self.family, (*self.images, *images))

    def without_images(self) -> "RowImages":
        """Return the images of a row that lost all of its images."""
        return RowImages(self.family, ())

    def kept_tokens(self, token_ids: Tensor) -> Tensor:
        """Return the token ids without tokens of images, for rows that were cut."""
        return token_ids[~torch.isin(token_ids, torch.tensor(self.family.never_sampled))]

    def blank_row(self) -> tuple[Tensor, RowInputs]:
        """Return tokens and inputs of a row with a smallest image.

        A forward pass without images gets this row, so that all ranks run the modules that read images.
        """
        tokens, tensors = self.family.blank()
        kinds = self.family.kinds
        inputs = {name: RowInput(values, leading_axis=kinds[name].leading_axis) for name, values in tensors.items()}
        return torch.tensor(tokens), RowInputs(inputs)

    def state_dict(self) -> dict[str, Any]:
        """Return the images and their family as plain values for a checkpoint."""
        return {"family": self.family.state_dict(), "images": [image.state_dict() for image in self.images]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "RowImages":
        """Return the images of a `state_dict`."""
        return cls(family_from_state(state["family"]), tuple(Image.from_state(image) for image in state["images"]))


def from_state(state: Mapping[str, Any]) -> RowInputs:
    """Rebuild the inputs of a row from their `state_dict`, with or without images."""
    return RowImages.from_state(state[IMAGES]).row_inputs() if IMAGES in state else RowInputs.from_state(state)


def require_images(token_ids: Sequence[int], inputs: RowInputs | None, media_tokens: Sequence[int]) -> None:
    """Check that a row with placeholders has the images to which they belong.

    Args:
        token_ids: the tokens of the row.
        inputs: the further inputs of the row, or None.
        media_tokens: ids of the tokens that stand for images and videos. Empty for a model that reads text only.

    Raises:
        DataError: images or placeholders are missing.
    """
    if inputs is not None and inputs.images is not None:
        inputs.images.ranges(token_ids)
    elif (inputs is None or not inputs.inputs) and not set(media_tokens).isdisjoint(token_ids):
        raise DataError(
            "A row has placeholders of images but no images. Its data processor must return them in row_inputs, as "
            "vlm_hf_data_processor does."
        )


def _index(token_ids: Sequence[int], token: int, start: int) -> int:
    """Return the index of a token from `start` on, or the length without one."""
    try:
        return token_ids.index(token, start) if isinstance(token_ids, list) else list(token_ids).index(token, start)
    except ValueError:
        return len(token_ids)


class _ImageItems(RowInput):
    """The items of a row's images for one argument of the model's forward."""

    def __init__(self, row: RowImages, name: str, kind: ItemKind) -> None:
        self._row, self._name, self._kind = row, name, kind
        self.lengths_as = None
        self.leading_axis = kind.leading_axis

    def require_tensor(self, name: str) -> None:
        """Check nothing, because the family makes the tensors."""

    @property
    def kind(self) -> tuple[torch.dtype, tuple[int, ...], str | None]:
        return self._kind.dtype, self._kind.shape, None

    @property
    def values(self) -> Tensor:
        items = [PIXELS.of(self._row.family, image)[self._name] for image in self._row.images]
        return torch.cat(items) if items else torch.zeros((0, *self._kind.shape), dtype=self._kind.dtype)


def shared_images(rows: Sequence[Tensor], column: Sequence[RowInputs], places: Sequence[Tensor]) -> list[RowInputs]:
    """Return the inputs of a layout in which rows share tokens, with the images of shared tokens once.

    Args:
        rows: token ids of b rows, each `[n]`.
        column: inputs of the rows, with images.
        places: index in the layout of each token of each row, `[n]` int64. Rows share all tokens of an image or none.

    Returns:
        Inputs of the images, in the order of the layout's tokens.
    """
    found: dict[int, RowInputs] = {}
    for ids, inputs, place in zip(rows, column, places, strict=True):
        if inputs.images is None:  # a blank row has an image without a file
            found[int(place[0])] = inputs
            continue
        for image, tokens in zip(inputs.images.images, inputs.images.ranges(ids.tolist()), strict=True):
            found[int(place[tokens.start])] = RowImages(inputs.images.family, (image,)).row_inputs()
    return [found[place] for place in sorted(found)]


class PixelCache:
    """The tensors of images that were used last."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._kept: OrderedDict[tuple[str, str], dict[str, Tensor]] = OrderedDict()
        self.num_made = 0
        """Number of images whose tensors were made, for measurements."""

    def of(self, family: ImageFamily, image: Image) -> dict[str, Tensor]:
        """Return the tensors of an image."""
        key = (image.digest, family.digest)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        made = family.tensors_of(image)
        self.num_made += 1
        self._kept[key] = made
        self._num_bytes += _size(made)
        while self._num_bytes > self._max_bytes and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._num_bytes -= _size(dropped)
        return made


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


PIXELS = PixelCache(CACHE_BYTES)
"""Tensors of images in this process."""
