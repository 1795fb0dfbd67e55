"""Records of steps: which are written, that they hold every bit, and why one cannot be replayed."""

import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.rollout.batches import build_training_batch
from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.algorithms.runtime.step_record import StepRecorder, name_of
from nemo_rl.commands.replay.folders import find_folder
from nemo_rl.commands.replay.records import add_modules, read_step
from nemo_rl.config import GRPOMasterConfig
from nemo_rl.config.loading.load import config_of
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.distributed.ranks.tensor_block import whole_block
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.losses.policy_gradient import ClippedPGLossFn
from nemo_rl.models.policy.workers.update_recorder import RankUpdate
from nemo_rl.models.training.tensor_checks import fingerprint
from nemo_rl.utils.errors import ReplayError

WEIGHT = {"w": (whole_block((2,)), fingerprint(torch.tensor([0.1, 0.2])))}


class Ranks:
    """A policy of one rank that has recorded an update."""

    weight_version = 4
    layout = ParallelLayout()

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.ranks = self

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.calls.append(name)
        yield

    def everywhere(self, method: str, phase: str, **kwargs: Any) -> list[Any]:
        self.calls.append(method)
        scores = torch.tensor([[-0.1, -0.2, -0.3], [-0.4, 0.0, 0.0]])
        made = RankUpdate(WEIGHT, WEIGHT, WEIGHT, [0.1, 0.2], [{"kl": 0.1}, {"kl": 0.2}], [([0, 1], scores)])
        return [[made]]


def config(**checkpointing: Any) -> GRPOMasterConfig:
    tree = {"policy": {"model_name": "examples/assets/tiny-chat"}, "grpo": {}, "checkpointing": checkpointing}
    return config_of(tree, GRPOMasterConfig, check=False)


def trajectory(sample: int, reward: float) -> Trajectory:
    return Trajectory(
        group_index=0,
        sample_index=sample,
        idx=17,
        task_name="math",
        message_log=[
            {"role": "user", "content": "2+2=", "token_ids": torch.tensor([5, 6])},
            {
                "role": "assistant",
                "content": "4",
                "token_ids": torch.tensor([7, 8 + sample]),
                "generation_logprobs": torch.tensor([-0.123456789, -1.0]),
            },
        ],
        prompt_length=2,
        reward=reward,
    )


def batch() -> StepBatch:
    rollouts = [trajectory(0, 1.0), trajectory(1, 0.0)]
    tensors = build_training_batch(rollouts, 0, mask_truncated=False)
    tensors["advantages"] = torch.tensor([[0.0, 0.0, 0.7, 0.7], [0.0, 0.0, -0.7, -0.7]])
    return StepBatch(tensors, rollouts, rows_per_update=2)


def recorded(folder: Path, *steps: int, **checkpointing: Any) -> Ranks:
    policy = Ranks()
    settings = config(**checkpointing)
    recorder = StepRecorder(folder, settings, policy, ClippedPGLossFn(settings.loss_fn))  # type: ignore[arg-type]
    for step in steps:
        made = batch()
        recorder.begin(step, made, policy.phase)
        recorder.write(step, made)
    return policy


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "steps").iterdir() if path.suffix == ".json")


def test_the_first_step_and_those_after_a_checkpoint_are_recorded(tmp_path: Path) -> None:
    policy = recorded(tmp_path, 1, 2, 3, 4, save_period=2)
    assert names(tmp_path) == ["step_1.json", "step_3.json"]
    assert policy.calls == ["step_record", "record_updates", "step_record", "take_updates"] * 2


def test_the_first_step_of_a_resumed_run_is_recorded_if_its_checkpoint_is_whole(tmp_path: Path) -> None:
    checkpoints = {"checkpoint_dir": str(tmp_path / "checkpoints"), "save_period": 100}
    (tmp_path / "checkpoints/step_5/policy/weights").mkdir(parents=True)
    recorded(tmp_path, 6, 7, **checkpoints)
    assert not (tmp_path / "steps").exists(), "it has no state of the optimizer"
    (tmp_path / "checkpoints/step_5/policy/optimizer").mkdir()
    recorded(tmp_path, 6, 7, **checkpoints)
    assert names(tmp_path) == ["step_6.json"]


def test_steps_after_checkpoints_without_an_optimizer_are_not_recorded(tmp_path: Path) -> None:
    recorded(tmp_path, 1, 2, 3, save_period=1, save_optimizer=False)
    assert names(tmp_path) == ["step_1.json"]


def test_without_checkpoints_only_the_first_step_can_be_repeated(tmp_path: Path) -> None:
    recorded(tmp_path, 1, 2, 3, save_period=1, enabled=False)
    assert names(tmp_path) == ["step_1.json"]


