"""The stored last run of each `long` test function: when it ran, how many minutes it took, and how it ended.

    pytest -m long --store-long-runs ─► long_runs.json ─► the table of docs/development/testing.md

Invariant: the table shows what the file has, and a function without a run is a row too.
"""

import ast
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TypedDict

TESTS = Path(__file__).resolve().parents[1]
STORED = Path(__file__).parent / "long_runs.json"
PAGE = TESTS.parent / "docs" / "development" / "testing.md"
_LONG = "pytest.mark.long"
HEAD = "| long test | minutes | date | outcome |\n|---|---|---|---|\n"
NOT_RUN = "not run since"
"""Outcome of a function that has not run since runs are stored."""


class LongRun(TypedDict):
    """The last run of a test function's `long` cases."""

    date: str
    minutes: float
    """Of all `long` cases with their fixtures, on one worker."""
    outcome: str
    """`passed`, `skipped`, or the numbers of failed and of all cases."""


type LongRuns = dict[str, LongRun]
"""By test, as `file::function`; the file is relative to `tests/`."""


def stored() -> LongRuns:
    """Read the stored runs."""
    runs: LongRuns = json.loads(STORED.read_text(encoding="utf-8"))
    return runs


def store(seconds: Mapping[str, float], outcomes: Mapping[str, Sequence[str]], today: date) -> None:
    """Write the runs of today into the file and the page, and forget functions that are gone.

    Args:
        seconds: by test, as `file::function`.
        outcomes: those of its cases, of pytest.
        today: the date of the run.
    """
    runs = stored()
    for name, taken in seconds.items():
        outcome = _outcome(outcomes[name])
        runs[name] = LongRun(date=today.isoformat(), minutes=round(taken / 60, 1), outcome=outcome)
    kept = {name: runs[name] for name in sorted(long_functions()) if name in runs}
    STORED.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text.partition(HEAD)[0] + table(), encoding="utf-8")


def _outcome(cases: Sequence[str]) -> str:
    if "failed" in cases:
        return f"{cases.count('failed')} of {len(cases)} failed"
    return "passed" if "passed" in cases else "skipped"


def table() -> str:
    """Return the table of all long test functions, the end of the page."""
    runs = stored()
    rows = []
    for name in sorted(long_functions()):
        run = runs.get(name)
        last = f"{run['minutes']} | {run['date']} | {run['outcome']}" if run else f"| | {NOT_RUN}"
        rows.append(f"| `{name}` | {last} |\n")
    return HEAD + "".join(rows)


def long_functions() -> set[str]:
    """Return the tests, as `file::function`, with cases that are marked `long`, without importing them."""
    return {
        f"{path.relative_to(TESTS).as_posix()}::{name}"
        for path in TESTS.rglob("test_*.py")
        if _LONG in (source := path.read_text(encoding="utf-8"))
        for name in _long_functions(ast.parse(source))
    }


def _long_functions(tree: ast.Module) -> Iterator[str]:
    named: dict[str, list[ast.stmt]] = defaultdict(list)
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            named[statement.name].append(statement)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                named[ast.unparse(target)].append(statement)
    whole_file = any(_mentions_long(statement, {}) for statement in named["pytestmark"])
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.name.startswith("test"):
            continue
        if whole_file or any(_mentions_long(mark, named) for mark in node.decorator_list):
            yield node.name


def _mentions_long(node: ast.AST, named: Mapping[str, Sequence[ast.stmt]]) -> bool:
    """Return whether a mark is `long`, or a name in it stands for parameters of which some are."""
    if _LONG in ast.unparse(node):
        return True
    others = {name: statements for name, statements in named.items() if not name.startswith("test")}
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in others:
            below = {name: statements for name, statements in others.items() if name != part.id}
            if any(_mentions_long(statement, below) for statement in others[part.id]):
                return True
    return False
