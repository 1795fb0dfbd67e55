"""Images in the records of steps: each file once, the same bits again, and other images are named."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pictures

from nemo_rl.algorithms.rollout.batches import build_training_batch
from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.algorithms.runtime.step_record import StepRecorder, samples_in_short
from nemo_rl.commands.replay.records import read_step
from nemo_rl.commands.replay.run import compare_prompts
from nemo_rl.config import GRPOMasterConfig, TokenizerConfig
from nemo_rl.config.loading.load import config_of
from nemo_rl.data.images.image import _KNOWN
from nemo_rl.data.interfaces import DatumSpec, TaskDataSpec, TokenizerType
from nemo_rl.data.processors import vlm_hf_data_processor
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.losses.policy_gradient import ClippedPGLossFn
from nemo_rl.utils.errors import ReplayError

pytest.importorskip("torchvision")

TINY = Path(__file__).resolve().parents[3] / "examples/assets/tiny-vision"
SAMPLES = 8


@pytest.fixture(scope="module")
def tokenizer() -> TokenizerType:
    return get_tokenizer(TokenizerConfig.build(name=str(TINY), use_processor=True))


class Ranks:
    """A policy without ranks."""

    weight_version = 0
    layout = ParallelLayout()

    def everywhere(self, method: str, **kwargs: Any) -> list[Any]:
        return []


def picture(path: Path, seed: int) -> Path:
    """Write a picture of noise, whose file has about 30 kB."""
    Pictures.fromarray(np.random.default_rng(seed).integers(0, 256, (100, 100, 3), dtype=np.uint8)).save(path)
    return path


def row(tokenizer: TokenizerType, *paths: Path) -> DatumSpec:
    parts: list[dict[str, Any]] = [{"type": "image", "image": str(path)} for path in paths]
    asked = {"role": "user", "content": [*parts, {"type": "text", "text": "How many?"}]}
    messages = [asked, {"role": "assistant", "content": "3"}]
    return vlm_hf_data_processor({"messages": messages, "task_name": "vlm"}, TaskDataSpec("vlm"), tokenizer, 2000, 0)


def sample(datum: DatumSpec, number: int) -> Trajectory:
    answer = {"token_ids": torch.tensor([18, 258]), "generation_logprobs": torch.zeros(2)}
    log: list[Any] = [*datum["message_log"], {"role": "assistant", "content": "3", **answer}]
    made = Trajectory(0, number, 0, "vlm", log, len(log[0]["token_ids"]), reward=float(number % 2))
    made.row_inputs = datum["row_inputs"]
    return made


def recorded(folder: Path, tokenizer: TokenizerType, *paths: Path) -> StepBatch:
    samples = [sample(row(tokenizer, *paths), number) for number in range(SAMPLES)]
    batch = StepBatch(build_training_batch(samples, 0, mask_truncated=False), samples, rows_per_update=SAMPLES)
    config = config_of({"policy": {"model_name": str(TINY)}, "grpo": {}}, GRPOMasterConfig, check=False)
    recorder = StepRecorder(folder, config, Ranks(), ClippedPGLossFn(config.loss_fn))  # type: ignore[arg-type]
    recorder._version = 0
    recorder._write(1, batch, [])
    return batch


def test_a_record_has_each_file_once_and_gives_the_same_pixels_again(tmp_path: Path, tokenizer: TokenizerType) -> None:
    paths = [picture(tmp_path / f"{seed}.png", seed) for seed in (1, 2)]
    batch = recorded(tmp_path, tokenizer, *paths)
    # torch.save writes bytes as text, in which half of all bytes take two.
    assert (tmp_path / "steps/step_1.pt").stat().st_size < 2 * sum(path.stat().st_size for path in paths) + 40_000
    pixels = [each.row_inputs.inputs["pixel_values"].values for each in batch.trajectories]  # type: ignore[union-attr]
    for path in paths:
        path.unlink()
    before = samples_in_short(batch)
    _KNOWN.clear()
    again = read_step(tmp_path, 1)
    for one, other in zip(again.trajectories, pixels, strict=True):
        assert torch.equal(one.row_inputs.inputs["pixel_values"].values, other)  # type: ignore[union-attr]
    images = [image for each in again.trajectories for image in each.row_inputs.images.images]  # type: ignore[union-attr]
    assert len({id(image) for image in images}) == len(before[0]["images"]) == 2
    assert again.summary["samples"] == before


def test_a_file_that_is_not_the_recorded_one_is_refused(tmp_path: Path, tokenizer: TokenizerType) -> None:
    recorded(tmp_path, tokenizer, picture(tmp_path / "1.png", 1))
    path = tmp_path / "steps/step_1.pt"
    content = torch.load(path)
    other = picture(tmp_path / "2.png", 2).read_bytes()
    for each in content["trajectories"]:
        each["row_inputs"]["images"]["images"][0]["encoded"] = other
    torch.save(content, path)
    _KNOWN.clear()
    with pytest.raises(ReplayError, match=r"the stored file of Image\(.*1\.png.*\) is not the one that its hash names"):
        read_step(tmp_path, 1)


def test_an_image_of_the_data_that_has_changed_is_named(tmp_path: Path, tokenizer: TokenizerType) -> None:
    paths = [picture(tmp_path / f"{seed}.png", seed) for seed in (1, 2)]
    trajectories = recorded(tmp_path, tokenizer, *paths).trajectories
    env = {"vlm": {"reward_functions": [{"name": "exact_alnum"}]}}

    def compared(datum: DatumSpec) -> list[str]:
        data: Any = SimpleNamespace(train=[datum])
        return [each.text for each in compare_prompts(trajectories, data, env)[0].differences]

    assert compared(row(tokenizer, *paths)) == []
    picture(paths[1], 3)
    assert compared(row(tokenizer, *paths)) == [
        "prompt 0 (row 0 of the training data) differs from the record: image 2 has another content or size in the data"
    ]
