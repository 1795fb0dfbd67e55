"""Checkpoint folders: atomic replacement, ranking, and leftovers of a crash."""

import json
import multiprocessing
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from nemo_rl.config import CheckpointingConfig
from nemo_rl.files.manifest import write_manifest
from nemo_rl.utils import checkpoint as checkpoint_module
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.errors import CheckpointError, ConfigError

PAYLOAD = "policy/weights/model.bin"


def make_manager(folder: Path, **keys) -> CheckpointManager:
    keys = {"metric_name": None, "keep_top_k": None} | keys
    return CheckpointManager(CheckpointingConfig(checkpoint_dir=str(folder), **keys))


def save(manager: CheckpointManager, step: int, payload: str = "weights", **info) -> None:
    folder = Path(manager.init_tmp_checkpoint(step, {"total_steps": step} | info))
    (folder / PAYLOAD).parent.mkdir(parents=True)
    (folder / PAYLOAD).write_text(payload)
    manager.finalize_checkpoint(folder)


def save_with(manager: CheckpointManager, values: dict[int, float | None], name: str = "val:accuracy") -> None:
    for step, value in values.items():
        save(manager, step, **({} if value is None else {name: value}))


def test_a_checkpoint_has_the_documented_layout_and_loads_back(tmp_path):
    manager = make_manager(tmp_path)
    config = CheckpointingConfig(keep_top_k=2)
    folder = Path(
        manager.init_tmp_checkpoint(7, {"total_steps": np.int64(7), "val:accuracy": torch.tensor(0.5)}, config)
    )
    assert folder.name == "tmp_step_7"
    assert manager.get_latest_checkpoint_path() is None
    manager.finalize_checkpoint(folder)

    assert manager.get_latest_checkpoint_path() == str(tmp_path / "step_7")
    assert manager.load_training_info() == {"total_steps": 7, "val:accuracy": 0.5}
    assert yaml.safe_load((tmp_path / "step_7/config.yaml").read_text())["keep_top_k"] == 2
    status = json.loads((tmp_path / "latest_checkpoint_status.json").read_text())
    assert status["last_checkpoint_step"] == 7
    assert status["last_successful_ckpt_save_completion"] > 0


def test_latest_is_the_highest_number_not_the_last_name(tmp_path):
    manager = make_manager(tmp_path)
    save_with(manager, {9: None, 10: None, 100: None})
    assert manager.steps() == [9, 10, 100]
    assert manager.get_latest_checkpoint_path() == str(tmp_path / "step_100")


@pytest.mark.parametrize(
    ("keys", "values", "kept", "best"),
    [
        ({"keep_top_k": None}, {1: 0.9, 2: 0.1, 3: 0.5}, [1, 2, 3], 1),
        ({"keep_top_k": 1}, {1: 0.9, 2: 0.1, 3: 0.5}, [1, 3], 1),
        ({"keep_top_k": 2}, {1: 0.9, 2: 0.1, 3: 0.5, 4: 0.2}, [1, 3, 4], 1),
        ({"keep_top_k": 1, "higher_is_better": False}, {1: 0.9, 2: 0.1, 3: 0.5}, [2, 3], 2),
        ({"keep_top_k": 1}, {1: 0.5, 2: 0.5, 3: 0.1}, [2, 3], 2),
        ({"keep_top_k": 2}, {1: None, 2: 0.1, 3: None, 4: None}, [2, 4], 2),
        ({"keep_top_k": 1}, {1: float("nan"), 2: 0.1, 3: float("inf")}, [2, 3], 2),
        ({"keep_top_k": 2, "metric_name": None}, {1: 0.9, 2: 0.1, 3: 0.5}, [2, 3], 3),
    ],
)
def test_the_configured_checkpoints_are_kept_and_the_best_is_found(tmp_path, keys, values, kept, best):
    manager = make_manager(tmp_path, **({"metric_name": "val:accuracy"} | keys))
    save_with(manager, values)
    assert manager.steps() == kept
    assert manager.get_best_checkpoint_path() == str(tmp_path / f"step_{best}")
    assert not list(tmp_path.glob("tmp_*"))


