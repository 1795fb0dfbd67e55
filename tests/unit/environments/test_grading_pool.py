import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from processes_for_tests import children, wait_until_gone

from nemo_rl.environments.grading.pool import GradingPool
from nemo_rl.utils.errors import WorkerDiedError

OBEDIENT = "verifiers_for_tests.obedient"


@pytest.fixture
def pool():
    pool = GradingPool(OBEDIENT, num_workers=2, timeout_s=0.5)
    yield pool
    pool.close()


def test_outcomes_keep_the_order_and_only_bad_answers_carry_errors(pool):
    grades = pool.grade([("4", "4"), ("sleep 60", "4"), ("5", "4"), ("raise why", "4"), ("exit 3", "4"), ("4", "4")])
    rewards = [grade.verified.reward if grade.verified else None for grade in grades]
    assert rewards == [1.0, None, 0.0, None, None, 1.0]
    assert "longer than 0.5 s" in grades[1].error
    assert "KeyError: 'why'" in grades[3].error
    assert "died (status 3) grading (verifier " in grades[4].error
    assert "processes that died grading this answer: 3)" in grades[4].error


def test_an_answer_stuck_inside_one_c_call_is_killed_on_time(pool):
    pool.grade([("4", "4")])
    started = time.monotonic()
    (grade,) = pool.grade([("spin", "1")])
    assert grade.verified is None and "longer than" in grade.error
    assert time.monotonic() - started < 20.0, "the call takes minutes"
    assert pool.grade([("4", "4")])[0].verified.reward == 1.0


def test_an_answer_whose_process_was_killed_is_tried_again(pool):
    first = int(pool.grade([("pid", "")])[0].verified.extracted_answer)
    killer = threading.Timer(0.1, os.kill, (first, signal.SIGKILL))
    killer.start()
    (grade,) = pool.grade([("sleep 0.4", "sleep 0.4")])
    assert grade.verified.reward == 1.0
    second = int(pool.grade([("pid", "")])[0].verified.extracted_answer)
    assert second != first


def test_an_answer_whose_process_was_stopped_is_tried_again(pool):
    first = int(pool.grade([("pid", "")])[0].verified.extracted_answer)
    os.kill(first, signal.SIGSTOP)
    (grade,) = pool.grade([("4", "4")])
    assert grade.verified.reward == 1.0
    assert int(pool.grade([("pid", "")])[0].verified.extracted_answer) != first
    assert wait_until_gone([first]) == []


def test_a_process_killed_while_idle_affects_no_answer(pool):
    os.kill(int(pool.grade([("pid", "")])[0].verified.extracted_answer), signal.SIGKILL)
    assert [grade.verified.reward for grade in pool.grade([("4", "4")] * 3)] == [1.0, 1.0, 1.0]


def test_an_answer_that_kills_every_process_lets_the_others_go_first():
    pool = GradingPool(OBEDIENT, num_workers=1, timeout_s=5.0)
    done = []
    try:
        waiters = [
            threading.Thread(target=lambda r=r: done.append((r, pool.grade([(r, r)])[0]))) for r in ("exit 3", "4", "5")
        ]
        for waiter in waiters:
            waiter.start()
            time.sleep(0.02)
        for waiter in waiters:
            waiter.join(timeout=30.0)
    finally:
        pool.close()
    assert sorted(response for response, _ in done[:2]) == ["4", "5"] and done[2][0] == "exit 3"
    assert [grade.verified.reward if grade.verified else None for _, grade in done] == [1.0, 1.0, None]


@pytest.mark.parametrize("response", ["print 1", "read"])
def test_verifier_input_and_output_do_not_touch_the_pipes(pool, response):
    grades = pool.grade([(response, response), ("4", "4")])
    assert [grade.verified.reward for grade in grades] == [1.0, 1.0]


def test_too_much_memory_and_unserialisable_rewards_are_errors(pool):
    grades = pool.grade([("allocate", "1"), ("nonsense", "1"), ("4", "4")])
    assert "MemoryError" in grades[0].error
    assert "TypeError" in grades[1].error
    assert grades[2].verified.reward == 1.0


def test_workers_start_lazily_and_grow_only_with_a_backlog():
    pool = GradingPool(OBEDIENT, num_workers=3, timeout_s=5.0)
    try:
        assert pool.worker_pids == []
        pool.grade([("4", "4")])
        assert len(pool.worker_pids) == 1
        pool.grade([("sleep 0.8", "4")] * 4)
        assert 2 <= len(pool.worker_pids) <= 3
    finally:
        pool.close()


def test_a_verifier_that_cannot_be_loaded_is_named_in_each_error():
    pool = GradingPool("verifiers_for_tests.missing", num_workers=1, timeout_s=1.0)
    try:
        (grade,) = pool.grade([("4", "4")])
        assert "verifiers_for_tests.missing" in grade.error and "missing" in grade.error
    finally:
        pool.close()


def test_close_kills_the_processes_and_ends_waits():
    pool = GradingPool(OBEDIENT, num_workers=2, timeout_s=60.0)
    pool.grade([("4", "4")])
    pids = pool.worker_pids
    grades = []
    waiter = threading.Thread(target=lambda: grades.extend(pool.grade([("sleep 60", "4")])))
    waiter.start()
    time.sleep(0.2)
    pool.close()
    waiter.join(timeout=5.0)
    assert not waiter.is_alive() and grades[0].verified is None
    assert wait_until_gone(pids) == []
    with pytest.raises(WorkerDiedError, match="closed"):
        pool.grade([("4", "4")])


def test_a_grading_process_needs_neither_torch_nor_ray():
    pool = GradingPool("verifiers_for_tests.modules", num_workers=1, timeout_s=5.0)
    try:
        assert pool.grade([("", "")])[0].verified.extracted_answer == ""
    finally:
        pool.close()


OWNER = f"""
import sys
from nemo_rl.environments.grading.pool import GradingPool
pool = GradingPool("{OBEDIENT}", num_workers=1, timeout_s=60.0)
pool.grade([("4", "4")])
print("ready", flush=True)
pool.grade([("spin", "4")])
"""


def test_grading_processes_end_when_their_owner_is_killed():
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert owner.stdout is not None and owner.stdout.readline() == b"ready\n"
    pids = children(owner.pid)
    assert len(pids) == 1
    time.sleep(0.2)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert wait_until_gone(pids, timeout_s=20.0) == []
