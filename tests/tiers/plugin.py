"""Choose tests by tier, and store how long they take.

    pytest                         the default tier: neither `full` nor `long`
    pytest tests/.../test_x.py     all tests of a file that are not `long`
    pytest -m "not long"           the default and the full tier
    pytest --affected 10           tests of the full tier that the change can reach, at most about 10 minutes of them
    pytest --rotating 5            a part of the full tier, about 5 minutes, another one after each commit
    pytest -m "not long" --store-durations    and write `durations.json`
    pytest -m long --store-long-runs          and write `long_runs.json` and its table in the documentation

Invariant: every worker of pytest-xdist chooses the same tests.
"""

import math
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import date
from functools import cache
from pathlib import Path

import pytest

from tiers import durations, long_runs, reach

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
DEFAULT = "not long and not full"
"""The expression of the default tier, as in pyproject.toml."""
WORKERS = 2
"""Workers that minutes are counted for."""
SLOW_S = 5 * durations.LONGEST_S
"""Seconds above which a function of the default tier is named, whatever the machine does besides."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of tiers."""
    group = parser.getgroup("tiers")
    group.addoption("--affected", type=float, metavar="MINUTES", help="full-tier tests that the change can reach")
    group.addoption("--since", metavar="COMMIT", help="the change of --affected is what differs from this commit")
    group.addoption("--rotating", type=float, metavar="MINUTES", help="the next part of the full tier")
    group.addoption("--store-durations", action="store_true", help="write tests/tiers/durations.json")
    group.addoption("--store-long-runs", action="store_true", help="write tests/tiers/long_runs.json and its table")


def pytest_configure(config: pytest.Config) -> None:
    """Let `--affected` and `--rotating` choose in the full tier, and measure durations."""
    if _chooses(config):
        config.option.markexpr = "full and not long"
    elif config.option.markexpr == DEFAULT and any(Path(given.split("::")[0]).is_file() for given in config.args):
        config.option.markexpr = "not long"  # who names a file wants all of its tests
    if hasattr(config, "workerinput"):
        return
    config.pluginmanager.register(_Measured(stores=config.getoption("store_durations")), "measured durations")
    if config.getoption("store_long_runs"):
        config.pluginmanager.register(_LongRuns(), "long runs")


def _chooses(config: pytest.Config) -> bool:
    return config.getoption("affected") is not None or config.getoption("rotating") is not None


