"""The frame of a run: steps, cadence, checkpoints, resume, and why it ended."""

import json
import logging
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from run_parts import Data, Policy, make_session, train

from nemo_rl.algorithms.runtime.session import Cadence, Session
from nemo_rl.host.stop_signals import STOP_SIGNALS, handlers_kept, leave_at_once
from nemo_rl.utils.errors import (
    CheckpointError,
    ConfigError,
    NonFiniteError,
    NothingToLearnError,
    RunInterruptedError,
    WorkerDiedError,
)

pytestmark = pytest.mark.fast


def make_validated(
    folder: Path, cadence: Cadence, data: Data, accuracy: dict[int, float] | None = None, **checkpointing: Any
) -> tuple[Session, list[int]]:
    """Start a session; return it, and the list of the steps that it validates."""
    validated: list[int] = []

    def validate(step: int) -> dict[str, float]:
        validated.append(step)
        return {"accuracy": (accuracy or {}).get(step, 0.0)}

    return make_session(folder, cadence, data, validate=validate, **checkpointing), validated


def test_validation_and_checkpoints_come_when_they_are_due(tmp_path: Path) -> None:
    cadence = Cadence(7, val_period=3, val_at_start=True, val_at_end=True, save_period=3)
    data = Data()
    session, validated = make_validated(tmp_path, cadence, data, {0: 0.1, 3: 0.9, 6: 0.5, 7: 0.6})
    assert train(session, data) == [1, 2, 3, 4, 5, 6, 7]
    assert validated == [0, 3, 6, 7]
    folders = sorted(p.name for p in (tmp_path / "checkpoints").glob("step_*"))
    assert folders == ["step_3", "step_6", "step_7"]
    info = json.loads((tmp_path / "checkpoints/step_3/training_info.json").read_text())
    assert (info["total_steps"], info["consumed_samples"], info["total_valid_tokens"]) == (3, 12, 30)
    assert (info["val:accuracy"], info["train:loss"]) == (0.9, pytest.approx(1 / 3))


def test_a_metric_that_validation_does_not_report_ranks_nothing(tmp_path: Path) -> None:
    data = Data()
    cadence = Cadence(3, val_period=2, val_at_start=True)
    session, validated = make_validated(tmp_path, cadence, data, metric_name="val:acuracy")
    with pytest.raises(ConfigError, match=r"val:acuracy is not reported .* mean 'val:accuracy'\? There are: val"):
        train(session, data)
    assert validated == [0] and data.position == 0
    for folder, name in (("train", "train:loss"), ("none", None)):
        session, _ = make_validated(tmp_path / folder, cadence, Data(), metric_name=name)
        assert train(session, Data()) == [1, 2, 3]


def test_a_second_start_goes_on_behind_the_newest_checkpoint(tmp_path: Path) -> None:
    data = Data()
    session = make_session(tmp_path, Cadence(4, save_period=2), data)
    train(session, data)
    again = Data()
    resumed, validated = make_validated(tmp_path, Cadence(6, save_period=2, val_at_start=True), again)
    assert train(resumed, again) == [5, 6]
    assert again.position == 6
    assert 0 not in validated
    assert resumed.state.consumed_samples == 24


def test_the_end_of_the_data_is_an_orderly_end_with_a_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="nemo_rl")
    data = Data(length=5)
    session = make_session(tmp_path, Cadence(9, save_period=2), data)
    with session:
        for step in session.steps():
            data.next()
            session.finish_step(step, num_prompts=4)
    assert "Stopped after step 5 of 9: the data ended after 5 batches." in caplog.text
    assert (tmp_path / "checkpoints/step_5").exists()


def test_a_good_enough_validation_ends_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="nemo_rl")
    cadence = Cadence(9, val_period=2, save_period=100, stop_metric="accuracy", stop_threshold=0.8)
    data = Data()
    session, _ = make_validated(tmp_path, cadence, data, {2: 0.5, 4: 0.85})
    assert train(session, data) == [1, 2, 3, 4]
    assert "validation accuracy=0.85 reached 0.8" in caplog.text
    assert (tmp_path / "checkpoints/step_4").exists()


