"""Checkpoints written in the background: when they count, when their failures show, and what a kill leaves."""

import multiprocessing
import os
import signal
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
from run_parts import Data, make_session, train

from nemo_rl.algorithms.runtime.session import Cadence
from nemo_rl.config import CheckpointingConfig
from nemo_rl.host.boundary import in_background
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.errors import CheckpointError

pytestmark = pytest.mark.fast

WAIT_S = 20.0


class Slow:
    """A model that writes a file in the background when it is allowed to."""

    def __init__(self, *failing: int):
        self.failing = failing
        self.may_write = threading.Event()
        self.writing: Future[None] | None = None
        self.weights = 0

    def save_checkpoint(self, weights: str, optimizer: str, tokenizer: str, consolidated: bool, *, background: bool):
        assert background and self.writing is None, "one at a time"
        copy, folder = self.weights, Path(weights)
        folder.mkdir(parents=True)

        def write() -> None:
            assert self.may_write.wait(WAIT_S)
            if int(folder.parents[1].name.removeprefix("tmp_step_")) in self.failing:
                raise CheckpointError("No space left on device")
            (folder / "weights.txt").write_text(str(copy))

        self.writing = in_background(write, "test")

    def checkpoint_is_written(self) -> bool:
        return self.writing is None or self.writing.done()

    def finalize_async_save(self) -> None:
        writing, self.writing = self.writing, None
        if writing is not None:
            writing.result(WAIT_S)


def start(folder: Path, steps: int, model: Slow, save_period: int = 2):
    data = Data()
    cadence = Cadence(steps, save_period=save_period)
    return make_session(folder, cadence, data, models={"policy": model}, is_async=True), data


def saved(folder: Path) -> dict[str, str]:
    return {path.parts[-4]: path.read_text() for path in folder.glob("checkpoints/*step_*/policy/weights/weights.txt")}


def test_steps_go_on_and_a_checkpoint_counts_when_it_is_complete(tmp_path: Path) -> None:
    model = Slow()
    session, data = start(tmp_path, 5, model)
    seen = []
    with session:
        for step in session.steps():
            data.next()
            model.weights = step
            if step == 4:
                model.may_write.set()
                model.writing.exception(WAIT_S)
            session.finish_step(step, num_prompts=1)
            seen.append(sorted(path.name for path in (tmp_path / "checkpoints").glob("*step_*")))
    assert seen[:4] == [[], ["tmp_step_2"], ["tmp_step_2"], ["step_2", "tmp_step_4"]]
    assert saved(tmp_path) == {"step_2": "2", "step_4": "4", "step_5": "5"}, "what the weights were at the save"
    manager = CheckpointManager(CheckpointingConfig.build(checkpoint_dir=str(tmp_path / "checkpoints")))
    assert manager.find_resumable() == tmp_path / "checkpoints/step_5"


def test_the_next_save_waits_for_the_one_before(tmp_path: Path) -> None:
    model = Slow()
    session, data = start(tmp_path, 3, model, save_period=1)
    threading.Timer(0.3, model.may_write.set).start()
    train(session, data)
    assert sorted(saved(tmp_path)) == ["step_1", "step_2", "step_3"]


def test_a_failed_write_is_an_error_at_the_next_step(tmp_path: Path, caplog) -> None:
    model = Slow(2)
    model.may_write.set()
    session, data = start(tmp_path, 4, model)
    with session:
        for step in session.steps():
            data.next()
            if step == 3:
                model.writing.exception(WAIT_S)
                assert not [record for record in caplog.records if record.levelname == "ERROR"]
            session.finish_step(step, num_prompts=1)
            if step == 3:
                (said,) = [record.message for record in caplog.records if record.levelname == "ERROR"]
                assert "step_2 could not be written" in said and "Training continues" in said
                assert not list((tmp_path / "checkpoints").glob("*step_*")), "the partial folder is gone"
    assert list(saved(tmp_path)) == ["step_4"]


def test_a_failed_write_of_the_last_step_ends_the_run_with_an_error(tmp_path: Path) -> None:
    model = Slow(3, 4)
    model.may_write.set()
    session, data = start(tmp_path, 4, model)
    with pytest.raises(CheckpointError, match="step_4 could not be written"):
        train(session, data)
    assert list(saved(tmp_path)) == ["step_2"]


def test_an_error_in_a_later_step_does_not_lose_what_is_being_written(tmp_path: Path) -> None:
    model = Slow()
    session, data = start(tmp_path, 9, model)
    with pytest.raises(ZeroDivisionError), session:
        for step in session.steps():
            data.next()
            if step == 3:
                threading.Timer(0.2, model.may_write.set).start()
                raise ZeroDivisionError
            session.finish_step(step, num_prompts=1)
    assert list(saved(tmp_path)) == ["step_2"]


def _train_until_killed(folder: Path, pipe) -> None:
    model = Slow()
    session, data = start(folder, 9, model, save_period=1)
    with session:
        for step in session.steps():
            data.next()
            model.weights = step
            model.may_write.set() if step == 1 else None
            session.finish_step(step, num_prompts=1)
            if step == 1:
                model.writing.exception(WAIT_S)
                model.may_write = threading.Event()
            else:
                (folder / f"checkpoints/tmp_step_{step}/policy/weights/part").write_text("half")
                pipe.send("writing")
                threading.Event().wait(WAIT_S)


def test_a_kill_during_the_write_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    run = context.Process(target=_train_until_killed, args=(tmp_path, theirs))
    run.start()
    assert ours.poll(WAIT_S) and ours.recv() == "writing"
    os.kill(run.pid, signal.SIGKILL)
    run.join()
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.glob("*step_*")) == ["step_1", "tmp_step_2"]
    manager = CheckpointManager(CheckpointingConfig.build(checkpoint_dir=str(folder)))
    assert manager.find_resumable() == folder / "step_1"
    assert sorted(path.name for path in folder.glob("*step_*")) == ["step_1"]
    assert saved(tmp_path) == {"step_1": "1"}
