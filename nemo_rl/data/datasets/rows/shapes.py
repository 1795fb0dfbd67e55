"""Generate the built-in data set of shapes: small pictures with boxes to count.

The quick start of images uses it. Invariant: the pictures and their bytes depend only on the arguments, and no picture
is in both splits.
"""

import io
from zlib import crc32

import numpy as np

from nemo_rl.config import DatasetConfig
from nemo_rl.data.datasets.arithmetic import DEFAULT_NUM_SAMPLES, TRAIN, VALIDATION, VALIDATION_ONE_IN
from nemo_rl.data.datasets.raw_dataset import FormattedRow, GeneratedDataset, GeneratedRows
from nemo_rl.utils.errors import DataError
from nemo_rl.utils.seed import derive_seed

QUESTION = "How many boxes?"
MAX_BOXES = 4
PICTURE_SIDE = 28
BOX_SIDES = (4, 7)
"""Smallest and largest side of a box in pixels."""

_BACKGROUND = 255
_DARKEST, _LIGHTEST = 0, 160


class ShapesRows(GeneratedRows):
    """Pictures of 1 to 4 boxes as formatted rows: `messages`, `answer` ("3"), `task_name`.

    The user's message has an image part with the bytes of a PNG file of 28 x 28 pixels, and a text part.
    """

    def _row(self, index: int) -> FormattedRow:
        pixels, count = self.draw(index)
        image = {"type": "image", "image": {"bytes": png_bytes(pixels), "path": None}}
        question = {"role": "user", "content": [image, {"type": "text", "text": QUESTION}]}
        answer = {"role": "assistant", "content": str(count)}
        return {"messages": [question, answer], "answer": str(count), "task_name": self._task_name}

    def draw(self, index: int) -> tuple[np.ndarray, int]:
        """Return the pixels of a picture, [height, width, 3] uint8, and its number of boxes."""
        rng = np.random.default_rng(derive_seed(self._seed, "shapes", self._split, index))
        count = int(rng.integers(1, MAX_BOXES + 1))
        while True:
            pixels = draw_boxes(rng, count)
            if is_validation(pixels) == (self._split == VALIDATION):
                return pixels, count


class ShapesDataset(GeneratedDataset):
    """Pictures of boxes to count, which depend only on `num_samples`, `seed` and the split.

    Args:
        config: `num_samples`, `seed` and `split` are used.
        role: "train" or "validation".

    Raises:
        DataError: There is no such split.
    """

    def __init__(self, config: DatasetConfig, role: str = TRAIN) -> None:
        split = config.split or role
        if split not in DEFAULT_NUM_SAMPLES:
            raise DataError(f"shapes has no split {split!r}; choose {TRAIN} or {VALIDATION}.")
        self._task_name = config.env_name
        self.num_rows = config.num_samples or DEFAULT_NUM_SAMPLES[split]
        self.dataset = self._draw(split, self.num_rows, config.seed)
        self.bad_rows = []

    def _draw(self, split: str, num_samples: int, seed: int) -> ShapesRows:
        return ShapesRows(split, num_samples, seed, self._task_name)


def draw_boxes(rng: np.random.Generator, count: int) -> np.ndarray:
    """Draw boxes of different sizes and colors on white, with at least one white pixel between two boxes.

    Returns:
        [height, width, 3] uint8.
    """
    pixels = np.full((PICTURE_SIDE, PICTURE_SIDE, 3), _BACKGROUND, dtype=np.uint8)
    free = np.ones((PICTURE_SIDE, PICTURE_SIDE), dtype=bool)
    while count:
        height, width = rng.integers(BOX_SIDES[0], BOX_SIDES[1] + 1, size=2)
        top, left = rng.integers(0, PICTURE_SIDE + 1 - np.array([height, width]))
        if free[top : top + height, left : left + width].all():
            pixels[top : top + height, left : left + width] = rng.integers(_DARKEST, _LIGHTEST, size=3)
            free[max(0, top - 1) : top + height + 1, max(0, left - 1) : left + width + 1] = False
            count -= 1
    return pixels


def is_validation(pixels: np.ndarray) -> bool:
    """Return whether a picture belongs to the validation split."""
    return crc32(pixels.tobytes()) % VALIDATION_ONE_IN == 0


def png_bytes(pixels: np.ndarray) -> bytes:
    """Return the bytes of a PNG file. They are not compressed, so that every version of zlib gives the same bytes."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=0)
    return file.getvalue()