def test_a_validation_without_a_graded_answer_does_not_end_the_run(tmp_path: Path) -> None:
    data = Data()
    cadence = Cadence(4, val_period=2, save_period=100, stop_metric="pass_k", stop_threshold=0.8)
    session, _ = make_validated(tmp_path, cadence, data, {2: 0.5, 4: 0.85})
    assert train(session, data) == [1, 2, 3, 4]  # its validation has `accuracy` alone


def test_an_error_in_a_step_is_not_swallowed_and_saves_nothing_new(tmp_path: Path) -> None:
    data = Data()
    session = make_session(tmp_path, Cadence(9, save_period=2), data)
    with pytest.raises(RuntimeError, match="boom"), session:
        for step in session.steps():
            if step == 4:
                raise RuntimeError("boom")
            data.next()
            session.finish_step(step, num_prompts=4)
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("step_*")) == ["step_2"]


def test_the_data_position_of_a_checkpoint_is_that_of_its_step(tmp_path: Path) -> None:
    data = Data()
    session = make_session(tmp_path, Cadence(3, save_period=1), data)
    train(session, data)
    for step in (1, 2, 3):
        state = torch.load(tmp_path / f"checkpoints/step_{step}/train_dataloader.pt")
        assert state == {"position": step}


class FailingPolicy(Policy):
    """Cannot be written at some steps."""

    def __init__(self, *failing: int, error: Exception):
        self.failing = failing
        self.error = error

    def save_checkpoint(
        self, weights_path: str, optimizer_path: str | None, tokenizer_path: str | None, consolidated: bool
    ) -> None:
        super().save_checkpoint(weights_path, optimizer_path, tokenizer_path, consolidated)
        (Path(weights_path) / "part").write_text("x")
        if int(Path(weights_path).parents[1].name.removeprefix("tmp_step_")) in self.failing:
            raise self.error


FULL = [
    OSError(28, "No space left on device"),
    CheckpointError("RuntimeError: [enforce fail] write failed; OSError: [Errno 28] No space left on device"),
]


@pytest.mark.parametrize("error", FULL)
def test_a_full_disk_does_not_end_a_run_that_saves_later(tmp_path: Path, caplog, error: Exception) -> None:
    data = Data()
    models = {"policy": FailingPolicy(4, error=error)}
    session = make_session(tmp_path, Cadence(6, save_period=2), data, models=models)
    assert train(session, data) == [1, 2, 3, 4, 5, 6]
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("*step_*")) == ["step_2", "step_6"]
    (said,) = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert f"step_4 could not be written to {tmp_path / 'checkpoints'}: no space left on device (a check" in said
    assert "step_2 is complete and stays. Training continues" in said


def test_a_run_whose_last_save_fails_ends_with_an_error(tmp_path: Path) -> None:
    data = Data()
    models = {"policy": FailingPolicy(4, error=FULL[0])}
    session = make_session(tmp_path, Cadence(4, save_period=2), data, models=models)
    with pytest.raises(CheckpointError, match="step_4 could not be written .* step_2 is complete and stays"):
        train(session, data)
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("*step_*")) == ["step_2"]


def test_what_is_no_failed_write_ends_the_run(tmp_path: Path) -> None:
    for number, error in enumerate((ZeroDivisionError("bug"), WorkerDiedError("rank 0"))):
        data = Data()
        models = {"policy": FailingPolicy(2, error=error)}
        session = make_session(tmp_path / str(number), Cadence(4, save_period=2), data, models=models)
        with pytest.raises(type(error)):
            train(session, data)


