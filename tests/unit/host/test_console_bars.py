"""Bars on a pseudo-terminal: with log lines above them, narrow, dumb, without colours, interrupted; lines on a pipe."""

import io
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pseudo_terminal import BAR, lines_of, on_terminal

from nemo_rl.host.console_bars import progress_bar, shows_bars

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
        time.sleep(0.2)
console.log_metrics({"loss": 0.5}, 1, "train", step_finished=True)
console.close()
"""


def test_a_terminal_shows_the_wait_and_the_steps_below_whole_records() -> None:
    status, output = on_terminal("end", program=PROGRAM)
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
    _, output = on_terminal("end", program=PROGRAM, columns=40)
    bars = [line for line in lines_of(output) if BAR in line]
    assert bars and max(map(len, bars)) <= 40
    assert any("/8" in line for line in bars)


def test_colours_can_be_switched_off() -> None:
    _, coloured = on_terminal("end", program=PROGRAM)
    _, plain = on_terminal("end", program=PROGRAM, NO_COLOR="1")
    assert re.search(r"\x1b\[(?:\d+;)*3\d", coloured) and not re.search(r"\x1b\[(?:\d+;)*[34]\d", plain)
    assert BAR in plain


def test_an_interrupt_leaves_the_terminal_as_it_was() -> None:
    status, output = on_terminal("long", program=PROGRAM, interrupt=True)
    assert status == 128 + signal.SIGINT
    assert "SIGINT: ended immediately" in output and "\x1b[?25l" not in output


@pytest.mark.parametrize("terminal", ["dumb", ""])
def test_a_terminal_that_cannot_move_its_cursor_gets_lines(terminal: str) -> None:
    _, output = on_terminal("end", program=PROGRAM, TERM=terminal)
    assert BAR not in output and "\x1b" not in output and "Still waiting for the rollouts" in output


def test_a_pipe_gets_a_line_now_and_then() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, "end"], capture_output=True, text=True, timeout=60)
    waits = [line for line in done.stderr.splitlines() if "Still waiting" in line]
    assert done.returncode == 0 and "\x1b" not in done.stderr and BAR not in done.stderr
    assert 1 <= len(waits) <= 3
    assert re.search(r"[1-7] of 8 parts are finished, about \d+ s left\.$", waits[0])
    assert "step 1/3  loss=0.5" in done.stderr


TWO_BARS = """
import logging, os, sys, time
from pathlib import Path
from nemo_rl.host.console_bars import Bar

plain = logging.getLogger("elsewhere")
plain.addHandler(handler := logging.StreamHandler())
real = sys.stderr
bars = [Bar("first", 9), Bar("second", 9)]
"""


def test_a_handler_made_before_the_bars_writes_above_them_and_gets_its_stream_back() -> None:
    program = f"""{TWO_BARS}
for number in range(5):
    for bar in bars:
        bar.show(number)
    plain.warning("record %d is whole", number)
    time.sleep(0.3)
assert handler.stream is sys.stderr is not real
for bar in bars:
    bar.close()
assert handler.stream is sys.stderr is real
plain.warning("record 5 is whole")
"""
    status, output = on_terminal(program=program)
    assert status == 0, output
    # What a terminal shows: a line that the cursor moves back to is erased by what follows.
    shown = [re.split(r"\x1b\[2K", line)[-1] for line in output.split("\n")]
    for number in range(6):
        [line] = [line for line in shown if f"record {number} is whole" in line]
        assert BAR not in line


def test_a_pipe_as_stdout_gets_what_is_printed_while_there_are_bars(tmp_path: Path) -> None:
    program = f"""{TWO_BARS}
sys.stdout = Path(sys.argv[1]).open("w")
bars[0].close(), bars[1].close()
bar = Bar("again", 3)
print("for the file")
bar.close()
sys.stdout.close()
"""
    status, output = on_terminal(str(tmp_path / "out"), program=program)
    assert status == 0, output
    assert (tmp_path / "out").read_text() == "for the file\n" and "for the file" not in output


def test_a_forked_child_has_the_real_streams_and_no_display() -> None:
    program = f"""{TWO_BARS}
child = os.fork()
if child == 0:
    bars[0].show(3)
    plain.warning("from the child")
    os._exit(0 if handler.stream is sys.stderr is real else 7)
assert os.waitpid(child, 0)[1] == 0
assert sys.stderr is not real
for bar in bars:
    bar.close()
"""
    status, output = on_terminal(program=program)
    assert status == 0, output
    assert "from the child" in output


def test_slow_parts_have_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_rl.host.live_display import _progress

    now, progress = [0.0], _progress()
    progress.get_time = lambda: now[0]
    bar = progress.add_task("steps", total=10)
    for step in range(1, 5):
        now[0] += 200.0
        progress.update(bar, completed=step)
    assert progress.tasks[0].time_remaining == pytest.approx(6 * 200.0)


class Closed(io.StringIO):
    """A terminal whose program has closed its stream."""

    def __init__(self) -> None:
        super().__init__()
        self.close()


@pytest.mark.parametrize("stream", [None, object(), Closed()], ids=["none", "not a file", "closed"])
def test_without_a_stream_there_are_no_bars(stream: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    assert not shows_bars()
    with progress_bar("work", 3) as bar:
        bar.show(1)


def test_a_stream_that_is_closed_while_there_are_bars_raises_nothing() -> None:
    program = f"""{TWO_BARS}
real.close()
for bar in bars:
    bar.show(1)
    bar.close()
os._exit(5)
"""
    status, _ = on_terminal(program=program)
    assert status == 5