def test_unknown_metric_warns_once_and_keeps_the_newest(tmp_path, caplog):
    manager = make_manager(tmp_path, metric_name="val:acuracy", keep_top_k=2)
    save_with(manager, {1: 0.9, 2: 0.1, 3: 0.5, 4: 0.6})
    assert manager.steps() == [3, 4]
    assert sum("val:acuracy" in record.message for record in caplog.records) == 1


def test_resume_paths_are_those_of_the_checkpoint(tmp_path):
    assert CheckpointManager.get_resume_paths(None) == (None, None)
    manager = make_manager(tmp_path)
    save(manager, 1)
    latest = manager.get_latest_checkpoint_path()
    assert CheckpointManager.get_resume_paths(latest) == (tmp_path / "step_1/policy/weights", None)
    (tmp_path / "step_1/policy/optimizer").mkdir()
    assert CheckpointManager.get_resume_paths(latest)[1] == tmp_path / "step_1/policy/optimizer"


def test_folders_of_other_origin_are_refused(tmp_path):
    manager = make_manager(tmp_path)
    (tmp_path / "step_3").mkdir()
    with pytest.raises(CheckpointError, match=r"training_info\.json"):
        manager.load_training_info()
    (tmp_path / "tmp_step_4").mkdir()
    with pytest.raises(CheckpointError, match="init_tmp_checkpoint"):
        manager.finalize_checkpoint(tmp_path / "tmp_step_4")


class Killed(BaseException):
    """Imitates SIGKILL: no code of the library may catch it."""


def kill_at_call(monkeypatch, target: int) -> list[str]:
    """Let the n-th call that changes the folder (rename, removal, flush) end the process instead."""
    calls: list[str] = []

    def counted(owner, name):
        original = getattr(owner, name)

        def wrapper(*arguments, **keywords):
            calls.append(name)
            if len(calls) == target:
                raise Killed(name)
            return original(*arguments, **keywords)

        monkeypatch.setattr(owner, name, wrapper)

    counted(checkpoint_module.os, "replace")
    counted(checkpoint_module.os, "fsync")
    counted(checkpoint_module.shutil, "rmtree")
    return calls


def half_remove(monkeypatch) -> None:
    """Kill a removal when half of the files are gone."""

    def partial(folder, *_arguments, **_keywords):
        for file in list(Path(folder).rglob("*"))[::2]:
            if file.is_file():
                file.unlink()
        raise Killed("half removed")

    monkeypatch.setattr(checkpoint_module.shutil, "rmtree", partial)


def assert_recovers(folder: Path, allowed_payloads: dict[int, set[str]]) -> None:
    """Check that a new manager finds only complete checkpoints, the newest among them, and no leftovers."""
    manager = make_manager(folder, metric_name="val:accuracy", keep_top_k=1)
    assert not list(folder.glob("tmp_*")) and not list(folder.glob("old_*"))
    assert manager.steps(), "a loadable checkpoint is left at every point"
    for step in manager.steps():
        info = manager.load_training_info(folder / f"step_{step}")
        assert info is not None and info["total_steps"] == step
        assert (folder / f"step_{step}" / PAYLOAD).read_text() in allowed_payloads[step]
    save(manager, 99, payload="after the crash")
    assert manager.get_latest_checkpoint_path() == str(folder / "step_99")


def test_a_save_killed_at_any_call_leaves_a_valid_checkpoint(tmp_path):
    """Steps 1 (best), 2 exist; saving 3 replaces nothing and removes 2. Then step 3 is saved over itself."""
    reached = []
    for new_step in (3, 2):
        for target in range(1, 40):
            folder = tmp_path / f"save{new_step}_{target}"
            manager = make_manager(folder, metric_name="val:accuracy", keep_top_k=1)
            save(manager, 1, payload="one", **{"val:accuracy": 0.9})
            save(manager, 2, payload="two", **{"val:accuracy": 0.1})
            with pytest.MonkeyPatch.context() as monkeypatch:
                calls = kill_at_call(monkeypatch, target)
                try:
                    save(manager, new_step, payload="new", **{"val:accuracy": 0.5})
                    killed = False
                except Killed:
                    killed = True
            if killed:
                reached.append((new_step, calls[-1]))
            assert_recovers(folder, {1: {"one"}, 2: {"two", "new"}, 3: {"new"}})
            if not killed:
                break
        else:
            pytest.fail("the save never ran to its end")
    assert {name for _, name in reached} == {"replace", "fsync", "rmtree"}
    assert len(reached) > 10


