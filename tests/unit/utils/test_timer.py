"""Timers, durations and the wall-clock limit, on a clock under the test's control."""

import pytest

from nemo_rl.utils import timer as timer_module
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.timer import TimeoutChecker, Timer, convert_to_seconds

pytestmark = pytest.mark.fast


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timer_module.time, "perf_counter", clock)
    monkeypatch.setattr(timer_module.time, "monotonic", clock)
    return clock


def test_measurements_nest_and_are_recorded_after_errors(clock):
    timer = Timer()
    with pytest.raises(RuntimeError), timer.time("step"):
        clock.now += 1
        with timer.time("generation"):
            clock.now += 2
        raise RuntimeError
    timer.start("step")
    clock.now += 5
    assert timer.stop("step") == 5
    assert timer.get_elapsed("step") == [3, 5]
    assert timer.get_latest_elapsed("generation") == 2


def test_each_reduction_equals_its_definition():
    timer = Timer()
    for seconds in (1.0, 2.0, 6.0):
        timer.record("a", seconds)
    timer.record("b", 4.0)
    expected = {"mean": 3, "median": 2, "min": 1, "max": 6, "sum": 9, "count": 3}
    assert {name: timer.reduce("a", name) for name in expected} == expected
    assert timer.reduce("a", "std") == pytest.approx((14 / 3) ** 0.5)
    assert timer.get_timing_metrics("sum") == {"a": 9, "b": 4}
    assert timer.get_timing_metrics({"a": "max"}) == {"a": 6, "b": 4}
    timer.reset("a")
    assert timer.get_timing_metrics() == {"b": 4}
    timer.reset()
    assert timer.get_timing_metrics() == {}


def test_misuse_is_refused_by_name():
    timer = Timer()
    timer.start("a")
    with pytest.raises(ValueError, match="'a' is running already"):
        timer.start("a")
    with pytest.raises(ValueError, match="'b' is not running"):
        timer.stop("b")
    with pytest.raises(KeyError, match="Nothing was measured as 'b'"):
        timer.get_elapsed("b")
    timer.stop("a")
    with pytest.raises(ValueError, match="'average'.*mean"):
        timer.reduce("a", "average")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("00:00:00:00", 0), ("00:03:45:00", 13500), ("01:02:03:04", 93784), ("10:00:00:01", 864001)],
)
def test_durations_are_converted_to_seconds(text, seconds):
    assert convert_to_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "1:2:3", "00:00:00:00:00", "aa:00:00:00", "-1:00:00:00", "00:00:00:1.5"])
def test_malformed_durations_are_refused(text):
    with pytest.raises(ConfigError, match="DD:HH:MM:SS"):
        convert_to_seconds(text)


def test_the_timeout_is_reached_after_its_duration(clock):
    checker = TimeoutChecker("00:00:01:00")
    clock.now += 59
    assert not checker.check_save()
    clock.now += 1
    assert checker.check_save()
    assert not TimeoutChecker(None).check_save()


def test_the_timeout_leaves_time_for_one_more_iteration(clock):
    checker = TimeoutChecker("00:00:01:00", fit_last_save_time=True)
    checker.start_iterations()
    for seconds in (10, 20, 12):
        clock.now += seconds
        checker.mark_iteration()
    assert not checker.check_save()
    clock.now += 4
    assert checker.check_save()
