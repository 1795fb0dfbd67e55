"""Validations that run while training goes on: each is logged once, under its step, also after a kill."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from run_parts import Data, make_session, train

from nemo_rl.algorithms.runtime.session import Cadence, Session
from nemo_rl.algorithms.runtime.validations import ValidationResult, in_one_line
from nemo_rl.files.manifest import find_damage, replace_file, write_manifest
from nemo_rl.utils.errors import GenerationError, RunInterruptedError

pytestmark = pytest.mark.fast


def test_a_validation_is_one_line() -> None:
    whole = {"accuracy": 0.5, "avg_length": 8.0, "num_reward_errors": 0.0, "truncation_rate": 0.0}
    assert in_one_line({"math/accuracy": 0.5, **whole}) == "accuracy=0.5  avg_length=8"
    assert in_one_line({"a/accuracy": 0.25, "b/accuracy": 0.75, **whole, "truncation_rate": 0.5}) == (
        "accuracy=0.5  avg_length=8  truncation_rate=0.5  a/accuracy=0.25  b/accuracy=0.75"
    )
    many = {f"env/number_{index}": index / 3 for index in range(30)}
    line = in_one_line(many | whole)
    assert line.startswith("accuracy=0.5") and line.endswith("  ...") and len(line) < 120


class Slow:
    """A validation that is finished after some looks at it, or when it is waited for."""

    def __init__(self, looks: int = 1000, failure: Exception | None = None):
        self.looks = looks
        self.failure = failure
        self.events: list[str] = []
        self.step: int | None = None
        self.left = 0

    def start(self, step: int) -> None:
        assert self.step is None, "one validation at a time"
        self.events.append(f"start {step}")
        self.step, self.left = step, self.looks

    def finished(self, *, wait: bool) -> ValidationResult | None:
        if self.step is None:
            return None
        if self.left and not wait:
            self.left -= 1
            return None
        step, self.step = self.step, None
        self.events.append(f"{'waited for' if self.left else 'finished'} {step}")
        if self.failure is not None:
            raise self.failure
        return ValidationResult(step, {"accuracy": step / 10}, seconds=3.0, waited_s=0.5)

    def cancel(self) -> None:
        self.events.append(f"cancelled {self.step}")
        self.step = None


def start(folder: Path, slow: Slow, steps: int, data: Data | None = None, **keys: Any) -> tuple[Session, Data]:
    data = data or Data()
    return make_session(folder, Cadence(steps, **keys), data, validation=slow), data


def info_of(folder: Path, step: int) -> dict[str, Any]:
    checkpoint = folder / f"checkpoints/step_{step}"
    assert find_damage(checkpoint) == []
    return json.loads((checkpoint / "training_info.json").read_text())


def logged(folder: Path) -> list[tuple[int, str]]:
    rows = [json.loads(line) for line in (folder / "exp/metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["prefix"]) for row in rows]


def test_training_goes_on_and_the_metrics_are_those_of_the_step_that_was_validated(tmp_path: Path) -> None:
    slow = Slow(looks=3)
    session, data = start(tmp_path, slow, 9, val_period=4, save_period=4)
    assert train(session, data) == list(range(1, 10))
    # The first look is at the start. The last checkpoint waits for the validation of an earlier step.
    assert slow.events == ["start 4", "finished 4", "start 8", "waited for 8"]
    order = logged(tmp_path)
    assert order.index((6, "train")) < order.index((4, "validation")) < order.index((7, "train"))
    assert [info_of(tmp_path, step)["val:accuracy"] for step in (4, 8)] == [0.4, 0.8]
    assert [info_of(tmp_path, step)["validating_step"] for step in (4, 8, 9)] == [0, 0, 0]
    assert "val:accuracy" not in info_of(tmp_path, 9)
    assert info_of(tmp_path, 9)["val_reward"] == 0.8
    rows = [json.loads(line) for line in (tmp_path / "exp/metrics.jsonl").read_text().splitlines()]
    (seconds,) = [row["metrics"] for row in rows if (row["step"], row["prefix"]) == (4, "timing/validation")]
    assert seconds == {"total_validation_time": 3.0, "exposed_validation_time": 0.5}


def test_the_next_validation_and_the_checkpoint_of_a_later_step_wait(tmp_path: Path) -> None:
    slow = Slow()
    session, data = start(tmp_path, slow, 6, val_at_start=True, val_period=2, save_period=3)
    train(session, data)
    expected = ["start 0", "waited for 0", "start 2", "waited for 2", "start 4", "waited for 4", "start 6"]
    assert slow.events == [*expected, "waited for 6"]
    order = logged(tmp_path)
    assert order.index((2, "validation")) < order.index((3, "train")), "the checkpoint of step 3 waits"
    assert info_of(tmp_path, 6)["val:accuracy"] == 0.6


def test_a_killed_run_repeats_the_validation_that_its_checkpoint_lacks(tmp_path: Path) -> None:
    slow = Slow()
    session, data = start(tmp_path, slow, 9, val_period=4, save_period=4)
    with pytest.raises(KeyboardInterrupt), session:
        for step in session.steps():
            if step == 6:
                raise KeyboardInterrupt  # ends the session without a save, as SIGKILL does
            data.next()
            session.finish_step(step, num_prompts=4)
    assert slow.events == ["start 4"]
    assert info_of(tmp_path, 4)["validating_step"] == 4
    again = Slow()
    resumed, data = start(tmp_path, again, 7, val_period=4, save_period=4)
    assert train(resumed, data) == [5, 6, 7]
    assert again.events == ["start 4", "waited for 4"]
    assert info_of(tmp_path, 4)["val:accuracy"] == 0.4
    third = Slow()
    resumed, data = start(tmp_path, third, 8, save_period=4)
    train(resumed, data)
    assert third.events == []


def test_a_signal_waits_for_no_validation_and_the_resumed_run_repeats_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slow = Slow()
    session, data = start(tmp_path, slow, 9, val_period=4, save_period=100)
    with pytest.raises(RunInterruptedError), session:
        for step in session.steps():
            data.next()
            if step == 4:
                os.kill(os.getpid(), 15)
            session.finish_step(step, num_prompts=4)
    assert slow.events == ["start 4", "cancelled 4"]
    assert "validation after step 4 is given up, because the run has to end. The same command repeats it" in caplog.text
    again = Slow()
    resumed, data = start(tmp_path, again, 5, save_period=100)
    train(resumed, data)
    assert again.events == ["start 4", "waited for 4"]


def test_a_validation_that_may_end_the_run_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="nemo_rl")
    slow = Slow()
    keys = {"val_period": 2, "save_period": 100, "stop_metric": "accuracy", "stop_threshold": 0.4}
    session, data = start(tmp_path, slow, 9, **keys)
    assert train(session, data) == [1, 2, 3, 4]
    assert slow.events == ["start 2", "waited for 2", "start 4", "waited for 4"]
    assert info_of(tmp_path, 4)["val:accuracy"] == 0.4


def test_the_failure_of_a_validation_ends_the_run(tmp_path: Path) -> None:
    slow = Slow(looks=2, failure=GenerationError("the engine is broken"))
    session, data = start(tmp_path, slow, 9, val_period=2)
    with pytest.raises(GenerationError, match="the engine is broken"):
        train(session, data)
    assert data.position == 4


def test_the_end_of_the_data_waits_for_the_validation(tmp_path: Path) -> None:
    slow = Slow()
    session, data = start(tmp_path, slow, 9, Data(length=5), val_period=4, val_at_end=True, save_period=100)
    train(session, data)
    assert slow.events == ["start 4", "waited for 4", "start 5", "waited for 5"]
    assert info_of(tmp_path, 5)["val:accuracy"] == 0.5


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_crash_while_a_file_is_replaced_leaves_an_undamaged_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    for name in ("info.json", "weights"):
        (tmp_path / name).write_text(f"old {name}")
    write_manifest(tmp_path)
    replace, calls = os.replace, []

    def crash(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == failing:
            raise OSError("crash")
        replace(source, target)

    with monkeypatch.context() as patches:
        patches.setattr(os, "replace", crash)
        with pytest.raises(OSError, match="crash"):
            replace_file(tmp_path, "info.json", "new")
    assert find_damage(tmp_path) == []
    assert (tmp_path / "info.json").read_text() == ("new" if failing == 3 else "old info.json")
    replace_file(tmp_path, "info.json", "newest")
    assert find_damage(tmp_path) == []
    (tmp_path / "info.json").write_text("other!")
    assert find_damage(tmp_path) == ["info.json has other content than was written (checksum)"]