def test_a_record_that_is_read_has_every_bit(tmp_path: Path) -> None:
    recorded(tmp_path, 1)
    found = read_step(tmp_path, 1)
    want = batch()
    again = build_training_batch(found.trajectories, 0, mask_truncated=False)
    assert all(torch.equal(again[name], want.tensors[name]) for name in again)
    assert torch.equal(found.tensors["advantages"], want.tensors["advantages"])
    assert [row["reward"] for row in found.summary["samples"]] == [1.0, 0.0]
    assert found.summary["samples"][0]["input_ids"] != found.summary["samples"][1]["input_ids"]
    (made,) = found.updates
    assert (made.loss, made.metrics) == (0.1 + 0.2, {"kl": 0.1 + 0.2})
    assert made.before["w"] == WEIGHT["w"][1]
    assert torch.equal(made.logprobs[1], torch.tensor([-0.4, 0.0, 0.0]))
    assert (found.summary["weight_version"], found.summary["checkpoint"]) == (4, None)
    assert found.summary["loss_fn"] == "nemo_rl.losses.policy_gradient.ClippedPGLossFn"


def test_modules_are_added_to_a_record(tmp_path: Path) -> None:
    recorded(tmp_path, 1)
    found = read_step(tmp_path, 1)
    calls = [[("model.norm", WEIGHT["w"][1])]]
    again = SimpleNamespace(updates=[SimpleNamespace(modules=calls)])
    add_modules(found, again)  # type: ignore[arg-type]
    assert read_step(tmp_path, 1).updates[0].modules == calls


def raising(error: Exception) -> Callable[..., None]:
    def fails(*arguments: Any) -> None:
        raise error

    return fails


@pytest.mark.parametrize("part", ["torch.save", "nemo_rl.algorithms.runtime.step_record.write_json"])
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("unexpected pos 64"),
        OSError("full"),
        pickle.PicklingError("lambda"),
        TypeError("set"),
        ValueError(),
    ],
)
def test_a_record_that_cannot_be_written_is_absent_and_does_not_end_the_run(
    error: Exception, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(tmp_path, 1)  # by an earlier run
    monkeypatch.setattr(part, raising(error))
    recorded(tmp_path, 1)
    assert list((tmp_path / "steps").iterdir()) == []


def test_a_record_replaces_the_one_of_an_earlier_run(tmp_path: Path) -> None:
    recorded(tmp_path, 1)
    (tmp_path / "steps" / "step_1.json").write_text("{}")
    recorded(tmp_path, 1)
    assert read_step(tmp_path, 1).summary["weight_version"] == 4
    assert len(list((tmp_path / "steps").iterdir())) == 2


def test_steps_that_were_not_recorded_are_refused_with_those_that_were(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match=r"has no recorded steps.*logger\.record_steps=true"):
        find_folder(tmp_path, 1)
    run = tmp_path / "exp_010"
    run.mkdir()
    (tmp_path / "exp_009").mkdir()
    recorded(run, 1, 2, 3, save_period=2)
    recorded(tmp_path / "exp_009", 1)
    assert find_folder(tmp_path, 1) == find_folder(run, 1) == run.resolve()
    with pytest.raises(ReplayError, match=r"step 2 was not recorded.*has 1, 3\."):
        read_step(run, 2)


def test_the_newest_folder_that_has_the_step_is_chosen_then_the_newest_with_any(tmp_path: Path) -> None:
    first, second = tmp_path / "exp_009", tmp_path / "exp_010"
    for folder in (first, second, tmp_path / "exp_011" / "steps", tmp_path / "steps"):
        folder.mkdir(parents=True)
    recorded(first, 1, 2, 3, save_period=2)
    recorded(second, 1)
    assert find_folder(tmp_path, 1) == second.resolve()
    assert find_folder(tmp_path, 3) == first.resolve()
    assert find_folder(tmp_path, 4) == second.resolve()


def test_another_format_and_a_damaged_file_are_refused(tmp_path: Path) -> None:
    recorded(tmp_path, 1)
    file = tmp_path / "steps" / "step_1.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"format": 99}))
    with pytest.raises(ReplayError, match="has format 99, and this version of nemo_rl reads format 1"):
        read_step(tmp_path, 1)
    changes: list[dict[str, Any]] = [{"updates": None}, {"updates": []}, {"updates": [{}]}, {"updates": [3]}]
    for change in changes:
        file.write_text(json.dumps(content | change))
        with pytest.raises(ReplayError, match=r"step_1\.json is damaged, or another version wrote it: \w+Error: "):
            read_step(tmp_path, 1)
    for text in ("{", "[]", "{}", json.dumps({name: content[name] for name in content if name != "layout"})):
        file.write_text(text)
        with pytest.raises(ReplayError, match="is damaged, or another version wrote it"):
            read_step(tmp_path, 1)


def test_a_foreign_file_of_tensors_is_refused(tmp_path: Path) -> None:
    recorded(tmp_path, 1)
    contents: list[Any] = [[1], {"tensors": {}}, {"tensors": {}, "logprobs": [{}], "trajectories": [{}]}]
    for content in contents:
        torch.save(content, tmp_path / "steps" / "step_1.pt")
        with pytest.raises(ReplayError, match="is damaged, or another version wrote it"):
            read_step(tmp_path, 1)


def test_losses_have_names() -> None:
    def own(*arguments: Any) -> None: ...

    assert name_of(own).endswith("test_losses_have_names.<locals>.own")  # type: ignore[arg-type]
