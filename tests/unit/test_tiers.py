"""The tiers of tests: the default tier stays within its budget, and a change finds the tests that it can reach."""

import subprocess
from datetime import date
from pathlib import Path

import pytest
from tiers import durations, long_runs, reach

pytestmark = pytest.mark.fast

BUDGET_S = 1320.0
"""Seconds on one worker: 11 minutes on two, and a minute for collection, are the 12 minutes that README.md promises."""


def test_the_default_tier_stays_within_its_budget() -> None:
    taken = durations.default_tier_s()
    assert taken <= BUDGET_S, (
        f"the default tier takes {taken:.0f} s on one worker, and may take {BUDGET_S:.0f} s. "
        "Make tests faster, or take lines out of tests/tiers/representatives.txt."
    )


def test_representatives_exist_and_take_long() -> None:
    stale = []
    for name in durations.representatives():
        file, _, function = name.partition("::")
        functions = durations.stored().get(file, {})
        if (functions.get(function, 0.0) if function else max(functions.values(), default=0.0)) <= durations.LONGEST_S:
            stale.append(name)
    assert stale == [], "these are in the default tier in any case, or do not exist"


def test_stored_durations_are_of_functions_that_exist() -> None:
    tests = Path(durations.HERE).parent
    gone = [
        f"{file}::{function}"
        for file, functions in durations.stored().items()
        for function in functions.keys() - durations.names_in(tests / file)
    ]
    assert gone == [], "rename or remove them in tests/tiers/durations.json"


def test_the_page_of_tests_shows_the_last_run_of_each_long_function() -> None:
    assert set(long_runs.stored()) <= long_runs.long_functions(), "tests/tiers/long_runs.json has tests that are gone"
    assert long_runs.PAGE.read_text(encoding="utf-8").endswith(long_runs.table()), (
        "a long function was added or renamed: `pytest -m long --store-long-runs` writes the table"
    )


LONG = """
CASES = [1, pytest.param(2, marks=pytest.mark.long)]


def cases():
    return CASES


@pytest.mark.long
def test_a(): ...


@pytest.mark.parametrize("case", cases())
def test_b(case): ...


def test_c(): ...
"""


def test_runs_of_long_functions_are_stored_with_their_outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_a.py").write_text(LONG)
    (tmp_path / "test_b.py").write_text("pytestmark = [pytest.mark.slow, pytest.mark.long]\ndef test_d(): ...\n")
    (tmp_path / "page.md").write_text(f"# Tests\n\n{long_runs.HEAD}| gone |\n")
    stored = tmp_path / "long_runs.json"
    stored.write_text('{"test_a.py::test_gone": {"date": "2026-01-01", "minutes": 1.0, "outcome": "passed"}}')
    for name, path in {"TESTS": tmp_path, "PAGE": tmp_path / "page.md", "STORED": stored}.items():
        monkeypatch.setattr(long_runs, name, path)
    outcomes = {"test_a.py::test_a": ["passed", "failed"], "test_b.py::test_d": ["skipped"]}
    long_runs.store({"test_a.py::test_a": 90.0, "test_b.py::test_d": 0.1}, outcomes, date(2026, 3, 4))
    assert (tmp_path / "page.md").read_text() == (
        f"# Tests\n\n{long_runs.HEAD}"
        "| `test_a.py::test_a` | 1.5 | 2026-03-04 | 1 of 2 failed |\n"
        "| `test_a.py::test_b` | | | not run since |\n"
        "| `test_b.py::test_d` | 0.0 | 2026-03-04 | skipped |\n"
    )
    assert set(long_runs.stored()) == {"test_a.py::test_a", "test_b.py::test_d"}


