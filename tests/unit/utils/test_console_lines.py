"""The console output of a run is readable in a file: short lines without escape codes, at moderate intervals."""

import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_rl.host import waiting_log as still_waiting
from nemo_rl.host.waiting_log import StillWaiting
from nemo_rl.utils.logging_setup import WIDTH, configure_logging, log_to, wrapped


@pytest.fixture
def program() -> Iterator[None]:
    """Set up the logging of a program."""
    root, library = logging.getLogger(), logging.getLogger("nemo_rl")
    handlers, root.handlers, level = root.handlers, [], library.level
    configure_logging()
    yield
    root.handlers = handlers
    library.setLevel(level)


def test_long_lines_are_cut_between_words(program: None, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"metric_{number}={number / 7:.4g}" for number in range(40)]
    logging.getLogger("nemo_rl.test").info("validation: %s", "  ".join(words))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 3 and max(map(len, lines)) <= WIDTH
    assert all(line.startswith(" " * 11) for line in lines[1:])
    assert [word for line in lines for word in line.split()][3:] == words


def test_tables_and_unbreakable_text_stay_whole() -> None:
    path = "/folder" * 40
    assert wrapped(path) == [path]
    assert wrapped("a    b") == ["a    b"]


def test_several_lines_stay_several(program: None, capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("nemo_rl.test").info("first\n  second\n\nfourth")
    first, *others = capsys.readouterr().err.splitlines()
    assert first.endswith("I first") and others == ["  second", "", "fourth"]


def test_escape_codes_are_removed(program: None, capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("someone").warning("\x1b[33m(raylet)\x1b[0m is \x1b[1;31mslow\x1b[K")
    assert capsys.readouterr().err.endswith("W (raylet) is slow\n")


def test_the_file_of_a_run_has_details_that_the_console_lacks(
    program: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    library = logging.getLogger("nemo_rl.test")
    with log_to(tmp_path):
        library.info("The start took %d s.", 5, extra={"details": "  Ray  3 s\n  rest 2 s"})
        library.debug("not shown")
    library.info("after the run")
    first, *others = (tmp_path / "run.log").read_text().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d I The start took 5 s\.", first)
    assert others == ["  Ray  3 s", "  rest 2 s"]
    assert [line[9:] for line in capsys.readouterr().err.splitlines()] == ["I The start took 5 s.", "I after the run"]


def test_a_folder_that_cannot_be_written_costs_one_warning(program: None, caplog: pytest.LogCaptureFixture) -> None:
    with log_to(Path("/proc/none")):
        for number in range(3):
            logging.getLogger("nemo_rl.test").info("line %d", number)
    assert len([record for record in caplog.records if "cannot be written" in record.message]) == 1


def test_a_long_wait_logs_its_reason(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="nemo_rl")
    now = 100.0
    monkeypatch.setattr(still_waiting.time, "monotonic", lambda: now)
    progress = StillWaiting("policy train", "workers have answered", lambda: 1, 4)
    for now in (110.0, 129.0, 131.0, 140.0, 162.0):  # noqa: B007  (the clock reads it)
        progress.look()
    assert [record.message for record in caplog.records] == [
        "Still waiting for policy train after 31 s: 1 of 4 workers have answered, about 93 s left.",
        "Still waiting for policy train after 62 s: 1 of 4 workers have answered, about 186 s left.",
    ]


@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "1>&- 2>&-"])
def test_a_program_without_outputs_runs(closed: str, tmp_path: Path) -> None:
    script = "import sys; from nemo_rl.utils.logging_setup import configure_logging; configure_logging(); "
    script += (
        "import logging; logging.getLogger('nemo_rl').info('x'); print(sys.stdout.isatty(), sys.stderr.isatty()); "
    )
    script += f"open({str(tmp_path / 'file')!r}, 'w').write('intact'); sys.stderr.write('lost')"
    done = subprocess.run(["sh", "-c", f'{sys.executable} -c "$0" {closed}', script], timeout=60)
    assert done.returncode == 0
    assert (tmp_path / "file").read_text() == "intact"
