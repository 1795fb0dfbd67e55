"""Validations that run on the event loop while the caller continues."""

import asyncio
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from rollout_parts import LetterTokenizer, ScriptedEngine, ScriptedEnvironment, graded, prompts

from nemo_rl.algorithms.rollout.validation import BackgroundValidation, ValidationReport, Validator, overlapped
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.rollouts import RolloutLimits, RolloutRunner
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.utils.errors import DeadlineExceededError

pytestmark = pytest.mark.fast


class Gated(ScriptedEngine):
    """Answers when the gate is open; with `shuts`, an answer shuts it."""

    def __init__(self) -> None:
        super().__init__(lambda request: [97 + request.seed % 26, 0])
        self.gate = threading.Event()
        self.shuts = False
        self.num_answers = 0

    async def generate(self, request: Any) -> Any:
        while not self.gate.is_set():
            await asyncio.sleep(0.005)
        result = await super().generate(request)
        if self.shuts:
            self.gate.clear()
        self.num_answers += 1
        return result


class Parts:
    """A validation of two batches, with the part of the run that it talks to."""

    def __init__(self, loop: EventLoopThread, choice: str, timeout_s: float = 20.0):
        self.engine = Gated()
        environment = ScriptedEnvironment(lambda log, meta: graded(float(ord(log[-1]["content"][0]) % 2)))
        limits = RolloutLimits(max_sequence_length=64, max_turns=1, timeout_s=timeout_s)
        self.runner = RolloutRunner(self.engine, {"game": environment}, LetterTokenizer(), limits, loop)  # type: ignore[arg-type]
        self.written: list[tuple[int, list[Trajectory]]] = []
        log = SimpleNamespace(write_validation=lambda step, samples: self.written.append((step, samples)))
        self.refitter = SimpleNamespace(before_update=[], ensure_fresh=lambda: None)
        sampling = SamplingParams(max_new_tokens=8, stop_token_ids=(0,))
        validator = Validator([prompts("a", "b", "c"), prompts("d", "e")], self.runner, sampling, 2, run_seed=5)
        report = ValidationReport(log, num_printed=0)  # type: ignore[arg-type]
        self.validation = overlapped(choice, validator, report, self.refitter)  # type: ignore[arg-type]

    def update(self, version: int) -> None:
        """Give the engine new weights, as a `Refitter` does."""
        for wait in self.refitter.before_update:
            wait()
        self.engine.weight_version = version


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    thread = EventLoopThread()
    yield thread
    thread.close()


def told(samples: list[Trajectory]) -> list[Any]:
    return [(t.group_index, t.sample_index, t.idx, t.response_text, t.reward) for t in samples]


def test_the_samples_are_those_of_a_validation_that_stops_training(loop: EventLoopThread) -> None:
    results = {}
    for choice in ("stop", "hold_updates", "through_updates"):
        parts = Parts(loop, choice)
        parts.engine.gate.set()
        parts.validation.start(4)
        result = parts.validation.finished(wait=True)
        assert result is not None and result.step == 4
        assert parts.validation.finished(wait=True) is None, "a result is given once"
        ((step, samples),) = parts.written
        assert step == 4
        results[choice] = told(samples), {k: v for k, v in result.metrics.items() if "weight_version" not in k}
    assert results["stop"] == results["hold_updates"] == results["through_updates"]
    samples, metrics = results["stop"]
    assert [row[:3] for row in samples[::2]] == [(0, 0, 100), (1, 0, 101), (2, 0, 102), (3, 0, 100), (4, 0, 101)]
    assert metrics["num_samples"] == 10


def test_updates_wait_for_a_validation_of_one_version(loop: EventLoopThread) -> None:
    parts = Parts(loop, "hold_updates")
    parts.validation.start(4)
    assert parts.validation.finished(wait=False) is None
    parts.runner.wait_for_groups()  # as for a checkpoint, which does not wait for the validation
    threading.Timer(0.3, parts.engine.gate.set).start()
    started = time.perf_counter()
    parts.update(8)
    held_s = time.perf_counter() - started
    assert held_s > 0.25
    result = parts.validation.finished(wait=False)
    assert result is not None
    assert (result.metrics["min_weight_version"], result.metrics["max_weight_version"]) == (7, 7)
    assert 0.25 < result.waited_s <= held_s and result.seconds >= result.waited_s


def test_a_validation_through_updates_says_which_versions_it_has_measured(loop: EventLoopThread) -> None:
    parts = Parts(loop, "through_updates")
    parts.engine.shuts = True
    parts.engine.gate.set()
    parts.validation.start(4)
    while not parts.engine.num_answers:
        time.sleep(0.01)
    parts.update(9)
    parts.engine.shuts = False
    parts.engine.gate.set()
    result = parts.validation.finished(wait=True)
    assert result is not None
    assert (result.metrics["min_weight_version"], result.metrics["max_weight_version"]) == (7, 9)


def test_training_does_not_wait_and_a_result_is_waited_for_only_on_request(loop: EventLoopThread) -> None:
    parts = Parts(loop, "through_updates")
    parts.validation.start(4)
    parts.update(8)
    assert parts.validation.finished(wait=False) is None
    threading.Timer(0.2, parts.engine.gate.set).start()
    result = parts.validation.finished(wait=True)
    assert result is not None and result.waited_s > 0.1


def test_a_validation_has_a_deadline_and_its_failure_is_raised_where_its_result_is_asked_for(
    loop: EventLoopThread,
) -> None:
    parts = Parts(loop, "hold_updates", timeout_s=0.2)
    parts.validation.start(4)
    parts.update(8)
    message = r"rollouts of validation step 0 did not finish within 0\.2 s \(cluster.timeouts.rollout_s\)"
    with pytest.raises(DeadlineExceededError, match=message) as error:
        parts.validation.finished(wait=False)
    assert error.value.__notes__ == ["Raised by the validation after step 4."]


def test_a_cancelled_validation_leaves_nothing_behind(loop: EventLoopThread) -> None:
    parts = Parts(loop, "hold_updates")
    assert isinstance(parts.validation, BackgroundValidation)
    parts.validation.start(4)
    parts.validation.cancel()
    parts.update(8)
    assert parts.validation.finished(wait=True) is None and not parts.written
    parts.engine.gate.set()
    parts.validation.start(6)
    result = parts.validation.finished(wait=True)
    assert result is not None and result.metrics["min_weight_version"] == 8