def test_a_disk_that_is_full_in_truth(tmp_path: Path, ram_disk, caplog) -> None:
    """Half a megabyte a checkpoint on a disk of one: the second does not fit, until the first is moved away."""

    class LargePolicy(Policy):
        def save_checkpoint(self, weights_path: str, *others: object) -> None:
            super().save_checkpoint(weights_path, None, None, False)
            torch.save(torch.zeros(600 << 8), Path(weights_path) / "model.pt")

    with ram_disk("size=1m") as folder:
        data = Data()
        models = {"policy": LargePolicy()}
        session = make_session(folder, Cadence(3, save_period=1), data, models=models, log_dir=tmp_path)
        with session:
            for step in session.steps():
                data.next()
                if step == 3:
                    shutil.rmtree(folder / "checkpoints/step_1")
                session.finish_step(step, num_prompts=4)
        assert [p.name for p in (folder / "checkpoints").glob("*step_*")] == ["step_3"]
    (said,) = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert re.search(r"no space left on device \(a checkpoint takes 61\d kB, 4\d\d kB are free\)", said)


def test_a_resume_without_anything_to_do_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for length, asked, reason in (
        (1000, 4, "the checkpoint is at step 4 already, and the run ends at step 4"),
        (4, 9, "the data ended after 4 batches"),
    ):
        folder = tmp_path / str(length)
        data = Data(length)
        session = make_session(folder, Cadence(asked, save_period=4), data)
        train_to_the_end(session, data)
        again = Data(length)
        session = make_session(folder, Cadence(asked, save_period=4), again)
        caplog.clear()
        train_to_the_end(session, again)
        said = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert len(said) == 1 and said[0].startswith(f"Nothing was trained: {reason}. Raise max_num_steps")


def train_to_the_end(session: Session, data: Data) -> None:
    with session:
        for step in session.steps():
            data.next()
            session.finish_step(step, num_prompts=4)


def test_a_data_position_that_would_execute_code_is_refused(tmp_path: Path) -> None:
    data = Data()
    session = make_session(tmp_path, Cadence(2, save_period=2), data)
    train(session, data)
    trace = tmp_path / "executed"
    position = tmp_path / "checkpoints/step_2/train_dataloader.pt"
    torch.save(Executes(trace), position)
    with pytest.raises(CheckpointError, match=r"train_dataloader\.pt is refused: it names posix\.mkdir"):
        make_session(tmp_path, Cadence(4, save_period=2), Data())
    assert not trace.exists()
    torch.load(position, weights_only=False)
    assert trace.exists(), "the file does execute code where it may"
    position.write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match=r"train_dataloader\.pt is refused: it is damaged"):
        make_session(tmp_path, Cadence(4, save_period=2), Data())


class Executes:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_named_validation_sets_have_a_prefix_of_their_own(tmp_path: Path) -> None:
    data = Data()
    metrics = {"loss": 1.0, "env/loss": 2.0, "validation-easy_set/loss": 3.0, "validation-hard/loss": 4.0}
    session = make_session(tmp_path, Cadence(max_num_steps=1, val_at_end=True), data, validate=lambda step: metrics)
    train(session, data)
    info = json.loads((tmp_path / "checkpoints/step_1/training_info.json").read_text())
    saved = {name: value for name, value in info.items() if name.startswith("val:")}
    assert saved == {
        "val:loss": 1.0,
        "val:env/loss": 2.0,
        "val:validation-easy_set_loss": 3.0,
        "val:validation-hard_loss": 4.0,
    }
    rows = [json.loads(line) for line in (tmp_path / "exp/metrics.jsonl").read_text().splitlines()]
    logged = {(row["prefix"], name): value for row in rows for name, value in row["metrics"].items()}
    assert logged["validation-easy_set", "loss"] == 3.0
    assert logged["validation", "env/loss"] == 2.0


