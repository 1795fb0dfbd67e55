"""Images of samples in the page: each picture once, a note where there is none, and a limit on their size."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from stored_run import grey_png, row, write_run
from test_pages import data_of

from nemo_rl.__main__ import main
from nemo_rl.commands.report import images as report_images
from nemo_rl.commands.report.run_files import find_run
from nemo_rl.commands.report.run_view import RunView

DIGESTS = [f"{number:064x}" for number in range(4)]


def image(number: int, **more: Any) -> dict[str, Any]:
    return {"digest": DIGESTS[number], "source": "data", "size": [28, 14], "tokens": [1, 3], **more}


def write_images(folder: Path, *images: Any, files: int = 4) -> Path:
    """Write a run with a step of four samples, which have these images, and the pictures of the first digests."""
    run = write_run(folder, steps=1)
    content = [{"role": "user", "content": "<|image_pad|>" * len(images)}, {"role": "assistant", "content": "2"}]
    rows = [row(1, 0, sample, "", content=content, images=[*images]) for sample in range(4)]
    (run / "train_data_step1.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    (run / "images").mkdir()
    for number, digest in enumerate(DIGESTS[:files]):
        (run / f"images/{digest}.png").write_bytes(grey_png(number))
    return run


def details_of(view: RunView) -> dict[str, Any]:
    view.read()
    return view.detail(1)


def test_a_file_has_each_picture_once_next_to_its_samples(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_images(tmp_path / name, image(0), image(1))
    output = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(output)]) == 0
    page = output.read_text(encoding="utf-8")
    encoded = [base64.b64encode(grey_png(number)).decode() for number in (0, 1)]
    assert [page.count(each) for each in encoded] == [1, 1]
    data: Any = data_of(page)
    assert data["images"] == {DIGESTS[number]: f"data:image/png;base64,{encoded[number]}" for number in (0, 1)}
    for run in data["runs"]:
        detail = run["samples"]["details"]["1"]
        assert detail["messages"][0]["images"] == [0, 1] and "images" not in detail["messages"][1]
        assert detail["messages"][0]["content"] == "[image 1: 28x14, tokens 1 to 2][image 2: 28x14, tokens 1 to 2]"
        assert detail["images"] == [image(0), image(1)] and "addresses" not in detail


def test_a_run_without_images_has_none_of_their_entries(tmp_path: Path) -> None:
    write_run(tmp_path, steps=1)
    detail = details_of(RunView(find_run(tmp_path)))
    assert not {"images", "addresses"} & detail.keys() and "images" not in detail["messages"][0]
    assert main(["report", str(tmp_path)]) == 0
    assert "images" not in data_of((tmp_path / "report.html").read_text(encoding="utf-8"))


def test_the_live_page_gets_the_pictures_of_a_sample(tmp_path: Path) -> None:
    write_images(tmp_path, image(2))
    assert list(details_of(RunView(find_run(tmp_path)))["addresses"]) == [DIGESTS[2]]


@pytest.mark.parametrize("content", [None, b"", b"<svg onload='alert(1)'/>", b"\x89PNG" + bytes(2**18)])
def test_a_picture_that_cannot_be_shown_costs_a_note(content: bytes | None, tmp_path: Path) -> None:
    run = write_images(tmp_path, image(0), image(1), files=2)
    path = run / f"images/{DIGESTS[0]}.png"
    path.unlink() if content is None else path.write_bytes(content)
    detail = details_of(RunView(find_run(tmp_path)))
    assert list(detail["addresses"]) == [DIGESTS[1]]
    assert "no picture" in detail["images"][0]["note"] and "note" not in detail["images"][1]


def test_entries_of_a_wrong_kind_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(grey_png(9))
    odd = [5, {}, image(0, digest="../../secret"), image(1, size=[1], tokens=[-1, "x"], source=["a"])]
    write_images(tmp_path / "logs", *odd)
    detail = details_of(RunView(find_run(tmp_path / "logs")))
    none = dict.fromkeys(("digest", "source", "size", "tokens"))
    assert [{**each, "note": None} for each in detail["images"][:2]] == [{**none, "note": None}] * 2
    assert detail["images"][2]["digest"] is None and detail["images"][3] == {**none, "digest": DIGESTS[1]}
    assert list(detail["addresses"]) == [DIGESTS[1]]
    assert detail["messages"][0]["content"].startswith("[image 1][image 2][image 3: 28x14, tokens 1 to 2][image 4]")


def test_the_pictures_of_a_page_have_a_limited_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path, image(0), image(1), image(2))
    size = len("data:image/png;base64,") + len(base64.b64encode(grey_png(0)))
    monkeypatch.setattr(report_images, "_MOST_CHARS_OF_ALL", 2 * size + 8)
    assert main(["report", str(tmp_path)]) == 0
    data: Any = data_of((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert list(data["images"]) == DIGESTS[:2]
    notes = [[each.get("note") for each in one["images"]] for one in data["runs"][0]["samples"]["details"].values()]
    assert notes == [[None, None, "This page has no room for the picture of this image."]] * 4