@pytest.mark.parametrize("new_step", [2, 3])
def test_a_killed_removal_leaves_a_valid_checkpoint(tmp_path, new_step):
    manager = make_manager(tmp_path, metric_name="val:accuracy", keep_top_k=1)
    save(manager, 1, payload="one", **{"val:accuracy": 0.9})
    save(manager, 2, payload="two", **{"val:accuracy": 0.1})
    with pytest.MonkeyPatch.context() as monkeypatch:
        half_remove(monkeypatch)
        with pytest.raises(Killed):
            save(manager, new_step, payload="new", **{"val:accuracy": 0.5})
    assert_recovers(tmp_path, {1: {"one"}, 2: {"new"}, 3: {"new"}})


def test_an_unfinished_checkpoint_folder_is_removed(tmp_path):
    manager = make_manager(tmp_path)
    save(manager, 1)
    folder = Path(manager.init_tmp_checkpoint(2, {"total_steps": 2}))
    (folder / "half").write_text("x")
    assert make_manager(tmp_path).steps() == [1]
    assert not folder.exists()


def _hold(folder: str, is_written, may_end) -> None:
    manager = make_manager(Path(folder))
    manager.init_tmp_checkpoint(5, {"total_steps": 5})
    is_written.set()
    may_end.wait(30)


def test_the_folder_of_a_running_writer_is_left_alone(tmp_path):
    """A reader in another process leaves the unfinished folder alone, and a second writer is refused."""
    spawn = multiprocessing.get_context("spawn")
    is_written, may_end = spawn.Event(), spawn.Event()
    writer = spawn.Process(target=_hold, args=(str(tmp_path), is_written, may_end))
    writer.start()
    try:
        assert is_written.wait(60)
        manager = make_manager(tmp_path)
        assert (tmp_path / "tmp_step_5").exists()
        with pytest.raises(CheckpointError, match="in use by another run"):
            manager.init_tmp_checkpoint(6, {})
        with pytest.raises(CheckpointError, match="in use by another run"):
            manager.claim()
    finally:
        writer.kill()
        writer.join()
    save(manager, 6)
    make_manager(tmp_path)
    assert not (tmp_path / "tmp_step_5").exists()


def test_reading_needs_no_write_permission(tmp_path):
    save(make_manager(tmp_path), 1)
    reader = make_manager(tmp_path)
    assert reader.get_latest_checkpoint_path() == str(tmp_path / "step_1")
    assert make_manager(tmp_path / "missing").get_latest_checkpoint_path() is None
    assert not (tmp_path / "missing").exists()


def damage(folder: Path, how: str) -> str:
    """Damage a checkpoint; return what its manager should report."""
    payload = folder / PAYLOAD
    if how == "truncated":
        payload.write_text("wei")
        return f"{PAYLOAD} has 3 of 7 bytes"
    if how == "flipped bit":
        payload.write_bytes(bytes([payload.read_bytes()[0] ^ 1]) + payload.read_bytes()[1:])
        return f"{PAYLOAD} has other content than was written"
    if how == "missing":
        payload.unlink()
        return f"{PAYLOAD} is missing"
    if how == "empty save state":
        (folder / "training_info.json").write_text("")
        return "no readable training_info.json"
    (folder / "manifest.json").write_text("{]")
    return "manifest.json cannot be read"


@pytest.mark.parametrize("how", ["truncated", "flipped bit", "missing", "empty save state", "manifest"])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(tmp_path, caplog, how):
    save_with(make_manager(tmp_path), {1: None, 2: None, 3: None})
    assert make_manager(tmp_path).find_resumable() == tmp_path / "step_3"
    told = damage(tmp_path / "step_3", how)
    manager = make_manager(tmp_path)
    manager.claim()
    assert manager.find_resumable() == tmp_path / "step_2"
    assert told in caplog.text and "the run continues from step_2" in caplog.text
    assert manager.steps() == [1, 2] and (tmp_path / "damaged_step_3").exists()
    save(manager, 3)
    assert manager.find_resumable() == tmp_path / "step_3"


def test_if_all_checkpoints_are_damaged_each_is_named_and_kept(tmp_path):
    save_with(make_manager(tmp_path), {1: None, 2: None})
    for step in (1, 2):
        damage(tmp_path / f"step_{step}", "truncated")
    with pytest.raises(CheckpointError, match=r"(?s)step_2: .*step_1: .*start over with another checkpoint"):
        make_manager(tmp_path).find_resumable()
    assert make_manager(tmp_path).steps() == [1, 2]


