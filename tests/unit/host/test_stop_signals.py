"""Reactions of a program to the signals that request its end, seen from outside."""

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_rl.host.stop_signals import STOP_SIGNALS

PROGRAM = """
import logging, signal, sys, time
from nemo_rl.host.stop_signals import DeferredSignals, handlers_kept, leave_at_once
logging.basicConfig(format="%(message)s")
leave_at_once()
with handlers_kept():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit("a library's handler"))
if sys.argv[1] == "start":
    print("ready", flush=True)
    time.sleep(60)
signals = DeferredSignals(float(sys.argv[1]), "it ends soon").start()
print("ready", flush=True)
while signals.received is None:
    time.sleep(0.01)
print("noted", flush=True)
time.sleep(float(sys.argv[2]))
if sys.argv[3:]:
    signals.all_is_saved(75)
signals.stop()
print("safe", flush=True)
time.sleep(60 if sys.argv[3:] else 0)
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()


def start(program: list[subprocess.Popen[str]], *arguments: str, **options: bool) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **options)  # type: ignore[call-overload]
    program.append(process)
    wait_for(process, "ready")
    return process


def wait_for(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().strip() == word


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_before_training_a_signal_ends_the_program_immediately(
    program: list[subprocess.Popen[str]], number: int
) -> None:
    process = start(program, "start")
    process.send_signal(number)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 128 + number
    assert "ended immediately" in errors and "a library" not in errors


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_program_that_leaves_in_order_runs_its_finally_blocks_to_their_end(number: int) -> None:
    text = """
import time
from nemo_rl.host.stop_signals import leave_in_order
leave_in_order()
try:
    print("ready", flush=True)
    time.sleep(60)
finally:
    print("leaving", flush=True)
    time.sleep(0.5)
    print("tidied", flush=True)
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", text], stdout=pipe, stderr=pipe, text=True) as process:
        wait_for(process, "ready")
        process.send_signal(number)
        wait_for(process, "leaving")
        process.send_signal(signal.SIGTERM)
        rest, errors = process.communicate(timeout=10)
    assert (process.returncode, rest) == (128 + number, "tidied\n")
    assert errors == f"\n{signal.Signals(number).name}: ended, nothing was kept.\n"


def test_a_deferred_signal_sent_twice_quickly_counts_once(program: list[subprocess.Popen[str]]) -> None:
    process = start(program, "60", "0.5")
    process.send_signal(signal.SIGTERM)
    wait_for(process, "noted")
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=10)
    assert (process.returncode, output) == (0, "safe\n")
    assert errors.count("SIGTERM: it ends soon, within 60 s; a second signal ends it immediately.") == 1


def test_a_second_signal_is_not_deferred(program: list[subprocess.Popen[str]]) -> None:
    process = start(program, "60", "60")
    process.send_signal(signal.SIGINT)
    wait_for(process, "noted")
    time.sleep(1.2)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGTERM
    assert "SIGTERM: ended immediately" in errors


def test_a_signal_after_the_save_exits_with_the_status_of_a_save(
    program: list[subprocess.Popen[str]],
) -> None:
    process = start(program, "60", "0", "saves")
    process.send_signal(signal.SIGTERM)
    wait_for(process, "noted")
    wait_for(process, "safe")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 75
    assert "SIGTERM: ended immediately, all is saved." in errors


def test_the_grace_time_is_limited(program: list[subprocess.Popen[str]]) -> None:
    process = start(program, "1.5", "60")
    process.send_signal(signal.SIGHUP)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGHUP
    assert "SIGHUP: the grace time of 1.5 s is over, nothing more is saved." in errors


def test_signals_ignored_by_nohup_stay_ignored(program: list[subprocess.Popen[str]]) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start(program, "60", "0")
    finally:
        signal.signal(signal.SIGHUP, before)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=10)
    assert (process.returncode, output) == (0, "noted\nsafe\n")
    assert "SIGHUP" not in errors


UNDER_A_TERMINAL = """
import sys, time
from nemo_rl.launch.command_line import exit_status
from nemo_rl.utils.errors import RunInterruptedError
from nemo_rl.utils.log_backends.console import ConsoleLogger
from nemo_rl.utils.logging_setup import configure_logging
from nemo_rl.host.stop_signals import DeferredSignals, leave_at_once

def work():
    configure_logging()
    leave_at_once()
    console = ConsoleLogger(100)
    signals = DeferredSignals(60, "it ends soon").start()
    print("ready", flush=True)
    try:
        while signals.received is None:
            time.sleep(0.01)
        console.log_metrics({"loss": 1.0}, 1, "train", step_finished=True)
        raise RunInterruptedError("saved")
    finally:
        console.close()

sys.exit(exit_status(work))
"""


def test_a_run_whose_terminal_is_closed_ends_in_order() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", UNDER_A_TERMINAL])
    shown = b""
    while b"ready" not in shown:
        shown += os.read(terminal, 1000)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 75
