"""Requests are spread over engines, and failed engines are replaced; workers are fakes.

The fakes answer like Ray: a call returns an awaitable, a dead actor's awaitable raises `RayActorError`.
"""

import asyncio
import concurrent.futures
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayActorError, RayTaskError

from nemo_rl.distributed.workers.calls import MultiWorkerFuture
from nemo_rl.models.generation.engine_group import EngineGroup
from nemo_rl.models.generation.engine_load import EngineLoad
from nemo_rl.models.generation.interfaces import (
    Collected,
    GenerationRequest,
    GenerationResult,
    ResponseSoFar,
    SamplingParams,
    ServedBy,
    VersionSpan,
)
from nemo_rl.utils.errors import DeadlineExceededError, GenerationError, ResourceInsufficientError, WorkerDiedError

pytestmark = pytest.mark.asyncio


class FakeWorker:
    """The actor of one engine; it answers a request when the test asks for it, or immediately."""

    def __init__(self, answers_at_once: bool):
        self.answers_at_once = answers_at_once
        self.submissions: list[list[str]] = []
        self.held: dict[str, GenerationRequest] = {}
        self.is_dead = False
        self.hangs = False
        self.activity = ("S", 0.0)
        self.collect_failure: Exception | None = None
        self.submit_failure: Exception | None = None
        self.aborted: list[str] = []
        self.asked: list[list[str]] = []
        self.load: EngineLoad | None = None
        self._finished: list[tuple[str, GenerationResult]] = []
        self._changed = asyncio.Event()

    async def submit(self, requests: list[tuple[str, GenerationRequest]]) -> None:
        self._check_alive()
        if self.submit_failure is not None:
            raise self.submit_failure
        self.submissions.append([request_id for request_id, _ in requests])
        assert not self.held.keys() & dict(requests).keys(), "a request was submitted twice"
        self.held.update(requests)
        if self.answers_at_once:
            self.answer(*self.held)

    async def abort(self, request_ids: list[str]) -> None:
        self._check_alive()
        self.aborted += request_ids
        for request_id in request_ids:
            self.held.pop(request_id, None)
            self._finished.append((request_id, GenerationResult([], [], "abort", [])))
        self._changed.set()

    async def responses_so_far(self, request_ids: list[str]) -> dict[str, ResponseSoFar]:
        self._check_alive()
        self.asked.append(list(request_ids))
        return {
            request_id: ResponseSoFar(
                np.array(self.held[request_id].prompt_token_ids), np.zeros(1), [VersionSpan(0, 3)]
            )
            for request_id in request_ids
            if request_id in self.held
        }

    async def collect(self, poll_s: float) -> Collected:
        while self.hangs or not self._finished:
            self._check_alive()
            if self.collect_failure is not None:
                raise self.collect_failure
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), None if self.hangs else poll_s)
            except TimeoutError:
                return Collected([], self.load)
        results, self._finished = self._finished, []
        return Collected(results, self.load)

    async def ready(self) -> int:
        self._check_alive()
        return 0

    def answer(self, *request_ids: str) -> None:
        for request_id in request_ids:
            request = self.held.pop(request_id)
            error = "too long" if request.prompt_token_ids == [0] else None
            tokens = [] if error else [token + 1000 for token in request.prompt_token_ids]
            self._finished.append((request_id, GenerationResult(tokens, [], "stop", [], error)))
        self._changed.set()

    def die(self) -> None:
        self.is_dead = True
        self._changed.set()

    def fail(self, failure: Exception) -> None:
        self.collect_failure = failure
        self._changed.set()

    def _check_alive(self) -> None:
        if self.is_dead:
            raise RayActorError()


class FakeCall:
    """A running call; like Ray's reference it can be awaited more than once, and survives a cancelled waiter."""

    def __init__(self, call: Any):
        self._task = asyncio.ensure_future(call)

    def __await__(self) -> Any:
        return asyncio.shield(self._task).__await__()