def test_a_folder_to_hand_on_is_written_when_it_is_asked_for(tmp_path: Path) -> None:
    asked = []

    class Asked(Policy):
        def save_checkpoint(
            self, weights: str, optimizer: str | None, tokenizer: str | None, consolidated: bool
        ) -> None:
            asked.append(consolidated)
            super().save_checkpoint(weights, optimizer, tokenizer, consolidated)

    for steps, save_consolidated in ((2, False), (3, True)):
        data, cadence = Data(), Cadence(steps, save_period=1)
        models = {"policy": Asked()}
        train(make_session(tmp_path, cadence, data, models=models, save_consolidated=save_consolidated), data)
    assert asked == [False, False, True]


def info_of(folder: Path, step: int) -> dict[str, Any]:
    return json.loads((folder / f"checkpoints/step_{step}/training_info.json").read_text())


@pytest.mark.parametrize("save_period", [2, 5, 100])
def test_the_last_checkpoint_before_the_end_of_the_data_has_its_metrics(tmp_path: Path, save_period: int) -> None:
    data = Data(length=5)
    cadence = Cadence(9, val_period=2, val_at_end=True, save_period=save_period)
    session, validated = make_validated(tmp_path, cadence, data, {4: 0.4, 5: 0.5})
    train(session, data)
    assert validated == [2, 4, 5]
    info = info_of(tmp_path, 5)
    assert (info["val:accuracy"], info["val_reward"], info["train:loss"]) == (0.5, 0.5, pytest.approx(1 / 5))
    again = Data(length=5)
    resumed, validated = make_validated(tmp_path, cadence, again)
    assert train(resumed, again) == [] and validated == []
    assert info_of(tmp_path, 5) == info


def test_a_validation_at_the_end_of_the_data_is_saved_where_it_was_due_anyway(tmp_path: Path) -> None:
    data = Data(length=4)
    session, validated = make_validated(tmp_path, Cadence(9, val_period=2, save_period=100), data, {4: 0.4})
    train(session, data)
    assert validated == [2, 4]
    assert info_of(tmp_path, 4)["val:accuracy"] == 0.4


def idle_run(session: Session, data: Data, idle: set[int]) -> None:
    with session:
        for step in session.steps():
            data.next()
            counts = {"global_valid_seqs": 0.0, "skipped_updates": 1.0} if step in idle else {"global_valid_seqs": 4.0}
            session.record(counts, {"reward_error_rate": float(step in idle)})
            session.finish_step(step, num_prompts=4)


def test_idle_steps_in_a_row_end_the_run_and_save_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = Data()
    session = make_session(tmp_path, Cadence(20, save_period=100, max_idle_steps=3), data)
    with pytest.raises(NothingToLearnError, match=r"Step 8 .*reward_error_rate=1.* 3 of max_idle_steps=3") as error:
        idle_run(session, data, idle={2, 3, 6, 7, 8})
    assert error.value.exit_status == 1
    assert caplog.text.count("trained nothing: none of its samples counts") == 5
    assert (tmp_path / "checkpoints/step_8").exists()


def updates_of(session: Session, data: Data, counts: dict[int, float], name: str = "num_updates") -> None:
    """Steps in which everything counts, each with as many updates as given; 1 without a number."""
    with session:
        for step in session.steps():
            data.next()
            session.record({"global_valid_seqs": 4.0, name: counts.get(step, 1.0)})
            session.finish_step(step, num_prompts=4)


def test_steps_whose_gradients_are_not_finite_are_idle_too(tmp_path: Path) -> None:
    data = Data()
    session = make_session(tmp_path, Cadence(20, save_period=100, max_idle_steps=3), data)
    with pytest.raises(NonFiniteError, match=r"Step 6 .*gradients of all of its updates were not finite.* 3 of max"):
        updates_of(session, data, dict.fromkeys((1, 2, 4, 5, 6), 0.0))
    assert session.state.trained_steps == 1


def test_a_critic_that_makes_no_update_ends_the_run(tmp_path: Path) -> None:
    data = Data()
    session = make_session(tmp_path, Cadence(20, save_period=100, max_idle_steps=3), data)
    with pytest.raises(NonFiniteError, match=r"Step 6 did not train the critic.* 3 of max.*\(value.max_grad_norm\)"):
        updates_of(session, data, dict.fromkeys((1, 2, 4, 5, 6), 0.0), "critic/num_updates")
    assert session.state.trained_steps == 6


