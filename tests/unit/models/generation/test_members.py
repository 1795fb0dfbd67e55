"""Which engine gets a request."""

import asyncio
from collections import Counter

import numpy as np
import pytest

from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult, SamplingParams, ServedBy
from nemo_rl.models.generation.members import Member, Pending, choose

pytestmark = pytest.mark.fast


def send(members: list[Member], count: int) -> Counter[int]:
    """Send requests without answers; return how many each engine got."""
    given: Counter[int] = Counter()
    for number in range(count):
        member = choose(members, None, 1)
        member.unfinished[f"{number}"] = Pending(
            GenerationRequest([1], SamplingParams(), 0), asyncio.Future(loop=asyncio.new_event_loop())
        )
        given[member.index] += 1
    return given


def with_speeds(*seconds_per_token: float | None) -> list[Member]:
    members = [Member(index) for index in range(len(seconds_per_token))]
    for member, seconds in zip(members, seconds_per_token, strict=True):
        if seconds is not None:
            member.speed.note(seconds * 500, 500)
    return members


@pytest.mark.parametrize(
    ("speeds", "shares"),
    [
        ((None, None), [32, 32]),
        ((0.01, 0.014), [32, 32]),
        ((0.01, None), [32, 32]),
        ((0.01, 0.03), [48, 16]),
        ((0.04, 0.01, 0.01), [7, 29, 28]),
    ],
)
def test_a_slow_engine_gets_fewer_requests(speeds: tuple[float | None, ...], shares: list[int]) -> None:
    given = send(with_speeds(*speeds), 64)
    assert [given[index] for index in range(len(speeds))] == shares


def test_an_engine_that_is_down_gets_none() -> None:
    members = with_speeds(0.01, 0.5, 0.01)
    members[0].is_down = members[2].is_down = True
    assert send(members, 8) == {1: 8}


def test_an_engine_that_is_fast_again_gets_its_share_back() -> None:
    members = with_speeds(0.01, 0.1)
    for _ in range(150):
        members[1].speed.note(5.0, 500)
    assert send(members, 64) == {0: 32, 1: 32}


def test_the_speed_counts_from_the_request_to_the_answer() -> None:
    loop = asyncio.new_event_loop()
    member = Member(0)
    member.unfinished["a"] = Pending(GenerationRequest([1], SamplingParams(), 0), loop.create_future(), since=10.0)
    member.answer("a", GenerationResult(np.zeros(300, np.int32), np.zeros(300, np.float32), "stop", []), now=13.0)
    member.answer("unknown", GenerationResult.refused("too long"), now=99.0)
    assert member.speed.seconds_per_token == pytest.approx(0.01)


def test_a_prefix_is_read_where_it_is_unless_that_engine_is_gone_or_busy() -> None:
    members = [Member(0), Member(2)]
    assert choose(members, ServedBy(2, 1, 5), 5).index == 2
    assert choose(members, ServedBy(2, 2, 5), 5).index == 0
    assert choose(members, ServedBy(2, 1, 4), 5).index == 0
    assert choose(members, ServedBy(1, 1, 5), 5).index == 0
    send([members[1]], 9)
    assert choose(members, ServedBy(2, 1, 5), 5).index == 0