FILES = {
    "nemo_rl/__init__.py": "",
    "nemo_rl/low.py": "LOW = 1\n",
    "nemo_rl/high.py": "from nemo_rl.low import LOW\n",
    "nemo_rl/by_path.py": "HOME = 'nemo_rl.low.LOW'\n",
    "nemo_rl/other.py": "",
    "examples/run.py": "from nemo_rl import high\n",
    "tests/helper.py": "import nemo_rl.high\n",
    "tests/test_low.py": "from nemo_rl import low\n",
    "tests/test_by_path.py": "from nemo_rl.by_path import HOME\n",
    "tests/test_helped.py": "from helper import x\n",
    "tests/test_program.py": "SCRIPT = 'examples/run.py'\n",
    "tests/test_other.py": "import nemo_rl.other\n",
    "tests/below/conftest.py": "import nemo_rl.low\n",
    "tests/below/test_fixture.py": "",
}


def test_a_change_reaches_tests_through_imports_names_and_fixtures(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert reach.distances(tmp_path, ["nemo_rl/low.py"]) == {
        "tests/test_low.py": 1,
        "tests/test_by_path.py": 2,
        "tests/below/test_fixture.py": 2,
        "tests/test_helped.py": 3,
        "tests/test_program.py": 3,
    }
    assert reach.distances(tmp_path, ["tests/test_other.py"]) == {"tests/test_other.py": 0}


def test_the_change_is_what_differs_from_a_commit(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        names = ["-c", "user.name=tester", "-c", "user.email=tester@example.com"]
        subprocess.run(["git", *names, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    for name in ("kept", "changed", "moved"):
        (tmp_path / name).write_text(name)
    git("add", ".")
    git("commit", "-m", "first")
    (tmp_path / "changed").write_text("other")
    git("mv", "moved", "there")
    git("commit", "-am", "second")
    (tmp_path / "new").write_text("new")
    assert reach.changed_files(tmp_path, "HEAD~1") == {"changed", "moved", "there", "new"}
    assert reach.changed_files(tmp_path) >= {"changed", "there"}, (
        "without a commit of yesterday: all since the first one"
    )


def test_durations_are_stored_by_function_and_gone_ones_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "tiers"
    here.mkdir()
    (tmp_path / "test_a.py").write_text("def test_long(): ...\ndef test_short(): ...\ndef test_shorter(): ...\n")
    monkeypatch.setattr(durations, "HERE", here)
    monkeypatch.setattr(durations, "STORED", here / "durations.json")
    monkeypatch.setattr(durations, "REPRESENTATIVES", here / "representatives.txt")
    (here / "durations.json").write_text('{"test_a.py": {"test_gone": 5.0}, "test_b.py": {"test_x": 1.0}}')
    (here / "representatives.txt").write_text("# none\n")
    durations.stored.cache_clear()
    durations.representatives.cache_clear()
    try:
        durations.store({"test_a.py::test_long": 20.04, "test_a.py::test_short": 0.11, "test_a.py::test_shorter": 0.02})
        assert durations.stored() == {"test_a.py": {"*": 0.1, "test_long": 20.0}}
        assert durations.is_full("test_a.py", "test_long") and not durations.is_full("test_a.py", "test_short")
        assert not durations.is_full_file(tmp_path / "test_a.py", "test_a.py"), (
            "its other tests are in the default tier"
        )
        assert durations.default_tier_s() == pytest.approx(0.1)
        (here / "representatives.txt").write_text("test_a.py::test_long  # the only one\n")
        durations.representatives.cache_clear()
        assert not durations.is_full("test_a.py", "test_long")
        assert durations.full_functions() == []
        (here / "representatives.txt").write_text("# none\n")
        (tmp_path / "test_a.py").write_text(
            '@pytest.fixture(scope="module")\ndef test_long(): ...\ndef test_short(): ...\n'
        )
        durations.representatives.cache_clear()
        durations.is_full_as_a_whole.cache_clear()
        assert durations.is_full("test_a.py", "test_short"), "it shares the fixture of a test that takes long"
        assert durations.is_full_file(tmp_path / "test_a.py", "test_a.py")
        assert durations.full_functions() == [("test_a.py", "test_long"), ("test_a.py", "test_short")]
        (tmp_path / "test_a.py").write_text("@pytest.mark.long\ndef test_long(): ...\n")
        assert durations.full_functions() == [], "`long` tests run by their own command"
    finally:
        for cached in (durations.stored, durations.representatives, durations.is_full_as_a_whole):
            cached.cache_clear()
