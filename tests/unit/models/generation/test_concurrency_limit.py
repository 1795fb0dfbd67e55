"""The number of running requests that fits a key-value cache, without an engine."""

import pytest

from nemo_rl.models.generation.vllm.concurrency import ConcurrencyLimit

pytestmark = pytest.mark.fast


def step(limit, num_preemptions=0, num_running=0, num_ended=0, usage=0.0):
    limit.note_step(num_preemptions=num_preemptions, num_running=num_running, num_ended=num_ended, usage=usage)
    return limit.limit


def make(most, fell_to=None):
    limit = ConcurrencyLimit(most)
    if fell_to is not None:
        step(limit, num_preemptions=most, num_running=fell_to)
    return limit


def test_without_preemptions_the_limit_never_changes():
    limit = make(64)
    assert {step(limit, num_running=n, num_ended=8, usage=1.0) for n in range(65)} == {64}


def test_the_limit_falls_to_what_still_runs_and_never_below_one():
    limit = make(64)
    assert step(limit, num_preemptions=6, num_running=20) == 20
    assert step(limit, num_preemptions=11, num_running=40) == 20
    assert step(limit, num_preemptions=1, num_running=0) == 1


def test_a_few_preemptions_are_tolerated():
    """With a limit of 20: more than 5 before 20 requests have ended lower it, more than 2 keep it."""
    limit = make(64, fell_to=20)
    assert [step(limit, num_preemptions=1, num_running=20) for _ in range(5)] == [20] * 5
    assert step(limit, num_preemptions=1, num_running=18) == 18
    limit = make(64, fell_to=20)
    step(limit, num_preemptions=3, num_running=20)
    assert step(limit, num_running=10, num_ended=20, usage=0.5) == 20
    step(limit, num_preemptions=2, num_running=20)
    assert step(limit, num_running=10, num_ended=20, usage=1.0) == 21


@pytest.mark.parametrize(("usage", "rises_to"), [(1.0, 21), (0.9, 21), (0.75, 24), (0.5, 36), (0.2, 40)])
def test_the_limit_rises_as_far_as_the_cache_had_room(usage, rises_to):
    limit = make(64, fell_to=20)
    assert step(limit, num_running=18, num_ended=2, usage=usage) == 20
    assert step(limit, num_running=2, num_ended=18, usage=0.1) == rises_to


def test_rare_preemptions_do_not_add_up():
    limit = make(64)
    for _ in range(100):
        assert step(limit, num_preemptions=1, num_running=20) == 64
        assert [step(limit, num_running=18, num_ended=2) for _ in range(12)] == [64] * 12


def test_steps_with_fewer_requests_than_allowed_say_nothing():
    limit = make(64, fell_to=20)
    for _ in range(100):
        assert step(limit, num_running=18, num_ended=1, usage=0.1) == 20


def test_the_limit_comes_back_to_the_largest_value():
    limit = make(64, fell_to=1)
    seen = [step(limit, num_running=limit.limit - 1, num_ended=limit.limit, usage=0.1) for _ in range(8)]
    assert seen[:6] == [2, 4, 8, 16, 32, 64] and seen[-1] == 64
