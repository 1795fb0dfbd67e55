"""The sockets between the processes of one engine, without an engine."""

import asyncio
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ray._private.async_compat import get_new_event_loop

from nemo_rl.models.generation import ranks as meetings
from nemo_rl.models.generation.ranks import CallOutcome, Link, Meeting, RankCall, open_link, open_links
from nemo_rl.utils.errors import GenerationError

FORK = multiprocessing.get_context("fork")
PLACES = {
    "one machine": ((0, 0, 0), "127.0.0.1"),
    "three machines": ((0, 1, 2), "127.0.0.1"),
    "IPv6": ((0, 1, 2), "::1"),
}
"""Machines of the ranks, and the address of the first one."""


def meeting(port: int, rank: int, machines: tuple[int, ...]) -> Meeting:
    return Meeting(dist.TCPStore("127.0.0.1", port, is_master=False), rank, machines)


def _serve(port: int, rank: int, machines: tuple[int, ...]) -> None:
    """Serve as a rank that answers with its number and its input, or fails on request."""
    link = open_link(meeting(port, rank, machines), "ranks", 0)
    while True:
        call: RankCall = link.receive()
        if call.method == "fail":
            link.send(CallOutcome(None, "it broke"))
        elif call.wants_answer:
            link.send(CallOutcome((rank, *call.args)))


@pytest.fixture(params=list(PLACES))
def ranks(request: pytest.FixtureRequest) -> Iterator[tuple[list[Link], list[Any]]]:
    machines, address = PLACES[request.param]
    if ":" in address:
        try:
            socket.create_server((address, 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this machine has no IPv6")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [FORK.Process(target=_serve, args=(store.port, rank, machines), daemon=True) for rank in (2, 1)]
    for process in processes:
        process.start()
    yield open_links(Meeting(store, 0, machines, address), "ranks", (1, 2)), processes[::-1]
    for process in processes:
        process.kill()
        process.join()


def ask(link: Link, value: Any, wants_answer: bool = True) -> Any:
    return link.call(RankCall("echo", (value,), {}, wants_answer))


def test_links_follow_rank_order_and_answers_follow_call_order(ranks) -> None:
    links, _ = ranks
    first, second = [ask(link, torch.ones(2)) for link in links]
    later = [ask(link, "later") for link in links]
    assert ask(links[0], "silent", wants_answer=False) is None
    assert [answer.result() for answer in later] == [(1, "later"), (2, "later")]
    assert first.done() and second.done()
    assert second.result()[0] == 2 and torch.equal(second.result()[1], torch.ones(2))


def test_a_failure_that_vllm_ignores_is_raised_by_the_next_answer(ranks) -> None:
    (link, _), _ = ranks
    broken = link.call(RankCall("fail", (), {}, True))
    later = ask(link, 1)
    with pytest.raises(RuntimeError, match="Worker 1 failed:\nit broke"):
        later.result()
    assert isinstance(broken.exception(0), RuntimeError)
    link.call(RankCall("fail", (), {}, False))
    assert later.result() == (1, 1)
    with pytest.raises(RuntimeError, match="it broke"):
        link.end_if_alone(5.0)


def _answer_from_loop(port: int, machines: tuple[int, ...]) -> None:
    """Serve as rank 1 of a run: on the loop that Ray gives its actors."""

    async def serve() -> None:
        link = open_link(meeting(port, 1, machines), "ranks", 0)
        link.when_it_brings(asyncio.get_running_loop(), lambda: link.send(CallOutcome(link.receive().args)))
        await asyncio.Event().wait()

    get_new_event_loop().run_until_complete(serve())


@pytest.mark.parametrize("machines", [(0, 0), (0, 1)])
def test_a_long_message_arrives_whole_at_a_rank_on_rays_loop(machines: tuple[int, ...]) -> None:
    """The message is longer than the socket's buffer; both ends fill it before the other one reads."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    process = FORK.Process(target=_answer_from_loop, args=(store.port, machines), daemon=True)
    process.start()
    (link,) = open_links(Meeting(store, 0, machines), "ranks", (1,))
    ours, theirs = FORK.Pipe()
    asker = FORK.Process(target=lambda: theirs.send([len(*ask(link, bytes(1 << n)).result()) for n in (14, 15, 24)]))
    asker.start()
    asker.join(20)
    assert asker.exitcode == 0, "it ended because rank 1 was gone"
    assert ours.recv() == [1 << 14, 1 << 15, 1 << 24]
    process.kill()
    process.join()


def _run_without_peer(links: list[Link], pipe: Connection, how: str) -> None:
    """Run worker 0 while rank 1 is gone; the pipe reports whether it continued."""
    if how == "breaks on its own":
        links[0].end_if_alone(5.0)
    else:
        ask(links[0], 1).result()
    pipe.send("lives")


@pytest.mark.parametrize("how", ["calls", "breaks on its own"])
def test_a_process_exits_when_its_peer_is_gone(ranks, how: str) -> None:
    links, processes = ranks
    os.kill(processes[0].pid, signal.SIGKILL)
    processes[0].join(10)
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=_run_without_peer, args=(links, theirs, how), daemon=True)
    process.start()
    process.join(10)
    assert (process.exitcode, ours.poll(0)) == (1, False)


def test_small_calls_to_another_machine_are_sent_at_once(ranks) -> None:
    """A call without an answer is followed by another one; a delayed receipt of the first would take 40 ms each."""
    (link, _), _ = ranks
    started = time.perf_counter()
    for _ in range(50):
        ask(link, 1, wants_answer=False)
        ask(link, 1).result()
    assert time.perf_counter() - started < 1.0


def test_a_meeting_knows_who_is_on_its_machine() -> None:
    store = dist.HashStore()
    four = [Meeting(store, place, (0, 0, 2, 2)) for place in range(4)]
    assert [meeting.local_place for meeting in four] == [0, 1, 0, 1]
    assert [meeting.machine for meeting in four] == [0, 0, 2, 2]
    assert four[2].is_near((2, 3)) and not four[2].is_near((1, 3))


def test_a_process_that_has_used_a_gpu_cannot_join_an_engine(monkeypatch) -> None:
    """It would not see the other GPUs that it is shown, and vLLM would fail with a rank that is out of range."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(meetings, "open_store", lambda *_: dist.HashStore())
    monkeypatch.setattr(meetings, "_shared", lambda store, name, place, count, own: (own,) * count)
    monkeypatch.setattr(meetings, "gpu_is_in_use", lambda: True)
    with pytest.raises(GenerationError, match="Process 1 of an engine has used a GPU before it met the others"):
        meetings.enter_engine.__wrapped__("cuda", 1, 2)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