class FakeGroup:
    """A fake with the part of `RayWorkerGroup` that an `EngineGroup` uses."""

    def __init__(self, num_engines: int, answers_at_once: bool = False):
        self.workers = [FakeWorker(answers_at_once) for _ in range(num_engines)]
        self.restarted: list[list[int]] = []
        self.restart_gate = threading.Event()
        self.restart_gate.set()
        self.is_shut_down = False
        self.deaths_at_start = 0
        self._loop = asyncio.get_running_loop()

    def run_single_worker_single_data(self, method: str, index: int, *args: Any) -> Any:
        call = getattr(self.workers[index], method)(*args)
        if threading.current_thread() is threading.main_thread():
            return FakeCall(call)
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def get_all_worker_results(self, calls: MultiWorkerFuture, timeout_s: float, phase: str) -> list[Any]:
        """Wait for all results as the group does: the first failure ends the wait."""
        by_ref = dict(zip(calls.futures, calls.called_workers or [], strict=True))
        done, _ = concurrent.futures.wait(by_ref, timeout_s, return_when=concurrent.futures.FIRST_EXCEPTION)
        assert done, "no answer in time"
        try:
            return [ref.result(0) for ref in sorted(by_ref, key=lambda ref: ref not in done or not ref.exception())]
        except RayActorError as death:
            index = next(by_ref[ref] for ref in done if ref.exception() is death)
            raise self.explain_failure(death, index, phase) from death

    def explain_failure(self, error: Exception, index: int, phase: str) -> Exception:
        return WorkerDiedError(f"worker {index} died during {phase}: {error}")

    def activity(self, indices: list[int]) -> list[tuple[str, float]]:
        return [self.workers[index].activity for index in indices]

    def stacks(self, indices: list[int]) -> str:
        return f"stacks of {indices}"

    def slot(self, index: int) -> str:
        return f"engine-{index} (pid 17)"

    def shutdown(self, force: bool) -> None:
        self.is_shut_down = True
        for worker in self.workers:
            worker.die()

    def restart_workers(self, indices: list[int], timeout_s: float) -> None:
        assert self.restart_gate.wait(5)
        if self.is_shut_down:
            raise WorkerDiedError("the group has been shut down")
        self.restarted.append(list(indices))
        if self.deaths_at_start > 0:
            self.deaths_at_start -= 1
            raise WorkerDiedError("worker 0 died during 'engine setup'")
        for index in indices:
            self.workers[index] = FakeWorker(answers_at_once=True)


def request(token: int) -> GenerationRequest:
    return GenerationRequest([token], SamplingParams(), seed=token)


def make_group(
    num_engines: int, max_restarts: int = 3, answers_at_once: bool = False, **options: float
) -> tuple[EngineGroup, FakeGroup]:
    fake: Any = FakeGroup(num_engines, answers_at_once)
    return EngineGroup(fake, setup_timeout_s=5.0, max_restarts=max_restarts, **options), fake  # type: ignore[arg-type]


def start(group: EngineGroup, tokens: list[int]) -> list[asyncio.Task[GenerationResult]]:
    return [asyncio.create_task(group.generate(request(token))) for token in tokens]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def wait_for(condition: Any) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


def make_impatient(num_engines: int, silence_s: float, size: int = 1) -> tuple[EngineGroup, FakeGroup]:
    fake = FakeGroup(num_engines * size)
    group = EngineGroup(fake, 5.0, 3, workers_per_engine=size, silence_s=silence_s)  # type: ignore[arg-type]
    return group, fake


@pytest.mark.parametrize("num_engines", [1, 2])
async def test_an_engine_that_hangs_is_replaced_and_its_requests_are_answered(
    num_engines: int, caplog: pytest.LogCaptureFixture
) -> None:
    group, fake = make_impatient(num_engines, silence_s=0.4)
    tasks = start(group, [1, 2, 3, 4])
    await settle()
    fake.workers[0].hangs, fake.workers[0].activity = True, ("T", 3.0)
    if num_engines == 2:
        fake.workers[1].answer(*fake.workers[1].held)
    answers = await asyncio.wait_for(asyncio.gather(*tasks), 5)
    assert [answer.token_ids for answer in answers] == [[1001], [1002], [1003], [1004]]
    assert (fake.restarted, group.num_restarts) == ([[0]], 1)
    assert "Generation engine 0 hangs. Worker engine-0 (pid 17) has given no sign of life" in caplog.text
    assert "engine_silence_s=0.4), its process is stopped (SIGSTOP); " in caplog.text
    assert f"{4 // num_engines} requests open (prompts of 1 to 1 tokens)" in caplog.text
    assert "stacks of [0]" in caplog.text


