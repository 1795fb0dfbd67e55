"""The named data sets of questions about images, from files with the columns of their hub repositories."""

import io
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from data_helpers import entry, write_lines
from PIL import Image

from nemo_rl.config.base.names import NOT_BUILT_DATASETS, RESPONSE_DATASET_NAMES
from nemo_rl.data.bad_rows import RowError
from nemo_rl.data.datasets.hub import load_table
from nemo_rl.data.datasets.image_datasets import IMAGE_REGISTRY, interleaved
from nemo_rl.data.datasets.response_datasets import load_response_dataset
from nemo_rl.utils.errors import DataError

pytestmark = pytest.mark.fast


def png(size: tuple[int, int] = (8, 4)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, "red").save(buffer, "PNG")
    return buffer.getvalue()


def hub_file(path: Path, columns: dict[str, list[Any]], images: str) -> str:
    """Write a Parquet file whose column `images` has the hub's feature for images."""
    kinds: dict[str, Any] = {key: datasets.Value("string") for key in columns}
    kinds[images] = datasets.List(datasets.Image()) if isinstance(columns[images][0], list) else datasets.Image()
    datasets.Dataset.from_dict(columns, features=datasets.Features(kinds)).to_parquet(path)
    return str(path)


def load(name: str, path: str | None = None, role: str = "train", **keys: Any) -> Any:
    return load_response_dataset(entry(dataset_name=name, data_path=path, **keys), role)


def messages(raw: Any, index: int = 0) -> tuple[Any, str]:
    """Return the parts of the question and the answer."""
    question, answer = raw.dataset[index]["messages"]
    assert (question["role"], answer["role"]) == ("user", "assistant")
    return question["content"], answer["content"]


