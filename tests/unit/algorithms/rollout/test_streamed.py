"""The groups of a step are divided into parts for streaming."""

import asyncio
import queue
import random
import threading
import time
from collections.abc import Callable

import pytest

from nemo_rl.algorithms.rollout.source import Group
from nemo_rl.algorithms.rollout.streamed import Arrivals
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.rollouts import Collection
from nemo_rl.experience.trajectory import Trajectory

pytestmark = pytest.mark.fast


def parts_of(groups: list[Group], groups_per_part: int, *, in_order: bool) -> list[list[tuple[int, int]]]:
    arrivals, parts = Arrivals(groups_per_part, in_order=in_order), []
    for group in groups:
        arrivals.add(group)
        parts += arrivals.parts()
    parts += arrivals.last_parts()
    return [[group.order for group in part] for part in parts]


def test_parts_in_order_do_not_depend_on_which_groups_finish_first() -> None:
    for seed in range(20):
        groups = [Group((0, row), [], trains=row != 3) for row in range(10)]
        random.Random(seed).shuffle(groups)
        assert parts_of(groups, 4, in_order=True) == [
            [(0, 0), (0, 1), (0, 2), (0, 4)],
            [(0, 5), (0, 6), (0, 7), (0, 8)],
            [(0, 9)],
        ]


def test_a_part_in_order_is_complete_as_soon_as_its_own_groups_are_finished() -> None:
    arrivals = Arrivals(2, in_order=True)
    for row in (3, 1):
        arrivals.add(Group((0, row), []))
        assert list(arrivals.parts()) == []
    arrivals.add(Group((0, 0), []))
    assert [[group.order for group in part] for part in arrivals.parts()] == [[(0, 0), (0, 1)]]
    arrivals.add(Group((0, 2), []))
    assert [[group.order for group in part] for part in arrivals.parts()] == [[(0, 2), (0, 3)]]
    assert list(arrivals.last_parts()) == []


def test_the_next_round_follows_the_last_group_of_a_round() -> None:
    groups = [Group((round_index, row), []) for round_index in range(2) for row in range(3)]
    assert parts_of(groups, 2, in_order=True) == [[(0, 0), (0, 1)], [(0, 2), (1, 0)], [(1, 1), (1, 2)]]


def test_parts_without_order_have_the_groups_that_finish_first() -> None:
    groups = [Group((0, row), []) for row in (4, 2, 0, 1, 3)]
    assert parts_of(groups, 2, in_order=False) == [[(0, 4), (0, 2)], [(0, 0), (0, 1)], [(0, 3)]]


def test_a_part_without_order_has_all_groups_that_are_finished() -> None:
    finished = [(4, False), (2, True), (0, True), (1, False), (3, True)]
    groups = [Group((0, row), [], has_next=has_next) for row, has_next in finished]
    assert parts_of(groups, 2, in_order=False) == [[(0, 4), (0, 2), (0, 0), (0, 1)], [(0, 3)]]
    assert len(parts_of(groups, 2, in_order=True)) == 3, "parts in order must not depend on time"


def test_a_collection_tells_whether_the_next_group_is_finished() -> None:
    loop, may_end, waiting = EventLoopThread(), threading.Event(), queue.SimpleQueue[list[Trajectory]]()

    async def play(give: Callable[[list[Trajectory]], None]) -> dict[str, float]:
        give([])
        give([])
        await asyncio.to_thread(may_end.wait, 10)
        give([])
        return {"a": 1.0}

    try:
        collection = Collection(loop.stream(play, 20, "The test", items=waiting), waiting)
        groups = iter(collection)
        next(groups)
        while not collection.has_next:
            time.sleep(0.01)
        next(groups)
        assert not collection.has_next
        may_end.set()
        assert list(groups) == [[]] and collection.metrics == {"a": 1.0}
    finally:
        loop.close()


def test_rounds_that_interleave_are_refused_before_their_gradients_depend_on_time() -> None:
    arrivals = Arrivals(1, in_order=True)
    arrivals.add(Group((0, 0), []))
    arrivals.add(Group((1, 0), []))
    with pytest.raises(ValueError, match=r"gave the group \(0, 1\) .* Rounds must not interleave: give all groups"):
        arrivals.add(Group((0, 1), []))
    assert parts_of([Group((1, 0), []), Group((0, 1), [])], 1, in_order=False) == [[(1, 0)], [(0, 1)]]


def test_groups_after_a_missing_number_wait_for_the_end() -> None:
    groups = [Group((0, row), []) for row in (4, 0, 3, 1)]
    assert parts_of(groups, 2, in_order=True) == [[(0, 0), (0, 1)], [(0, 3), (0, 4)]]
