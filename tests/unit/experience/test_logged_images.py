"""Images of samples in the logs of runs: their entries, one picture for each image, and their text on a terminal."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pictures

from nemo_rl.algorithms.rollout.batches import build_training_batch
from nemo_rl.commands.regrade.stored_samples import read_samples
from nemo_rl.config import TokenizerConfig
from nemo_rl.data.interfaces import TaskDataSpec, TokenizerType
from nemo_rl.data.processors import vlm_hf_data_processor
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.experience import trajectory_log
from nemo_rl.experience.logged_images import ImageLog, image_text, logged_images, placed
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.experience.trajectory_log import ShownAnswers, TrajectoryLog, turns_to_show

pytest.importorskip("torchvision")

RamDisk = Callable[[str], AbstractContextManager[Path]]
TINY = Path(__file__).resolve().parents[3] / "examples/assets/tiny-vision"


@pytest.fixture(scope="module")
def tokenizer() -> TokenizerType:
    return get_tokenizer(TokenizerConfig.build(name=str(TINY), use_processor=True))


def write_picture(path: Path, size: tuple[int, int], colour: str = "red") -> str:
    Pictures.new("RGB", size, colour).save(path)
    return str(path)


def sample(tokenizer: TokenizerType, *paths: str, number: int = 0) -> Trajectory:
    """Return a sample whose prompt has images."""
    parts = [{"type": "image", "image": path} for path in paths] + [{"type": "text", "text": "How many?"}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "3"}], "task_name": "math"}
    datum = vlm_hf_data_processor(row, TaskDataSpec("math"), tokenizer, 2000, 0)
    answer = torch.tensor([18, 258])
    log: list[Any] = [*datum["message_log"]]
    log.append({"role": "assistant", "content": "3", "token_ids": answer, "generation_logprobs": torch.zeros(2)})
    made = Trajectory(0, number, 0, "math", log, len(log[0]["token_ids"]), reward=float(number))
    made.row_inputs = datum["row_inputs"]
    return made


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_name_their_images_and_each_picture_is_written_once(tmp_path: Path, tokenizer: TokenizerType) -> None:
    small, large = write_picture(tmp_path / "a.png", (28, 28)), write_picture(tmp_path / "b.png", (600, 30), "blue")
    samples = [sample(tokenizer, small), sample(tokenizer, small, large, number=1), sample(tokenizer, number=2)]
    folder = tmp_path / "logs"
    folder.mkdir()
    log = TrajectoryLog(folder, enabled=True)
    log.write_training(1, samples, build_training_batch(samples, 0, mask_truncated=False))
    log.write_validation(1, samples)
    pictures = sorted((folder / "images").iterdir())
    written = [path.stat().st_mtime_ns for path in pictures]
    assert [Pictures.open(path).size for path in sorted(pictures, key=lambda each: each.suffix)] == [
        (256, 13),
        (28, 28),
    ]
    TrajectoryLog(folder, enabled=True).write_validation(2, samples)
    assert [path.stat().st_mtime_ns for path in sorted((folder / "images").iterdir())] == written
    for name in ("train_data_step1", "val_data_step1", "val_data_step2"):
        one, two, none = lines_of(folder / f"{name}.jsonl")
        assert [image["size"] for image in two["images"]] == [[28, 28], [600, 30]] and "images" not in none
        assert one["images"] == two["images"][:1] and one["images"][0]["source"] == small
        assert {image["digest"] for image in two["images"]} == {path.stem for path in pictures}
    tokens = torch.cat([message["token_ids"] for message in samples[1].message_log]).tolist()
    family = samples[1].row_inputs.images.family  # type: ignore[union-attr]
    for image in lines_of(folder / "train_data_step1.jsonl")[1]["images"]:
        start, stop = image["tokens"]
        assert set(tokens[start:stop]) == {family.placeholder} != {tokens[start - 1]} and tokens[stop] != tokens[start]
    assert [each.row["sample"] for each in read_samples(folder / "train_data_step1.jsonl")] == [0, 1, 2]


def test_a_full_disk_costs_pictures_but_no_lines(
    tmp_path: Path, tokenizer: TokenizerType, ram_disk: RamDisk, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [str(tmp_path / f"{seed}.png") for seed in range(8)]
    for seed, path in enumerate(paths):  # noise, of which a picture takes about 38 kB
        pixels = np.random.default_rng(seed).integers(0, 256, (112, 112, 3), dtype=np.uint8)
        Pictures.fromarray(pixels).save(path)
    samples = [sample(tokenizer, path, number=number) for number, path in enumerate(paths)]
    with ram_disk("size=256k") as disk:
        log = TrajectoryLog(disk, enabled=True)
        filling = disk / "filling"
        filling.write_bytes(bytes(100_000))
        log.write_validation(1, samples)
        assert len(lines_of(disk / "val_data_step1.jsonl")) == 8
        whole = [*(disk / "images").iterdir()]
        assert 0 < len(whole) < 8 and {path.suffix for path in whole} == {".png"}
        assert {Pictures.open(path).copy().size for path in whole} == {(112, 112)}
        assert [record.message for record in caplog.records] == [
            f"Pictures of images in {disk}/images cannot be written: [Errno 28] No space left on device. The run "
            "continues; this output is incomplete."
        ]
        filling.unlink()
        log.write_validation(2, samples[:5])
        assert len([*(disk / "images").iterdir()]) == 5


def test_a_terminal_names_the_images(
    tmp_path: Path, tokenizer: TokenizerType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = sample(tokenizer, write_picture(tmp_path / "a.png", (28, 28)))
    (start, stop) = logged_images(made)[0]["tokens"]
    name = f"[image 1: 28x28, tokens {start} to {stop - 1}]"
    assert [name in turn["content"] for turn in turns_to_show(made)] == [True, False]
    monkeypatch.setattr(trajectory_log, "is_terminal", lambda stream: True)
    caplog.set_level(logging.INFO, logger="nemo_rl")
    ShownAnswers(number=2, period=1).show(1, [made])
    (line,) = [record.message for record in caplog.records]
    assert name in line and line.endswith("->  3")


def test_a_small_photo_does_not_become_larger(tmp_path: Path, tokenizer: TokenizerType) -> None:
    photo = write_picture(tmp_path / "a.jpg", (28, 28))
    assert len(ImageLog(tmp_path).write(sample(tokenizer, photo))) == 1
    assert [path.suffix for path in (tmp_path / "images").iterdir()] == [".jpg"]


def message(content: str, role: str = "user") -> Mapping[str, Any]:
    return {"role": role, "content": content}


ONE, TWO = ({"size": [28, 14], "tokens": [5, 9]}, {"size": None, "tokens": [12, 13]})
NAMES = ("[image 1: 28x14, tokens 5 to 8]", "[image 2: token 12]")


@pytest.mark.parametrize(
    ("messages", "texts", "numbers"),
    [
        ([message("a<image>b"), message("<image>")], [f"a{NAMES[0]}b", NAMES[1]], [[0], [1]]),
        ([message("<|image_pad|>"), message("<image>", "tool")], [*NAMES], [[0], [1]]),
        ([message("<|image_pad|><image><|image_pad|>")], [f"{NAMES[0]}<image>{NAMES[1]}"], [[0, 1]]),
        ([message("<image><image>"), message("<image>", "assistant")], ["".join(NAMES), "<image>"], [[0, 1], []]),
        ([message("<image>")], ["<image>"], [[]]),
    ],
)
def test_images_are_named_where_they_stand(
    messages: Sequence[Mapping[str, Any]], texts: list[str], numbers: list[list[int]]
) -> None:
    assert placed(messages, [ONE, TWO]) == list(zip(texts, numbers, strict=True))
    assert [text for text, _ in placed(messages, [])] == [each["content"] for each in messages]
    assert image_text(2, {"size": None, "tokens": None}) == "[image 3]"