def image(reference: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image", "image": reference, **more}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def stored(data: bytes) -> dict[str, Any]:
    return {"bytes": data, "path": None}


def test_names_are_known() -> None:
    assert set(IMAGE_REGISTRY) <= set(RESPONSE_DATASET_NAMES) and not set(IMAGE_REGISTRY) & set(NOT_BUILT_DATASETS)


def test_clevr_cogent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.Image.open", None)
    columns = {
        "image": [stored(png()), stored(png((9, 9))), None],
        "problem": ["How many?"] * 3,
        "solution": ["<answer> 3 </answer>", "yes", "<answer> 1 </answer>"],
    }
    raw = load("clevr-cogent", hub_file(tmp_path / "a.parquet", columns, "image"), env_name="clevr-cogent")
    assert messages(raw) == ([image(stored(png())), text("How many?")], "3")
    assert messages(raw, 1) == ([image(stored(png((9, 9)))), text("How many?")], "yes")
    assert [(bad.line, bad.reason) for bad in raw.bad_rows] == [(2, "empty 'image'")]
    assert raw.dataset[0]["task_name"] == "clevr-cogent" and raw.unused_columns == ()


def test_clevr_cogent_of_own_paths_is_split(tmp_path: Path) -> None:
    rows = [{"image": f"{n}.png", "problem": "How many?", "solution": str(n)} for n in range(10)]
    raw = load("clevr-cogent", write_lines(tmp_path / "a.jsonl", *rows), split_validation_size=0.2, seed=3)
    assert (len(raw.dataset), len(raw.val_dataset)) == (8, 2)
    assert {row["messages"][0]["content"][0]["image"] for row in [*raw.dataset, *raw.val_dataset]} == {
        str(tmp_path / f"{n}.png") for n in range(10)
    }


def test_clevr_cogent_has_three_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def recorded(config: Any, role: str, source: Any) -> Any:
        asked.append((config.data_path, config.split))
        raise DataError("not loaded")

    monkeypatch.setattr("nemo_rl.data.datasets.hub.load_table", recorded)
    for split, role in ((None, "train"), (None, "validation"), ("valB", "validation")):
        with pytest.raises(DataError, match="not loaded"):
            load("clevr-cogent", role=role, split=split)
    names = ["Clevr_CoGenT_TrainA_70K_Complex", "Clevr_CoGenT_ValA", "Clevr_CoGenT_ValB"]
    assert asked == [(f"MMInstruction/{name}", "train") for name in names] and load_table is not recorded
    with pytest.raises(
        DataError, match="data.train.split='test' is no split of clevr-cogent: choose train, valA, valB"
    ):
        load("clevr-cogent", split="test")


def test_geometry3k(tmp_path: Path) -> None:
    columns = {
        "images": [[stored(png()), stored(png((9, 9)))], [stored(png())], []],
        "problem": ["<image>Find x.", "Find <image>y.", "Find z."],
        "answer": ["2\\sqrt{3}", "7", "8"],
    }
    raw = load("geometry3k", hub_file(tmp_path / "a.parquet", columns, "images"))
    assert messages(raw) == ([image(stored(png())), text("Find x.")], "2\\sqrt{3}")
    assert messages(raw, 1) == ([image(stored(png())), text("Find y.")], "7")
    assert [bad.reason for bad in raw.bad_rows] == ["empty 'images'"]
    row = {"images": ["a.png"], "problem": "Find <image>y.", "answer": 7}
    raw = load("geometry3k", write_lines(tmp_path / "a.jsonl", row))
    assert messages(raw) == ([image(str(tmp_path / "a.png")), text("Find y.")], "7")


def refcoco_rows(folder: Path) -> list[dict[str, Any]]:
    (folder / "train2014").mkdir()
    (folder / "train2014/wide.png").write_bytes(png((200, 100)))
    (folder / "train2014/broken.png").write_bytes(b"no image")
    base = {
        "image_path": "coco/train2014/wide.png",
        "captions": ["a", "the dog", "dog"],
        "bbox": [10.0, 20.0, 60.0, 99],
    }
    changes = [
        {},
        {"image_path": "train2014/wide.png"},
        {"image_path": "train2014/none.png"},
        {"image_path": "train2014/broken.png"},
        {"bbox": [10, 20, 300, 99]},
        {"bbox": [60, 20, 10, 99]},
        {"bbox": [1, 2, 3]},
        {"captions": []},
    ]
    return [{**base, "split": "train", **change} for change in changes]


def test_refcoco(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", *refcoco_rows(tmp_path))
    raw = load("refcoco", path, "validation")
    part = image(str(tmp_path / "train2014/wide.png"), resized_height=256, resized_width=256)
    assert messages(raw) == ([part, text("the dog")], "[50, 200, 300, 990]")
    assert messages(raw, 1) == messages(raw) and len(raw.dataset) == 2
    reasons = [bad.reason for bad in raw.bad_rows]
    assert [bad.line for bad in raw.bad_rows] == [3, 4, 5, 6, 7, 8]
    assert "none.png' cannot be read (FileNotFoundError" in reasons[0]
    assert "broken.png' cannot be read (UnidentifiedImageError" in reasons[1]
    assert reasons[2] == reasons[3] == "'bbox' is no box x1, y1, x2, y2 inside the image of 200 x 100 pixels"
    assert reasons[4:] == ["'bbox' is not four numbers", "empty 'captions'"]


def test_descriptions_of_refcoco_are_drawn_by_row_and_seed(tmp_path: Path) -> None:
    rows = refcoco_rows(tmp_path)[:1]
    rows = [{**rows[0], "bbox": [n, 20, 150, 90]} for n in range(40)]
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    path = write_lines(folder / "rows.jsonl", *rows)

    def captions(seed: int) -> list[str]:
        raw = load("refcoco", path, seed=seed, download_dir=str(tmp_path))
        return [messages(raw, index)[0][1]["text"] for index in range(len(rows))]

    assert captions(1) == captions(1) != captions(2)
    assert set(captions(1)) == {"a", "the dog", "dog"}


@pytest.mark.parametrize("name", ["refcoco", "mmpr-tiny"])
def test_image_files_of_hub_rows_need_a_folder(name: str) -> None:
    with pytest.raises(DataError, match=rf"data.train.dataset_name={name} needs data.train.download_dir.*unpacked"):
        load(name)


def test_mmpr_tiny_keeps_rows_with_several_images(tmp_path: Path) -> None:
    plain = {"question": "<image>Which?", "answer": "B", "images": ["images/a.png"]}
    rows = [
        plain,
        {**plain, "question": "<image_2> or <image_1>?", "images": [{"path": "a.png"}, {"image": "b.png"}]},
        {
            "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "Which <image>?"}],
            "reward_model": {"ground_truth": "7"},
            "images": ["a.png"],
        },
        {**plain, "question": "Which?"},
        {**plain, "question": "<image> <image>"},
        {**plain, "images": ["a.png", "b.png"]},
        {**plain, "images": []},
        {"question": "<image>", "images": ["a.png"]},
    ]
    raw = load("mmpr-tiny", write_lines(tmp_path / "rows.jsonl", *rows), download_dir=str(tmp_path / "MMPR"))
    a, b = (image(str(tmp_path / "MMPR" / name)) for name in ("a.png", "b.png"))
    first = image(str(tmp_path / "MMPR/images/a.png"))
    assert messages(raw) == ([first, text("Which?")], "B")
    assert messages(raw, 1) == ([b, text(" or "), a, text("?")], "B")
    assert messages(raw, 2) == ([text("Which "), a, text("?")], "7")
    assert messages(raw, 3) == ([first, text("Which?")], "B")
    reasons = [bad.reason for bad in raw.bad_rows]
    assert reasons[0] == "the question names image 2, and 'images' has 1"
    assert reasons[1] == "the question names 1 of the 2 images of 'images'"
    assert reasons[2] == "empty 'images'" and "missing 'answer', and 'reward_model' is" in reasons[3]


def test_other_words_in_angle_brackets_are_text() -> None:
    assert interleaved("<images> <image_> <image_x> <image 1> <image", ["a"])[1:] == [
        text("<images> <image_> <image_x> <image 1> <image")
    ]
    with pytest.raises(RowError, match="the question names image 0"):
        interleaved("<image_0>", ["a"])


def test_rows_can_be_written_as_json(tmp_path: Path) -> None:
    row = {"image": "a.png", "problem": "How many?", "solution": "2"}
    raw = load("clevr-cogent", write_lines(tmp_path / "a.jsonl", row))
    assert json.loads(json.dumps(raw.dataset[0]["messages"]))[1]["content"] == "2"