def test_a_missing_optimizer_folder_is_accepted_but_a_missing_part_is_damage(tmp_path):
    manager = make_manager(tmp_path)
    for step in (1, 2):
        folder = Path(manager.init_tmp_checkpoint(step, {"total_steps": step}))
        (folder / "policy/optimizer").mkdir(parents=True)
        (folder / "policy/optimizer/trainer.pt").write_text("x")
        (folder / "policy/optimizer/rng").write_text("x")
        manager.finalize_checkpoint(folder)
    shutil.rmtree(tmp_path / "step_2/policy/optimizer")
    assert manager.find_resumable() == tmp_path / "step_2"
    (tmp_path / "step_1/policy/optimizer/rng").unlink()
    shutil.rmtree(tmp_path / "step_2")
    with pytest.raises(CheckpointError, match="policy/optimizer/rng is missing"):
        manager.find_resumable()


def test_a_checkpoint_without_checksums_is_used_with_a_notice(tmp_path, caplog):
    save(make_manager(tmp_path), 1)
    (tmp_path / "step_1/manifest.json").unlink()
    assert make_manager(tmp_path).find_resumable() == tmp_path / "step_1"
    assert "used unchecked" in caplog.text


def test_a_damaged_old_checkpoint_is_not_counted_as_kept(tmp_path, caplog):
    manager = make_manager(tmp_path, metric_name="val:accuracy", keep_top_k=2)
    save_with(manager, {2: 0.9, 4: 0.5})
    for content in ("", "[]"):
        (tmp_path / "step_2/training_info.json").write_text(content)
        save_with(manager, {6: 0.4, 8: 0.1, 10: 0.2})
        assert manager.steps() == [2, 4, 6, 10]
        assert manager.get_best_checkpoint_path() == str(tmp_path / "step_4")
    assert sum("step_2 is ignored by keep_top_k" in record.message for record in caplog.records) == 1


def test_a_folder_that_cannot_be_written_is_refused_before_it_is_needed(tmp_path, ram_disk):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written: (Not a directory|File exists)"):
        make_manager(tmp_path / "file").claim()
    with ram_disk("ro") as folder:
        with pytest.raises(ConfigError, match="cannot be written: it is read-only"):
            make_manager(folder).claim()
        with pytest.raises(ConfigError, match="cannot be written: Read-only file system"):
            make_manager(folder / "new").claim()


@pytest.mark.parametrize("name", ["tmp_step_2", "tmp_step_4"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "file"])
def test_leftover_files_and_links_are_removed_but_not_link_targets(tmp_path, name, kind):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("x")
    folder = tmp_path / "run"
    first = make_manager(folder)
    save_with(first, {2: 0.1})
    first.release()
    leftover = folder / name
    if kind == "file":
        leftover.write_text("")
    else:
        leftover.symlink_to(elsewhere if kind == "link" else tmp_path / "nowhere")
    manager = make_manager(folder)
    assert not os.path.lexists(leftover) and (elsewhere / "kept").exists()
    save_with(manager, {4: 0.2})
    assert manager.steps() == [2, 4]


@pytest.mark.parametrize("value", ["three", 2.5, None, True, -1])
def test_a_step_that_is_no_number_is_a_damaged_checkpoint(tmp_path, caplog, value):
    manager = make_manager(tmp_path)
    save_with(manager, {2: 0.1, 4: 0.2})
    file = tmp_path / "step_4/training_info.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"total_steps": value}))
    write_manifest(tmp_path / "step_4")
    assert manager.find_resumable() == tmp_path / "step_2"
    assert f"training_info.json holds total_steps={value!r}, which is not a number of steps" in caplog.text
    shutil.rmtree(tmp_path / "step_2")
    shutil.move(tmp_path / "damaged_step_4", tmp_path / "step_4")
    with pytest.raises(CheckpointError, match="every checkpoint .* is damaged"):
        manager.find_resumable()


def test_the_manager_uses_the_functions_that_the_tests_patch():
    """The kill points above patch the same functions that the manager uses."""
    assert checkpoint_module.os is os and checkpoint_module.shutil is shutil