async def test_one_hung_rank_replaces_its_engine() -> None:
    """The first worker of the engine keeps answering that it has nothing."""
    group, fake = make_impatient(1, silence_s=0.3, size=2)
    (task,) = start(group, [1])
    await settle()
    fake.workers[1].hangs = True
    assert (await asyncio.wait_for(task, 5)).token_ids == [1001]
    assert fake.restarted == [[0, 1]]


async def test_a_long_generation_is_not_treated_as_a_hang() -> None:
    """The engine answers its polls although no request is finished."""
    group, fake = make_impatient(1, silence_s=0.2)
    (task,) = start(group, [1])
    await asyncio.sleep(1.0)
    fake.workers[0].answer(*fake.workers[0].held)
    assert (await task).token_ids == [1001]
    assert fake.restarted == []


@pytest.mark.parametrize(("state", "seconds", "is_replaced"), [("R", 0.6, False), ("R", 2.0, True), ("T", 0.6, True)])
async def test_a_busy_engine_gets_a_longer_deadline(
    state: str, seconds: float, is_replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of many seconds blocks the engine's loop."""
    group, fake = make_impatient(1, silence_s=0.3)
    (task,) = start(group, [1])
    await settle()
    worker, started = fake.workers[0], time.monotonic()
    worker.hangs = True
    monkeypatch.setattr(fake, "activity", lambda indices: [(state, time.monotonic() - started)])
    await asyncio.sleep(seconds)
    if not is_replaced:
        worker.hangs = False
        worker.answer(*worker.held)
    assert (await asyncio.wait_for(task, 5)).token_ids == [1001]
    assert bool(fake.restarted) is is_replaced


async def test_the_timeout_error_lists_engines_with_open_requests() -> None:
    group, fake = make_group(2)
    start(group, [1, 2, 3])
    await settle()
    fake.workers[1].answer(*fake.workers[1].held)
    await settle()
    assert group.describe_open() == "Generation engine 0 has 2 requests open: engine-0 (pid 17)\nstacks of [0]"


async def test_responses_so_far_come_from_the_engines_that_write_them() -> None:
    group, fake = make_group(2)
    requests = [request(token) for token in (11, 12, 13, 14)]
    tasks = [asyncio.create_task(group.generate(each)) for each in requests]
    await settle()
    fake.workers[0].answer(*list(fake.workers[0].held)[:1])  # on its way while the engines are asked
    found = await group.responses_so_far([*requests, request(12)])
    tokens = [None if part is None else part.token_ids.tolist() for part in found]
    answered = tasks.index(next(task for task in tasks if task.done()))
    assert tokens == [*(None if i == answered else [11 + i] for i in range(4)), None]
    assert [len(worker.asked) for worker in fake.workers] == [1, 1]
    fake.workers[1].is_dead = True
    found = await group.responses_so_far(requests)
    assert sorted(len(part) for part in found if part is not None) == [0, 0, 1]
    for task in tasks:
        task.cancel()


async def test_results_reach_their_callers_in_any_order():
    group, fake = make_group(2)
    tasks = start(group, [10, 11, 12, 13])
    await settle()
    for worker in fake.workers:
        for request_id in list(worker.held)[::-1]:
            worker.answer(request_id)
            await settle()
    assert [(await task).token_ids for task in tasks] == [[1010], [1011], [1012], [1013]]


async def test_requests_of_one_tick_are_sent_in_one_call_per_engine():
    group, fake = make_group(3)
    start(group, list(range(1, 9)))
    await settle()
    assert [[len(call) for call in worker.submissions] for worker in fake.workers] == [[3], [3], [2]]


async def test_the_least_busy_engine_is_chosen():
    group, fake = make_group(2)
    start(group, [1, 2, 3, 4])
    await settle()
    first, second = fake.workers
    second.answer(*second.held)
    await settle()
    start(group, [5, 6])
    await settle()
    assert (len(first.held), len(second.held)) == (2, 2)


async def test_a_refused_request_raises_and_the_others_continue():
    group, _ = make_group(1, answers_at_once=True)
    refused, served = start(group, [0, 7])
    with pytest.raises(GenerationError, match="too long"):
        await refused
    assert (await served).token_ids == [1007]


async def test_an_engine_failure_reaches_all_its_waiting_callers():
    group, fake = make_group(2)
    tasks = start(group, [1, 2, 3])
    await settle()
    fake.workers[0].fail(ValueError("the engine broke"))
    fake.workers[1].answer(*fake.workers[1].held)
    for task in (tasks[0], tasks[2]):
        with pytest.raises(ValueError, match="the engine broke"):
            await asyncio.wait_for(task, 5)
    assert (await tasks[1]).token_ids == [1002]


async def test_an_exception_of_a_worker_is_explained():
    group, fake = make_group(1)
    (task,) = start(group, [1])
    await settle()
    fake.workers[0].fail(RayTaskError("collect", "the traceback over there", ValueError("no memory")))
    with pytest.raises(WorkerDiedError, match=r"worker 0 died during generation: (.|\n)*the traceback over there"):
        await asyncio.wait_for(task, 5)


async def test_a_failed_submission_raises_instead_of_waiting():
    group, fake = make_group(1)
    fake.workers[0].submit_failure = TypeError("cannot take this")
    (task,) = start(group, [1])
    with pytest.raises(TypeError, match="cannot take this"):
        await asyncio.wait_for(task, 2)


async def test_a_dead_engine_is_replaced_and_its_requests_are_resubmitted():
    group, fake = make_group(2)
    loaded = []
    group.load_weights = lambda: loaded.append(len(fake.restarted))
    tasks = start(group, [1, 2, 3, 4])
    await settle()
    done_before = next(iter(fake.workers[0].held))
    fake.workers[0].answer(done_before)
    await settle()
    fake.workers[0].die()
    fake.workers[1].answer(*fake.workers[1].held)
    results = await asyncio.wait_for(asyncio.gather(*tasks), 5)
    assert [result.token_ids for result in results] == [[1001], [1002], [1003], [1004]]
    assert (fake.restarted, loaded, group.num_restarts) == ([[0]], [1], 1)
    assert [len(call) for call in fake.workers[0].submissions] == [1], "only what was unfinished"


def moves_weights(group: EngineGroup, fake: FakeGroup, took_part: list[int]) -> None:
    """Act like a sync: it needs all engines, and replaces the dead ones."""

    def sync() -> None:
        for index, worker in enumerate(fake.workers):
            if worker.is_dead:
                raise WorkerDiedError(f"engine {index} died")
        took_part.append(len(fake.workers))

    group.with_replacements(sync)


async def test_engines_that_die_together_are_each_replaced_once():
    group, fake = make_group(3, max_restarts=3)
    syncs: list[int] = []
    group.load_weights = lambda: moves_weights(group, fake, syncs)
    tasks = start(group, [1, 2, 3, 4, 5, 6])
    await settle()
    for worker in list(fake.workers):
        worker.die()
    results = await asyncio.wait_for(asyncio.gather(*tasks), 10)
    assert [result.token_ids for result in results] == [[1000 + token] for token in (1, 2, 3, 4, 5, 6)]
    assert (sorted(fake.restarted), group.num_restarts, syncs) == ([[0], [1], [2]], 3, [3])


async def test_the_training_thread_and_a_revival_do_not_replace_the_same_engine():
    group, fake = make_group(2)
    syncs: list[int] = []
    group.load_weights = lambda: moves_weights(group, fake, syncs)
    (task,) = start(group, [1])
    await settle()
    fake.restart_gate.clear()
    fake.workers[0].die()
    await wait_for(lambda: group.num_restarts == 1)
    training = asyncio.create_task(asyncio.to_thread(moves_weights, group, fake, syncs))
    await asyncio.sleep(0.2)
    assert not training.done(), "a sync may not begin while an engine is being replaced"
    fake.restart_gate.set()
    await asyncio.wait_for(training, 5)
    assert (await asyncio.wait_for(task, 5)).token_ids == [1001]
    assert (fake.restarted, group.num_restarts, syncs) == ([[0]], 1, [2, 2])


async def test_a_wait_for_another_threads_replacement_has_a_deadline():
    group, _ = make_group(1, turn_timeout_s=0.1)
    with group.exclusively(), group.exclusively():
        started = time.monotonic()
        with pytest.raises(DeadlineExceededError, match="more than 0.1 s"):
            await asyncio.to_thread(group.with_replacements, lambda: None)
        assert time.monotonic() - started < 30


async def test_a_death_of_another_worker_is_raised_to_the_caller():
    group, _ = make_group(2)

    def policy_died() -> None:
        raise WorkerDiedError("rank 0 died")

    with pytest.raises(WorkerDiedError, match="rank 0 died"):
        await asyncio.to_thread(group.with_replacements, policy_died)
    assert group.num_restarts == 0


async def test_requests_made_while_an_engine_is_down_are_submitted_once():
    """With one engine there is no other to use: they wait for the new one."""
    group, fake = make_group(1)
    tasks = start(group, [1, 2])
    await settle()
    fake.restart_gate.clear()
    fake.workers[0].die()
    await settle()
    tasks += start(group, [3, 4])
    await settle()
    fake.restart_gate.set()
    results = await asyncio.wait_for(asyncio.gather(*tasks), 5)
    assert [result.token_ids for result in results] == [[1001], [1002], [1003], [1004]]
    assert [len(call) for call in fake.workers[0].submissions] == [4]


async def test_requests_prefer_running_engines_while_one_is_down():
    group, fake = make_group(2)
    first = start(group, [1, 2, 3])
    await settle()
    fake.restart_gate.clear()
    fake.workers[0].die()
    await settle()
    later = start(group, [4, 5, 6])
    await settle()
    assert len(fake.workers[1].held) == 4
    fake.restart_gate.set()
    fake.workers[1].answer(*fake.workers[1].held)
    await asyncio.wait_for(asyncio.gather(*first, *later), 5)


async def test_the_number_of_restarts_is_limited():
    group, fake = make_group(1, max_restarts=1)
    for expected_restarts in (1, 2):
        fake.workers[0].answers_at_once = False
        (task,) = start(group, [1])
        await settle()
        fake.workers[0].die()
        if expected_restarts == 1:
            assert (await asyncio.wait_for(task, 5)).token_ids == [1001]
        else:
            with pytest.raises(WorkerDiedError, match="max_actor_restarts=1 restarts are used up"):
                await asyncio.wait_for(task, 5)
    assert fake.restarted == [[0]]
    with pytest.raises(WorkerDiedError):
        await asyncio.wait_for(start(group, [2])[0], 5)


@pytest.mark.parametrize("deaths", [1, 2, 3])
async def test_an_engine_that_dies_while_it_starts_again_is_started_at_most_three_times(deaths: int) -> None:
    group, fake = make_group(1, max_restarts=10)
    (task,) = start(group, [1])
    await settle()
    fake.deaths_at_start = deaths
    fake.workers[0].die()
    if deaths < 3:
        assert (await asyncio.wait_for(task, 5)).token_ids == [1001]
        assert group.num_restarts == deaths + 1
    else:
        with pytest.raises(WorkerDiedError, match="died during 'engine setup'"):
            await asyncio.wait_for(task, 5)
    assert len(fake.restarted) == min(deaths + 1, 3)


async def test_requests_without_a_waiting_caller_are_aborted_in_the_engine():
    group, fake = make_group(1)
    gone, stays = start(group, [1, 2])
    await settle()
    (first, second) = fake.workers[0].held
    gone.cancel()
    await settle()
    assert (fake.workers[0].aborted, list(fake.workers[0].held)) == ([first], [second])
    fake.workers[0].answer(second)
    assert (await asyncio.wait_for(stays, 2)).token_ids == [1002]
    await wait_for(lambda: not group._members[0].unfinished)


async def test_requests_aborted_while_an_engine_is_down_are_not_resubmitted():
    group, fake = make_group(1)
    gone, stays = start(group, [1, 2])
    await settle()
    fake.restart_gate.clear()
    fake.workers[0].die()
    await settle()
    unsent, later = start(group, [3, 4])
    await settle()
    gone.cancel()
    unsent.cancel()
    await settle()
    fake.restart_gate.set()
    assert [(await asyncio.wait_for(task, 5)).token_ids for task in (stays, later)] == [[1002], [1004]]
    assert ([len(call) for call in fake.workers[0].submissions], fake.workers[0].aborted) == ([2], [])


async def test_shutdown_revives_nothing_and_fails_all_waiting_callers():
    group, fake = make_group(2)
    waiting = start(group, [1, 2])
    await settle()
    group.shutdown()
    for task in (*waiting, *start(group, [3])):
        with pytest.raises(WorkerDiedError, match="have been shut down"):
            await asyncio.wait_for(task, 5)
    assert (fake.restarted, group.num_restarts) == ([], 0)


async def test_an_engine_of_several_workers_is_called_at_its_first_and_replaced_as_a_whole():
    fake = FakeGroup(4)
    group = EngineGroup(fake, 5.0, 3, workers_per_engine=2)  # type: ignore[arg-type]
    tasks = start(group, [1, 2, 3])
    await settle()
    assert [len(worker.held) for worker in fake.workers] == [2, 0, 1, 0]
    assert group.of_engines(["a", "b", "c", "d"]) == ["a", "c"]
    fake.workers[2].die()
    fake.workers[0].answer(*fake.workers[0].held)
    results = await asyncio.wait_for(asyncio.gather(*tasks), 5)
    assert [result.token_ids for result in results] == [[1001], [1002], [1003]]
    assert (fake.restarted, group.num_restarts) == ([[2, 3]], 1)
    fake.workers[1].die()
    assert await asyncio.to_thread(group.revive_dead) == 1
    assert fake.restarted == [[2, 3], [0, 1]]


async def test_the_death_of_any_worker_is_noticed_while_its_engine_generates():
    fake = FakeGroup(4)
    group = EngineGroup(fake, 5.0, 3, workers_per_engine=2)  # type: ignore[arg-type]
    tasks = start(group, [1, 2, 3])
    await settle()
    fake.workers[0].answer(next(iter(fake.workers[0].held)))
    await settle()
    fake.workers[1].die()
    fake.workers[2].answer(*fake.workers[2].held)
    results = await asyncio.wait_for(asyncio.gather(*tasks), 2)
    assert [result.token_ids for result in results] == [[1001], [1002], [1003]]
    assert (fake.restarted, group.num_restarts) == ([[0, 1]], 1)
    fake.workers[2].answers_at_once = True
    later = await asyncio.wait_for(asyncio.gather(*start(group, [4, 5, 6])), 2)
    assert [result.token_ids for result in later] == [[1004], [1005], [1006]]
    assert group.num_restarts == 1
    fake.workers[1].die()
    assert await asyncio.to_thread(group.revive_dead) == 1
    fake.workers[0].answers_at_once = False
    (last,) = start(group, [7])
    await asyncio.sleep(0.05)
    fake.workers[0].answer(*fake.workers[0].held)
    assert ((await asyncio.wait_for(last, 2)).token_ids, group.num_restarts) == ([1007], 2)
    assert [len(call) for call in fake.workers[0].submissions] == [1], "what died was replaced before this request"


async def test_no_wait_is_left_on_the_loop_when_nothing_is_pending():
    fake = FakeGroup(2, answers_at_once=True)
    group = EngineGroup(fake, 5.0, 3, workers_per_engine=2)  # type: ignore[arg-type]
    before = asyncio.all_tasks()
    for token in (1, 2):
        await asyncio.wait_for(group.generate(request(token)), 2)
        await settle()
    left = asyncio.all_tasks() - before
    assert [task for task in left if task.get_coro().__qualname__ != "FakeWorker.collect"] == []
    assert len(left) == 1, "the call of the second worker goes on, and is waited for again"


async def test_an_engine_without_free_resources_is_reported_with_what_the_nodes_have(monkeypatch):
    group, fake = make_group(1)

    def no_room(*_: object) -> None:
        raise ResourceInsufficientError("no other node has room")

    monkeypatch.setattr(fake, "restart_workers", no_room)
    (task,) = start(group, [1])
    await settle()
    fake.workers[0].die()
    with pytest.raises(ResourceInsufficientError, match=r"(?s)died.*no other node has room"):
        await asyncio.wait_for(task, 5)


@pytest.mark.parametrize("problem", ["weights", "restarts"])
async def test_a_failed_revival_fails_all_present_and_later_callers(problem):
    group, fake = make_group(2, max_restarts=0 if problem == "restarts" else 3)

    def no_weights() -> None:
        raise DeadlineExceededError("the policy is busy")

    group.load_weights = no_weights
    tasks = start(group, [1, 2, 3])
    await settle()
    fake.workers[0].die()
    await wait_for(lambda: all(task.done() for task in tasks))
    (later,) = start(group, [4])
    for task in (*tasks, later):
        with pytest.raises((DeadlineExceededError, WorkerDiedError), match="policy is busy|restarts are used up"):
            await asyncio.wait_for(task, 1)
    assert not any(member.unfinished for member in group._members)
    assert len(fake.restarted) == (problem == "weights")


async def test_engines_that_could_not_get_weights_work_again_when_they_are_reopened() -> None:
    group, fake = make_group(2)

    def no_weights() -> None:
        raise WorkerDiedError("the policy has ended")

    group.load_weights = no_weights
    (task,) = start(group, [1])
    await settle()
    fake.workers[0].die()
    with pytest.raises(WorkerDiedError, match="the policy has ended"):
        await asyncio.wait_for(task, 5)
    fake.workers[1].die()
    await asyncio.to_thread(group.reopen)
    assert fake.restarted == [[0], [1]], "the engine that died meanwhile is replaced, too"
    later = await asyncio.wait_for(asyncio.gather(*start(group, [4, 5])), 5)
    assert sorted(result.served_by.engine for result in later if result.served_by) == [0, 1]


async def test_an_engine_that_is_stopped_at_a_deadline_is_replaced_and_the_work_repeated() -> None:
    group, fake = make_group(2)
    fake.workers[1].activity = ("T", 0.0)
    attempts: list[int] = []

    def work() -> str:
        attempts.append(len(fake.restarted))
        if not fake.restarted:
            raise DeadlineExceededError("the weight sync took too long")
        return "synced"

    assert await asyncio.to_thread(group.with_replacements, work) == "synced"
    assert (attempts, fake.restarted) == ([0, 1], [[1]])

    def late() -> None:
        raise DeadlineExceededError("the policy is late")

    with pytest.raises(DeadlineExceededError, match="the policy is late"):
        await asyncio.to_thread(group.with_replacements, late)


async def test_a_shutdown_ends_a_revival_and_fails_its_waiting_callers():
    group, fake = make_group(1)
    (task,) = start(group, [1])
    await settle()
    fake.restart_gate.clear()
    fake.workers[0].die()
    await wait_for(lambda: group.num_restarts == 1)
    ending = asyncio.create_task(asyncio.to_thread(group.shutdown))
    with pytest.raises(WorkerDiedError, match="have been shut down"):
        await asyncio.wait_for(task, 2)
    await wait_for(lambda: fake.is_shut_down)
    assert not ending.done(), "nothing is replaced after a shutdown"
    fake.restart_gate.set()
    await asyncio.wait_for(ending, 2)
    assert fake.restarted == []


def later_turn(token: int, previous: GenerationResult) -> GenerationRequest:
    return GenerationRequest([token], SamplingParams(), seed=token, prefix_at=previous.served_by)


async def test_a_later_turn_goes_to_the_engine_that_wrote_the_previous_one() -> None:
    group, fake = make_group(2)
    tasks = start(group, [1, 2, 3])  # engines 0, 1, 0
    await settle()
    fake.workers[1].answer(*fake.workers[1].held)
    fake.workers[0].answer(next(iter(fake.workers[0].held)))
    first, second = await tasks[0], await tasks[1]
    assert (first.served_by, second.served_by) == (ServedBy(0, 1, 0), ServedBy(1, 1, 0))
    again = asyncio.create_task(group.generate(later_turn(4, first)))
    await settle()
    assert [request.prompt_token_ids for request in fake.workers[0].held.values()] == [[3], [4]]
    assert not fake.workers[1].held, "engine 1 is idle, and would have been taken for a first turn"
    fake.workers[0].answer(*fake.workers[0].held)
    assert (await again).served_by == first.served_by


async def test_a_later_turn_leaves_the_engine_of_its_prefix_if_it_is_much_busier() -> None:
    group, fake = make_group(2)
    many = start(group, list(range(1, 19)))  # nine at each engine
    await settle()
    fake.workers[1].answer(*fake.workers[1].held)
    (_, other, *_) = await asyncio.gather(*many[1::2])
    assert [len(worker.held) for worker in fake.workers] == [9, 0]
    tasks = [asyncio.create_task(group.generate(later_turn(50, replace(other, served_by=ServedBy(0, 1, 0)))))]
    await settle()
    assert [len(worker.held) for worker in fake.workers] == [9, 1], "nine more than the least busy one are too many"
    tasks += [asyncio.create_task(group.generate(later_turn(51, replace(other, served_by=ServedBy(0, 1, 0)))))]
    await settle()
    assert [len(worker.held) for worker in fake.workers] == [10, 1], "eight more are not"
    for worker in fake.workers:
        worker.answer(*worker.held)
    await asyncio.gather(*tasks, *many[::2])


@pytest.mark.parametrize("lost", ["weights", "engine"])
async def test_a_later_turn_ignores_the_engine_of_a_lost_prefix(lost: str) -> None:
    """New weights empty the cache, and a new engine has an empty one."""
    group, fake = make_group(2)
    tasks = start(group, [1, 2])
    await settle()
    if lost == "engine":
        fake.workers[1].die()
        await asyncio.wait_for(tasks[1], 5)
        previous = ServedBy(1, 1, 0)
    else:
        fake.workers[1].answer(*fake.workers[1].held)
        previous = (await tasks[1]).served_by
        group.weight_version = 1
    fake.workers[0].answer(*fake.workers[0].held)
    await tasks[0]
    fake.workers[1].answers_at_once = True
    fake.workers[0].answers_at_once = True
    again = await group.generate(GenerationRequest([3], SamplingParams(), seed=3, prefix_at=previous))
    assert again.served_by == ServedBy(0, 1, group.weight_version)


async def test_a_replaced_engine_is_named_with_its_new_number() -> None:
    group, fake = make_group(1)
    (task,) = start(group, [1])
    await settle()
    fake.workers[0].die()
    assert (await asyncio.wait_for(task, 5)).served_by == ServedBy(0, 2, 0)


async def test_the_version_of_a_response_is_that_of_its_last_tokens() -> None:
    group, fake = make_group(1)
    (task,) = start(group, [1])
    await settle()
    (request_id,) = fake.workers[0].held
    spans = [VersionSpan(0, 3), VersionSpan(2, 4)]
    fake.workers[0]._finished.append((request_id, GenerationResult([7, 7, 7], [], "stop", spans)))
    fake.workers[0]._changed.set()
    assert (await task).served_by == ServedBy(0, 1, 4)


async def test_the_loads_of_all_engines_are_added_up_until_they_are_asked_for() -> None:
    group, fake = make_group(2)
    assert group.load_metrics() == {}
    fake.workers[0].load, fake.workers[1].load = EngineLoad(3, 0.5, 8), EngineLoad(1, 0.9, 16)
    tasks = start(group, [1, 2, 3, 4])
    await settle()
    for worker in fake.workers:
        worker.answer(*list(worker.held)[:1])
        await settle()
        worker.answer(*worker.held)
    await asyncio.gather(*tasks)
    assert group.load_metrics() == {"num_preemptions": 8.0, "kv_cache_usage": 0.9, "max_running_requests": 8.0}
    assert group.load_metrics() == {}