def test_a_run_that_never_made_an_update_is_no_success(tmp_path: Path) -> None:
    data = Data()
    session = make_session(tmp_path, Cadence(2, max_idle_steps=5), data)
    with pytest.raises(NothingToLearnError, match="None of the 2 steps made an update"):
        updates_of(session, data, {1: 0.0, 2: 0.0})


def test_a_run_that_goes_on_has_made_its_updates_before(tmp_path: Path) -> None:
    data = Data()
    session = make_session(tmp_path, Cadence(2), data)
    updates_of(session, data, {})
    again = Data()
    session = make_session(tmp_path, Cadence(3, max_idle_steps=5), again)
    updates_of(session, again, {3: 0.0})
    assert session.state.trained_steps == 2


def test_idle_steps_alone_leave_the_last_checkpoint_the_newest(tmp_path: Path) -> None:
    data = Data()
    session = make_session(tmp_path, Cadence(20, save_period=2, max_idle_steps=1), data)
    with pytest.raises(NothingToLearnError):
        idle_run(session, data, idle={3})
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("step_*")) == ["step_2"]


def interrupted(session: Session, data: Data, at: int, number: signal.Signals) -> None:
    with session:
        for step in session.steps():
            data.next()
            if step == at:
                os.kill(os.getpid(), number)
            session.record({"loss": 1.0 / step})
            session.finish_step(step, num_prompts=4)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_ends_the_run_behind_the_step_with_a_checkpoint(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    data = Data()
    session, validated = make_validated(tmp_path, Cadence(9, val_period=3, val_at_end=True, save_period=100), data)
    with pytest.raises(RunInterruptedError, match=f"{number.name} was received.*step 3 is complete") as error:
        interrupted(session, data, 3, number)
    assert error.value.exit_status == 75
    assert validated == [3] and "val:accuracy" in info_of(tmp_path, 3)
    assert signal.getsignal(number) is before
    again = Data()
    resumed = make_session(tmp_path, Cadence(9, save_period=100), again)
    assert train(resumed, again) == [4, 5, 6, 7, 8, 9]


def test_a_second_signal_behind_the_checkpoint_changes_no_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    data = Data()
    session = make_session(tmp_path, Cadence(9), data)
    with handlers_kept():
        leave_at_once()
        with pytest.raises(RunInterruptedError):
            interrupted(session, data, 3, signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert ended == [RunInterruptedError.exit_status]


def test_a_signal_in_the_last_step_changes_nothing(tmp_path: Path) -> None:
    data = Data()
    session = make_session(tmp_path, Cadence(3), data)
    interrupted(session, data, 3, signal.SIGTERM)
    assert (tmp_path / "checkpoints/step_3").exists()


def test_a_signal_before_any_step_is_not_called_saved(tmp_path: Path) -> None:
    data = Data()
    session = make_session(tmp_path, Cadence(9), data)
    with pytest.raises(KeyboardInterrupt), session:
        signal.raise_signal(signal.SIGINT)
        assert list(session.steps()) == []
    resumed = make_session(tmp_path, Cadence(9), data)
    interrupted(resumed, data, 9, signal.SIGINT)
    unmoved = make_session(tmp_path, Cadence(12), data)
    with pytest.raises(RunInterruptedError, match="checkpoint of step 9 is complete"), unmoved:
        signal.raise_signal(signal.SIGINT)
        assert list(unmoved.steps()) == []


def test_without_checkpoints_a_signal_is_not_deferred(tmp_path: Path) -> None:
    data = Data()
    session = make_session(tmp_path, Cadence(9), data, saves=False)
    with pytest.raises(KeyboardInterrupt):
        interrupted(session, data, 3, signal.SIGINT)
