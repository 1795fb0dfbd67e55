"""Read data sets of questions about images by name.

Rows come from the hub or from a file with the same columns. Invariant: no image is decoded here. Only `refcoco` reads
the size of an image, from the header of its file, because its boxes are in pixels.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nemo_rl.config import DatasetConfig
from nemo_rl.data.bad_rows import RowError
from nemo_rl.data.datasets.arithmetic import VALIDATION
from nemo_rl.data.datasets.hub import AnsweredDataset, HubSource
from nemo_rl.data.datasets.raw_dataset import RawDataset, Row
from nemo_rl.data.datasets.rows.images import IMAGES, TAG, image_reference
from nemo_rl.data.datasets.rows.readers import is_file_path
from nemo_rl.data.datasets.rows.values import kind_of, plain_text, text_of, value_of
from nemo_rl.utils.errors import DataError
from nemo_rl.utils.seed import derive_seed

DatasetFactory = Callable[[DatasetConfig, str], RawDataset]

_BOX_SCALE = 1000
_SIDE = 256
_VALIDATION_ROWS = {"valA": "MMInstruction/Clevr_CoGenT_ValA", "valB": "MMInstruction/Clevr_CoGenT_ValB"}


def _image(reference: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image", "image": reference, **more}


def _messages(parts: Sequence[Mapping[str, Any]], answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": answer}]


def _list_of(row: Row, key: str) -> list[Any]:
    value = value_of(row, key)
    if not isinstance(value, list):
        raise RowError(f"{key!r} is {kind_of(value)}, not a list")
    return value


class ClevrDataset(AnsweredDataset):
    """The data set CLEVR-CoGenT. The answer is the text inside `<answer>` of the solution, or the whole solution."""

    def __init__(self, config: DatasetConfig, role: str, source: HubSource) -> None:
        split = config.split or (source.validation_split if role == VALIDATION else None) or source.split
        if config.data_path is None:
            known = (source.split, *_VALIDATION_ROWS)
            if split not in known:
                raise DataError(f"data.{role}.split={split!r} is no split of clevr-cogent: choose {', '.join(known)}.")
            config = config.model_copy(
                update={"data_path": _VALIDATION_ROWS.get(split, source.path), "split": source.split}
            )
        super().__init__(config, role, source)

    def columns(self) -> list[str]:
        """Return the columns of image, question and solution."""
        return ["image", self.input_key, self.output_key, IMAGES]

    def to_messages(self, row: Row) -> list[dict[str, Any]]:
        """Return the image, the question and the answer."""
        solution = text_of(row, self.output_key)
        start, end = solution.find("<answer>"), solution.rfind("</answer>")
        answer = solution[start + len("<answer>") : end].strip() if 0 <= start < end else solution.strip()
        image = image_reference(value_of(row, "image"), "'image'")
        return _messages([_image(image), {"type": "text", "text": text_of(row, self.input_key)}], answer)


class Geometry3KDataset(AnsweredDataset):
    """The data set Geometry3K. Only the first image of a row is used, and `<image>` is removed from the question."""

    def columns(self) -> list[str]:
        """Return the columns of images, question and answer."""
        return [IMAGES, self.input_key, self.output_key]

    def to_messages(self, row: Row) -> list[dict[str, Any]]:
        """Return the first image, the question and the answer."""
        image = image_reference(_list_of(row, IMAGES)[0], f"image 0 of {IMAGES!r}")
        question = text_of(row, self.input_key).replace(TAG, "").strip()
        return _messages([_image(image), {"type": "text", "text": question}], text_of(row, self.output_key))


class _FilesOfImages(AnsweredDataset):
    """Rows that name image files which are not part of the data set."""

    def __init__(self, config: DatasetConfig, role: str, source: HubSource) -> None:
        self._seed = config.seed
        self._is_validation = role == VALIDATION
        path = config.data_path or ""
        local = is_file_path(path) or Path(path).expanduser().is_dir() if path else False
        if config.download_dir is None and not local:
            raise DataError(
                f"data.{role}.dataset_name={config.dataset_name} needs data.{role}.download_dir, the folder with its "
                f"unpacked image files ({self.archives}). They are not downloaded by the run."
            )
        folder = config.download_dir or path
        place = Path(folder).expanduser().absolute()
        self._folder = place.parent if place.is_file() else place
        super().__init__(config, role, source)

    archives = ""
    """Origin of the image files, for messages."""

    def _file(self, path: str) -> str:
        """Return the absolute path of an image file. The first folder of the path may be missing on the disk."""
        whole = self._folder / path
        shorter = self._folder.joinpath(*Path(path).parts[1:])
        return str(shorter if not whole.exists() and shorter.is_file() else whole)


class RefCOCODataset(_FilesOfImages):
    """The data set RefCOCO: find the box of a described object.

    The answer is the box as `[x1, y1, x2, y2]` in thousandths of the image's width and height. The image is resized to
    256 x 256 pixels. The description is a random one in training, and the longest in validation.
    """

    archives = "images.cocodataset.org/zips/train2014.zip"

    def columns(self) -> list[str]:
        """Return the columns of image, descriptions and box."""
        return ["image_path", "captions", "bbox", IMAGES]

    def to_messages(self, row: Row) -> list[dict[str, Any]]:
        """Return the image, a description and the box."""
        path = self._file(text_of(row, "image_path"))
        box = self._scaled(_list_of(row, "bbox"), *image_size(path))
        captions = [plain_text(caption, "a caption") for caption in _list_of(row, "captions")]
        image = _image(path, resized_height=_SIDE, resized_width=_SIDE)
        caption = self._chosen(captions, path, box)
        return _messages([image, {"type": "text", "text": caption}], f"[{', '.join(map(str, box))}]")

    def _scaled(self, box: list[Any], width: int, height: int) -> list[int]:
        if len(box) != 4 or not all(isinstance(edge, int | float) and math.isfinite(edge) for edge in box):
            raise RowError("'bbox' is not four numbers")
        edges = [
            round(edge * _BOX_SCALE / side) for edge, side in zip(box, (width, height, width, height), strict=True)
        ]
        if not (0 <= edges[0] < edges[2] <= _BOX_SCALE and 0 <= edges[1] < edges[3] <= _BOX_SCALE):
            raise RowError(f"'bbox' is no box x1, y1, x2, y2 inside the image of {width} x {height} pixels")
        return edges

    def _chosen(self, captions: list[str], path: str, box: list[int]) -> str:
        """Return one of the descriptions, which depends only on the row and the seed."""
        if self._is_validation:
            return max(captions, key=len)
        name = f"{Path(path).name} {box}"
        return captions[derive_seed(self._seed, "captions", name) % len(captions)]


class MMPRTinyDataset(_FilesOfImages):
    """The data set MMPR-Tiny. The images are at `<image>` or `<image_N>` of the question, or before it without these.

    Question and answer are columns (`question`, `answer`), or are in `prompt` (messages) and
    `reward_model.ground_truth`.
    """

    archives = "images.zip of OpenGVLab/MMPR-Tiny"

    def columns(self) -> list[str]:
        """Return the columns of images, question and answer in both forms."""
        return [IMAGES, self.input_key, self.output_key, "prompt", "reward_model"]

    def to_messages(self, row: Row) -> list[dict[str, Any]]:
        """Return the question with its images, and the answer."""
        given = [image_reference(image, f"an image of {IMAGES!r}") for image in _list_of(row, IMAGES)]
        is_path = [isinstance(image, str) and "://" not in image and not image.startswith("data:") for image in given]
        images = [self._file(image) if path else image for image, path in zip(given, is_path, strict=True)]
        answer = row if self.output_key in row else row.get("reward_model")
        if not isinstance(answer, Mapping):
            raise RowError(f"missing {self.output_key!r}, and 'reward_model' is {kind_of(answer)}, not an object")
        key = self.output_key if answer is row else "ground_truth"
        return _messages(interleaved(self._question(row), images), text_of(answer, key))

    def _question(self, row: Row) -> str:
        if self.input_key in row:
            return text_of(row, self.input_key)
        users = [
            message
            for message in _list_of(row, "prompt")
            if isinstance(message, Mapping) and message.get("role") == "user"
        ]
        if not users:
            raise RowError("'prompt' has no message of the user")
        return text_of(users[-1], "content")


def interleaved(text: str, images: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the parts of a text with its images at `<image>` (the next one) or `<image_N>` (number N, from 1).

    Without any of these, the images come first.

    Raises:
        RowError: An image that the text names is missing, or the text does not name all of them.
    """
    parts: list[dict[str, Any]] = []
    named: list[int] = []
    for number, piece in enumerate(text.split("<image")):
        tag, closing, rest = piece.partition(">")
        if number and closing and (tag == "" or (tag[0] == "_" and tag[1:].isdecimal() and len(tag) < 6)):
            index = int(tag[1:]) - 1 if tag else len(named)
            if not 0 <= index < len(images):
                raise RowError(f"the question names image {index + 1}, and {IMAGES!r} has {len(images)}")
            named.append(index)
            parts.append(_image(images[index]))
            piece = rest
        elif number:
            piece = f"<image{piece}"
        if piece:
            parts.append({"type": "text", "text": piece})
    if not named:
        return [*map(_image, images), {"type": "text", "text": text}]
    if len(set(named)) < len(images):
        raise RowError(f"the question names {len(set(named))} of the {len(images)} images of {IMAGES!r}")
    return parts


def image_size(path: str) -> tuple[int, int]:
    """Return width and height of an image file, from its header.

    Raises:
        RowError: The file does not exist or is no image.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise RowError(f"the image {path!r} cannot be read ({type(error).__name__}: {error})") from None


IMAGE_REGISTRY: dict[str, DatasetFactory] = {
    "clevr-cogent": partial(
        ClevrDataset,
        source=HubSource(
            "MMInstruction/Clevr_CoGenT_TrainA_70K_Complex", "problem", "solution", validation_split="valA"
        ),
    ),
    "geometry3k": partial(Geometry3KDataset, source=HubSource("hiyouga/geometry3k", validation_split="validation")),
    "refcoco": partial(RefCOCODataset, source=HubSource("jxu124/refcoco", validation_split="validation")),
    "mmpr-tiny": partial(MMPRTinyDataset, source=HubSource("OpenGVLab/MMPR-Tiny", "question", "answer")),
}
"""Factories of named data sets of questions about images."""