def _leaves_out_full(config: pytest.Config) -> bool:
    return "not full" in str(config.getoption("markexpr"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a module of which no test would run."""
    if not collection_path.match("test_*.py") or not collection_path.is_relative_to(TESTS):
        return None
    file = collection_path.relative_to(TESTS).as_posix()
    if _chooses(config):
        return True if all(file != chosen for chosen, _ in _chosen(config)) else None
    return True if _leaves_out_full(config) and durations.is_full_file(collection_path, file) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of the full tier, and choose among them for `--affected` and `--rotating`."""
    for item in items:
        if durations.is_full(*_name_of(item)):
            item.add_marker("full")
    if _chooses(config):
        chosen = _chosen(config)
        left_out = [item for item in items if _name_of(item) not in chosen]
        items[:] = [item for item in items if _name_of(item) in chosen]
        files = list(dict.fromkeys(file for file, _ in chosen))
        items.sort(key=lambda item: files.index(_name_of(item)[0]))
        config.hook.pytest_deselected(items=left_out)


def _name_of(item: pytest.Item) -> tuple[str, str]:
    """Return the file of a test, relative to `tests/`, and its function."""
    file = item.path.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else item.path.as_posix()
    return file, getattr(item, "originalname", None) or item.name.split("[")[0]


type _Unit = tuple[tuple[str, str], ...]
"""Functions that run together, because they share what a fixture starts: their files and names."""


@cache
def _chosen(config: pytest.Config) -> list[tuple[str, str]]:
    """Return the functions to run, in their order: what the change reaches, then the rotating part."""
    units = _units()
    chosen: list[_Unit] = []
    waiting: list[_Unit] = []
    if (minutes := config.getoption("affected")) is not None:
        near = reach.distances(ROOT, reach.changed_files(ROOT, config.getoption("since")))
        reached = [unit for unit in units if f"tests/{unit[0][0]}" in near]
        reached.sort(key=lambda unit: (near[f"tests/{unit[0][0]}"], _seconds(unit)))
        chosen, waiting = _fill(reached, minutes)
    if (minutes := config.getoption("rotating")) is not None:
        parts = max(1, math.ceil(sum(map(_seconds, units)) / (minutes * 60 * WORKERS)))
        turn = int(_commits()) % parts
        rotated = units[len(units) * turn // parts :] + units[: len(units) * turn // parts]
        more = [unit for unit in (*waiting, *rotated) if unit not in chosen]
        chosen += _fill(list(dict.fromkeys(more)), minutes)[0]
    return [name for unit in chosen for name in unit]


def _units() -> list[_Unit]:
    """Return the functions of the full tier, all of a file as one where they share a fixture."""
    joined: dict[object, list[tuple[str, str]]] = defaultdict(list)
    for file, function in durations.full_functions():
        joined[file if durations.is_full_as_a_whole(file) else (file, function)].append((file, function))
    return [tuple(names) for names in joined.values()]


def _fill(units: Sequence[_Unit], minutes: float) -> tuple[list[_Unit], list[_Unit]]:
    """Return the first units that fit into the minutes, and those that do not."""
    fitting, others, left = [], [], minutes * 60 * WORKERS
    for unit in units:
        if _seconds(unit) <= left:
            fitting.append(unit)
            left -= _seconds(unit)
        else:
            others.append(unit)
    return fitting, others


def _seconds(unit: _Unit) -> float:
    """Return the stored seconds of a unit; functions that are not stored are short."""
    stored = durations.stored().get(unit[0][0], {})
    return sum(stored.get(name, durations.SHORTEST_STORED_S / 2) for _, name in unit)


def _commits() -> str:
    return subprocess.run(
        ["git", "rev-list", "--count", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def _name_in(report: pytest.TestReport) -> str:
    """Return the test of a report as `file::function`, without its case."""
    file, _, rest = report.nodeid.partition("::")
    function = rest.split("[")[0].rpartition("::")[2]
    return f"{file.removeprefix('tests/')}::{function}"


class _Measured:
    """Adds up the seconds of each function, with the fixtures that its cases set up.

    Without `stores`, it only names the functions that slow down the default tier although they belong to the full one.
    """

    def __init__(self, *, stores: bool) -> None:
        self._stores = stores
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "long" in report.keywords:
            return
        self._seconds[_name_in(report)] += report.duration

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self) -> Iterator[None]:
        if self._stores:
            durations.store(self._seconds)
        return (yield)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        if self._stores or not _leaves_out_full(config):
            return
        slow = {name: taken for name, taken in self._seconds.items() if taken > SLOW_S and _may_leave(name)}
        if slow:
            terminalreporter.section("functions of the default tier that took long; see --store-durations")
        for name, taken in sorted(slow.items(), key=lambda each: -each[1]):
            terminalreporter.line(f"{taken:6.1f} s  {name}")


def _may_leave(name: str) -> bool:
    """Return whether nothing keeps a function in the default tier."""
    return not durations.representatives() & {name, name.split("::")[0]}


class _LongRuns:
    """Notes the seconds and outcomes of `long` tests."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._outcomes: dict[str, dict[str, str]] = defaultdict(dict)
        """By function, then by case."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "long" not in report.keywords:
            return
        name = _name_in(report)
        self._seconds[name] += report.duration
        before = self._outcomes[name].get(report.nodeid, "passed")
        self._outcomes[name][report.nodeid] = report.outcome if before == "passed" else before

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self) -> Iterator[None]:
        outcomes = {name: list(cases.values()) for name, cases in self._outcomes.items()}
        long_runs.store(self._seconds, outcomes, date.today())
        return (yield)
