"""Bars on a pseudo-terminal: with log lines above them, narrow, dumb, without colours, interrupted; lines on a pipe."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios

import pytest

pytestmark = pytest.mark.fast

PROGRAM = """
import logging, sys, time
from nemo_rl.host import waiting_log
from nemo_rl.host.stop_signals import leave_at_once
from nemo_rl.utils.log_backends.console import ConsoleLogger
from nemo_rl.utils.logging_setup import configure_logging

configure_logging()
leave_at_once()
waiting_log.SHOWN_AFTER_S, waiting_log.PERIOD_S = 0.0, 0.3
console, done = ConsoleLogger(3), 0
with waiting_log.StillWaiting("the rollouts of train step 1", "parts are finished", lambda: done, 8) as wait:
    for done in range(1, 8 if sys.argv[1:] == ["end"] else 80):
        wait.look()
        logging.getLogger("nemo_rl.test").info("record %d is whole", done)
        time.sleep(0.1)
console.log_metrics({"loss": 0.5}, 1, "train", step_finished=True)
console.close()
"""
BAR = "\u2501"
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(*arguments: str, columns: int = 100, interrupt: bool = False, **environment: str) -> tuple[int, str]:
    """Run the program with a pseudo-terminal as stderr; return its exit status and what it wrote."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    settings = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments], stderr=follower, env=settings | {"TERM": "xterm"} | environment
    )
    os.close(follower)
    output = b""
    while True:
        try:
            block = os.read(leader, 65536)
        except OSError:
            break
        if not block:
            break
        output += block
        if interrupt and BAR.encode() in output:
            process.send_signal(signal.SIGINT)
            interrupt = False
    os.close(leader)
    return process.wait(), output.decode()


def lines_of(output: str) -> list[str]:
    return [_ESCAPE.sub("", line) for line in output.replace("\r", "\n").split("\n")]


def test_a_terminal_shows_the_wait_and_the_steps_below_whole_records() -> None:
    status, output = on_terminal("end")
    lines = lines_of(output)
    assert status == 0
    assert any("the rollouts of train step 1" in line and BAR in line and "/8" in line for line in lines)
    assert any(line.startswith("step") and BAR in line and "0/3" in line for line in lines)
    assert re.search(r"[1-7]/8 0:00:0\d 0:0\d:\d\d", output_text := "\n".join(lines)), output_text
    records = [line for line in lines if "is whole" in line]
    assert len(records) == 7 and not any(BAR in line for line in records)
    assert "Still waiting" not in output, "the bar stands for the lines"
    assert "\x1b[?25l" not in output, "the cursor was hidden"


def test_a_window_of_40_columns_has_no_longer_line() -> None:
    _, output = on_terminal("end", columns=40)
    bars = [line for line in lines_of(output) if BAR in line]
    assert bars and max(map(len, bars)) <= 40
    assert any("/8" in line for line in bars)


def test_colours_can_be_switched_off() -> None:
    _, coloured = on_terminal("end")
    _, plain = on_terminal("end", NO_COLOR="1")
    assert re.search(r"\x1b\[(?:\d+;)*3\d", coloured) and not re.search(r"\x1b\[(?:\d+;)*[34]\d", plain)
    assert BAR in plain


def test_an_interrupt_leaves_the_terminal_as_it_was() -> None:
    status, output = on_terminal("long", interrupt=True)
    assert status == 128 + signal.SIGINT
    assert "SIGINT: ended immediately" in output and "\x1b[?25l" not in output


@pytest.mark.parametrize("terminal", ["dumb", ""])
def test_a_terminal_that_cannot_move_its_cursor_gets_lines(terminal: str) -> None:
    _, output = on_terminal("end", TERM=terminal)
    assert BAR not in output and "\x1b" not in output and "Still waiting for the rollouts" in output


def test_a_pipe_gets_a_line_now_and_then() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, "end"], capture_output=True, text=True, timeout=60)
    waits = [line for line in done.stderr.splitlines() if "Still waiting" in line]
    assert done.returncode == 0 and "\x1b" not in done.stderr and BAR not in done.stderr
    assert 1 <= len(waits) <= 3
    assert re.search(r"[1-7] of 8 parts are finished, about \d+ s left\.$", waits[0])
    assert "step 1/3  loss=0.5" in done.stderr
