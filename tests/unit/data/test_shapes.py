"""Pictures of boxes to count: deterministic, correct, in two splits that share none."""

import hashlib
import io

import numpy as np
import pytest
from data_helpers import entry
from PIL import Image

from nemo_rl.config import DatasetConfig
from nemo_rl.data.datasets.response_datasets import load_response_dataset
from nemo_rl.data.datasets.rows.shapes import MAX_BOXES, ShapesRows, is_validation
from nemo_rl.utils.errors import DataError

pytestmark = pytest.mark.fast


def picture(row):
    """Return the pixels and the bytes of a row's image."""
    part = row["messages"][0]["content"][0]
    assert part["type"] == "image" and part["image"]["path"] is None
    return np.asarray(Image.open(io.BytesIO(part["image"]["bytes"]))), part["image"]["bytes"]


def count_boxes(pixels):
    """Count the connected regions that are not white, by joining each pixel to the region of its neighbors."""
    region = np.arange(1, pixels.shape[0] * pixels.shape[1] + 1).reshape(pixels.shape[:2])
    region[(pixels == 255).all(-1)] = 0
    while True:
        padded = np.pad(region, 1)
        neighbors = [padded[1:-1, 1:-1], padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:]]
        joined = np.where(region > 0, np.max(neighbors, axis=0), 0)
        if (joined == region).all():
            return len(set(region.ravel()) - {0})
        region = joined


def test_the_answer_is_the_number_of_boxes_in_the_picture():
    rows = [ShapesRows("train", 100, 3, "vlm")[index] for index in range(100)]
    for row in rows:
        question, answer = row["messages"]
        assert [part["type"] for part in question["content"]] == ["image", "text"]
        assert question["content"][1]["text"] == "How many boxes?"
        pixels, _ = picture(row)
        assert pixels.shape == (28, 28, 3)
        assert answer == {"role": "assistant", "content": str(count_boxes(pixels))}
        assert row["answer"] == answer["content"] and row["task_name"] == "vlm"
    assert {row["answer"] for row in rows} == {str(count) for count in range(1, MAX_BOXES + 1)}


def test_rows_follow_from_seed_split_and_index():
    rows = ShapesRows("train", 20, 3, None)
    assert list(rows) == list(ShapesRows("train", 50, 3, None))[:20], "the length changes no row"
    assert list(rows) != list(ShapesRows("train", 20, 4, None))
    assert rows[-1] == rows[19]
    with pytest.raises(IndexError):
        rows[20]


def test_the_bytes_of_a_picture_never_change():
    """Images are known by the hash of their bytes, also in checkpoints."""
    data = picture(ShapesRows("train", 1, 42, None)[0])[1]
    assert hashlib.sha256(data).hexdigest() == "9625ee3a2cf0335a27f26c72414ee894f6477111cba8573e659e7bba28e004d9"


def test_splits_share_no_picture_whatever_their_seeds():
    for split in ("train", "validation"):
        rows = ShapesRows(split, 30, 9, None)
        assert {is_validation(picture(row)[0]) for row in rows} == {split == "validation"}


def test_a_data_set_is_as_long_as_its_entry_says():
    assert len(load_response_dataset(entry(dataset_name="shapes")).dataset) == 10_000
    raw = load_response_dataset(entry(dataset_name="shapes", num_samples=50, split_validation_size=0.1))
    assert (len(raw.dataset), len(raw.val_dataset), raw.num_rows) == (50, 5, 50)
    assert is_validation(picture(raw.val_dataset[0])[0])
    with pytest.raises(DataError, match="shapes has no split 'test'; choose train or validation"):
        load_response_dataset(entry(dataset_name="shapes", split="test"))


def test_only_the_number_of_pictures_can_be_configured():
    idle = DatasetConfig.without_effect({"dataset_name": "shapes"})
    assert "num_samples" not in idle and {"min_operand", "max_operand"} <= set(idle)
