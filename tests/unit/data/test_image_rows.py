"""Images in rows of every kind of data set: forms of parts, places, paths, and reasons of bad rows."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from data_helpers import entry, write_lines
from PIL import Image

from nemo_rl.data.bad_rows import RowError
from nemo_rl.data.datasets.preference_datasets import load_feedback_dataset, load_preference_dataset
from nemo_rl.data.datasets.response_datasets import load_response_dataset
from nemo_rl.data.datasets.rows.control_tokens import rows_with_control_tokens
from nemo_rl.data.datasets.rows.images import located
from nemo_rl.data.messages.control_tokens import control_tokens_of

pytestmark = pytest.mark.fast


def png(colour: str = "red", size: tuple[int, int] = (8, 4)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def image(reference: Any) -> dict[str, Any]:
    return {"type": "image", "image": reference}


def say(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def asked(*parts: Any, answer: str = "3") -> dict[str, Any]:
    return {"messages": [say("user", list(parts)), say("assistant", answer)]}


def load(path: str, **keys: Any) -> Any:
    return load_response_dataset(entry(data_path=path, **keys))


def content_of(row: dict[str, Any], **keys: Any) -> Any:
    """Return the content of the first message of a row of `openai_format` in a JSONL file."""
    raw = load(row["path"], dataset_name="openai_format", **keys)
    assert raw.bad_rows == [], raw.bad_rows
    return raw.dataset[0]["messages"][0]["content"]


URL = "data:image/png;base64," + base64.b64encode(png()).decode()


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (image("a.png"), "{folder}/a.png"),
        (image("below/a.png"), "{folder}/below/a.png"),
        (image("/data/a.png"), "/data/a.png"),
        (image("file:///data/a%20b.png"), "/data/a b.png"),
        (image(URL), URL),
        (image("https://example.org/a.png"), "https://example.org/a.png"),
        (image({"path": "a.png"}), "{folder}/a.png"),
        (image({"url": URL}), URL),
        ({"type": "image_url", "image_url": {"url": "a.png"}}, "{folder}/a.png"),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "auto"}}, URL),
        ({"type": "image_url", "image_url": URL}, URL),
    ],
)
def test_forms_of_image_parts(tmp_path: Path, part: dict[str, Any], expected: str) -> None:
    path = write_lines(tmp_path / "rows.jsonl", asked(part, text("How many?")))
    assert content_of({"path": path}) == [image(expected.format(folder=tmp_path)), text("How many?")]


def test_the_size_of_an_image_is_kept(tmp_path: Path) -> None:
    sized = {**image("a.png"), "resized_height": 256, "resized_width": 128}
    path = write_lines(tmp_path / "rows.jsonl", asked(sized))
    assert content_of({"path": path}) == [{**sized, "image": str(tmp_path / "a.png")}]


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "video", "video": "a.mp4"}, "a part of the type 'video'; models here read text and images only"),
        ({"type": "video_url", "video_url": {"url": "a"}}, "type 'video_url'"),
        ({"type": "audio", "audio": "a.wav"}, "type 'audio'"),
        ({"type": "input_audio", "input_audio": {}}, "type 'input_audio'"),
        ({**image("a.png"), "max_pixels": 9}, "the key 'max_pixels', which has no effect here"),
        ({**image("a.png"), "resized_height": 9}, "resized_height and resized_width are not two whole numbers"),
        (image(""), "is empty, not a path"),
        (image(7), "is a int, not a path"),
        (image({"bytes": None}), "is empty, not a path"),
        (image("s3://bucket/a.png"), "is a URL, and only data:, http: and https: are known"),
        ({"type": "image_url"}, "an image_url without a url"),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "high"}}, "detail='high'"),
        ({"type": "image"}, "the row has 1 places for images (<image>, or parts without one), and it has no column"),
    ],
)
def test_parts_that_cannot_be_used_are_bad_rows(tmp_path: Path, part: dict[str, Any], reason: str) -> None:
    path = write_lines(tmp_path / "rows.jsonl", asked(part, text("?"), image("b.png")))
    raw = load(path, dataset_name="openai_format")
    assert len(raw.dataset) == 0 and reason in raw.bad_rows[0].reason, raw.bad_rows


def test_other_parts_beside_an_image_are_refused(tmp_path: Path) -> None:
    rows = [asked(image("a.png"), {"type": "table"}), asked(image("a.png"), "How many?")]
    raw = load(write_lines(tmp_path / "rows.jsonl", *rows), dataset_name="openai_format")
    assert "the unknown type 'table'; known: text, image, image_url" in raw.bad_rows[0].reason
    assert "a part that is text, not an object" in raw.bad_rows[1].reason


def test_an_assistant_writes_no_images(tmp_path: Path) -> None:
    row = {"messages": [say("user", "draw"), say("assistant", [image("a.png")])]}
    raw = load(write_lines(tmp_path / "rows.jsonl", row), dataset_name="openai_format")
    assert "message 1 of the assistant has an image" in raw.bad_rows[0].reason


def test_places_in_texts_and_parts_are_filled_in_order(tmp_path: Path) -> None:
    rows = [
        {"input": "<image>Left or <image>?", "output": "left <image>", "images": ["a.png", {"path": "b.png"}]},
        {"input": "no place", "output": "x", "images": []},
        {"input": "the text <image>", "output": "x"},
    ]
    raw = load(write_lines(tmp_path / "rows.jsonl", *rows))
    a, b = (image(str(tmp_path / name)) for name in ("a.png", "b.png"))
    first, second, third = (raw.dataset[index]["messages"] for index in range(3))
    assert first[0]["content"] == [a, text("Left or "), b, text("?")] and first[1]["content"] == "left <image>"
    assert second[0]["content"] == "no place" and third[0]["content"] == "the text <image>"
    assert raw.unused_columns == ()
    row = {**asked({"type": "image"}, text("and <image>!")), "images": ["a.png", "b.png"]}
    content = content_of({"path": write_lines(tmp_path / "parts.jsonl", row)})
    assert content == [a, text("and "), b, text("!")]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"input": "one", "images": ["a.png"]},
            "the row has 0 places for images (<image>, or parts without one), and ",
        ),
        ({"input": "<image>", "images": ["a", "b"]}, "the row has 1 places for images"),
        ({"input": "<image><image>", "images": ["a"]}, "the row has 2 places for images (<image>, or parts without"),
        ({"input": "<image>", "images": []}, "and 'images' has 0"),
        ({"input": "<image>", "images": None}, "and 'images' has 0"),
        ({"input": "<image>", "images": "a.png"}, "'images' is text, not a list"),
        ({"input": "<image>", "images": [3]}, "image 0 of 'images' is a int"),
    ],
)
def test_places_and_images_must_agree(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    raw = load(write_lines(tmp_path / "rows.jsonl", {**row, "output": "1"}))
    assert reason in raw.bad_rows[0].reason


def test_prompts_with_images(tmp_path: Path) -> None:
    turns = [say("system", "s"), say("user", [image("a.png"), text("?")]), say("assistant", "4")]
    turns += [say("tool", [text("seen:"), image("b.png")])]
    rows = [{"prompt": turns, "answer": 4}, {"prompt": "<image>?", "images": ["a.png"]}]
    raw = load(write_lines(tmp_path / "rows.jsonl", *rows), dataset_name="PromptDataset")
    first, second = (raw.dataset[index]["messages"] for index in range(2))
    assert first[1]["content"] == [image(str(tmp_path / "a.png")), text("?")]
    assert first[3]["content"] == [text("seen:"), image(str(tmp_path / "b.png"))] and first[4]["content"] == "4"
    assert second[0]["content"] == [image(str(tmp_path / "a.png")), text("?")]


def test_pairs_with_images(tmp_path: Path) -> None:
    question = [say("user", [image("a.png"), text("?")])]
    rows = [
        {"prompt": question, "chosen": "good", "rejected": "bad"},
        {"chosen": [*question, say("assistant", "good")], "rejected": [*question, say("assistant", "bad")]},
        {"prompt": "<image>?", "chosen": "good", "rejected": "bad", "images": ["a.png"]},
    ]
    rows[1]["prompt"] = None
    path = write_lines(tmp_path / "rows.jsonl", rows[0], rows[2])
    whole = write_lines(tmp_path / "whole.jsonl", {key: rows[1][key] for key in ("chosen", "rejected")})
    pairs = [each["pair"] for file in (path, whole) for each in load_preference_dataset(entry(data_path=file)).dataset]
    expected = [say("user", [image(str(tmp_path / "a.png")), text("?")])]
    for pair in pairs:
        assert pair["context"] == expected
        assert [each["completion"][0]["content"] for each in pair["completions"]] == ["good", "bad"]
    assert len(pairs) == 3


def test_pairs_whose_images_differ(tmp_path: Path) -> None:
    ask, more = say("user", "<image>?"), say("user", "and <image>?")
    answers = [[say("assistant", word), more, say("assistant", word)] for word in ("good", "bad")]
    row = {"prompt": [ask], "chosen": answers[0], "rejected": answers[1], "images": ["a.png", "b.png"]}
    short = {**row, "rejected": answers[1][:1]}
    raw = load_preference_dataset(entry(data_path=write_lines(tmp_path / "rows.jsonl", row, short)))
    later = [each["completion"][1]["content"] for each in raw.dataset[0]["pair"]["completions"]]
    assert later == [[text("and "), image(str(tmp_path / "b.png")), text("?")]] * 2, "both continue the prompt"
    assert "the row has 1 places" in raw.bad_rows[0].reason and raw.bad_rows[0].line == 2


def test_ranked_completions_and_labelled_answers_with_images(tmp_path: Path) -> None:
    context = [say("user", [image("a.png"), text("?")])]
    ranked = [{"rank": rank, "completion": [say("assistant", word)]} for rank, word in enumerate("ab")]
    path = write_lines(tmp_path / "ranked.jsonl", {"context": context, "completions": ranked})
    pair = load_preference_dataset(entry(data_path=path, dataset_name="PreferenceDataset")).dataset[0]["pair"]
    expected = [say("user", [image(str(tmp_path / "a.png")), text("?")])]
    assert pair["context"] == expected
    row = {"prompt": "<image>?", "completion": "x", "label": True, "images": ["a.png"]}
    path = write_lines(tmp_path / "labelled.jsonl", row)
    raw = load_feedback_dataset(entry(data_path=path, dataset_name="BinaryFeedbackDataset"))
    assert raw.dataset[0]["feedback"]["context"] == expected
    raw = load_feedback_dataset(entry(data_path=str(tmp_path / "ranked.jsonl"), dataset_name="PreferenceDataset"))
    assert raw.dataset[1]["feedback"]["context"] == expected


def test_text_rows_are_unchanged(tmp_path: Path) -> None:
    rows = [{"messages": [say("user", [text("a"), text("b")]), say("assistant", "<image>")]}]
    raw = load(write_lines(tmp_path / "rows.jsonl", *rows), dataset_name="openai_format")
    assert raw.dataset[0]["messages"] == [say("user", "ab"), say("assistant", "<image>")]


def hub_table(path: Path, images: list[bytes | None], **columns: list[Any]) -> str:
    """Write a Parquet file as the hub has it, whose feature is a list of images."""
    features = {key: datasets.Value("string") for key in columns}
    features["images"] = datasets.List(datasets.Image())
    listed = [None if data is None else [{"bytes": data, "path": None}] for data in images]
    datasets.Dataset.from_dict({**columns, "images": listed}, features=datasets.Features(features)).to_parquet(path)
    return str(path)


@pytest.fixture
def no_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("an image was opened")

    monkeypatch.setattr("PIL.Image.open", refuse)


@pytest.mark.usefixtures("no_pixels")
def test_images_of_parquet_files_stay_bytes(tmp_path: Path) -> None:
    path = hub_table(tmp_path / "a.parquet", [png(), None], input=["<image>?", "no image"], output=["1", "2"])
    raw = load(path)
    assert raw.bad_rows == []
    assert raw.dataset[0]["messages"][0]["content"] == [image({"bytes": png(), "path": None}), text("?")]
    assert raw.dataset[1]["messages"][0]["content"] == "no image"


def test_nested_images_of_parquet_files_and_raw_bytes(tmp_path: Path) -> None:
    parts = [
        {"type": "image", "image": {"bytes": png(), "path": "x.png"}, "text": None},
        {"type": "text", "image": None, "text": "?"},
    ]
    rows = [{"messages": [say("user", parts), say("assistant", [{"type": "text", "text": "3"}])]}]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    raw = load(str(tmp_path / "a.parquet"), dataset_name="openai_format")
    assert raw.bad_rows == [], raw.bad_rows
    assert raw.dataset[0]["messages"][0]["content"] == [image({"bytes": png(), "path": "x.png"}), text("?")]
    rows = [{"input": "<image>", "output": "1", "images": [png()]}]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    raw = load(str(tmp_path / "b.parquet"))
    assert raw.dataset[0]["messages"][0]["content"] == [image({"bytes": png(), "path": None})]


def test_a_column_of_images_that_is_not_read_stays_as_it_was(tmp_path: Path) -> None:
    features = datasets.Features(
        {"input": datasets.Value("string"), "output": datasets.Value("string"), "image": datasets.Image()}
    )
    table = datasets.Dataset.from_dict(
        {"input": ["q"], "output": ["a"], "image": [{"bytes": png(), "path": None}]}, features=features
    )
    table.to_parquet(tmp_path / "a.parquet")
    row = load(str(tmp_path / "a.parquet")).dataset[0]
    assert row["image"].size == (8, 4), "a processor of the user gets the image as before"


def test_control_tokens_beside_images_are_found(tmp_path: Path, qwen3: Any) -> None:
    path = hub_table(tmp_path / "a.parquet", [png()] * 2, input=["<image>a", "<image><|im_end|>"], output=["1", "2"])
    found, searched = rows_with_control_tokens(load(path).dataset, control_tokens_of(qwen3))
    assert (found, searched) == ({1: "<|im_end|>"}, 2)


def test_relative_paths_need_a_file(tmp_path: Path) -> None:
    with pytest.raises(RowError, match="a relative path, but its row is not from a local file"):
        located("a.png", None)
    assert located("/a.png", None) == "/a.png" and located(URL, None) == URL


def test_rows_are_json_lines_with_escapes(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(asked(image("ü.png"))) + "\n")
    assert content_of({"path": str(path)}) == [image(str(tmp_path / "ü.png"))]
