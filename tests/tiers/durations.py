"""The stored seconds of test functions, and the tier that each belongs to.

Invariant: the default tier is what the stored durations and the list of representatives say, on every machine.
"""

import ast
import json
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
STORED = HERE / "durations.json"
REPRESENTATIVES = HERE / "representatives.txt"
LONGEST_S = 2.0
"""Seconds above which a function belongs to the full tier, unless it is a representative."""
_SHARED = 'scope="module"'
"""In the source of a file: its tests share what a fixture starts, and leaving out only the slowest saves nothing."""
_LONG = "pytest.mark.long"
SHORTEST_STORED_S = 0.2
"""Shorter functions are stored as one sum for each file."""
REST = "*"
"""Key of the sum of a file's shorter functions."""

type Seconds = dict[str, dict[str, float]]
"""By file, relative to `tests/`, then by function: seconds of all its cases with their fixtures, on one worker."""


@cache
def stored() -> Seconds:
    """Read the stored durations."""
    seconds: Seconds = json.loads(STORED.read_text(encoding="utf-8"))
    return seconds


@cache
def representatives() -> frozenset[str]:
    """Read the functions, as `file::function`, and files that stay in the default tier whatever they take."""
    lines = REPRESENTATIVES.read_text(encoding="utf-8").splitlines()
    return frozenset(line.split("#")[0].strip() for line in lines) - {""}


def is_full(file: str, function: str) -> bool:
    """Return whether a function belongs to the full tier."""
    if representatives() & {file, f"{file}::{function}"}:
        return False
    return stored().get(file, {}).get(function, 0.0) > LONGEST_S or is_full_as_a_whole(file)


@cache
def is_full_as_a_whole(file: str) -> bool:
    """Return whether the tests of a file share a fixture that takes long."""
    path = HERE.parent / file
    slowest = max((seconds for name, seconds in stored().get(file, {}).items() if name != REST), default=0.0)
    return slowest > LONGEST_S and path.exists() and _SHARED in path.read_text(encoding="utf-8")


def is_full_file(path: Path, file: str) -> bool:
    """Return whether all test functions of a file belong to the full tier, without importing it."""
    if not any(is_full(file, name) for name in stored().get(file, {})):
        return False
    return all(is_full(file, name) for name in _test_functions(path))


def full_functions() -> list[tuple[str, str]]:
    """Return the files and functions of the full tier, in their order, without importing them."""
    return [
        (file, name)
        for path in sorted(HERE.parent.rglob("test_*.py"))
        for file in [path.relative_to(HERE.parent).as_posix()]
        for name in _test_functions(path, with_long=False)
        if is_full(file, name)
    ]


def _test_functions(path: Path, *, with_long: bool = True) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    marks = [
        node for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets[0])
    ]
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")
        if with_long or not any(_LONG in ast.unparse(mark) for mark in (*marks, *node.decorator_list))
    ]


def default_tier_s() -> float:
    """Return the stored seconds of the default tier, on one worker."""
    return sum(
        seconds
        for file, functions in stored().items()
        for function, seconds in functions.items()
        if not is_full(file, function)
    )


def store(measured: Mapping[str, float]) -> None:
    """Write the durations of the functions that were measured, and forget functions that are gone.

    Args:
        measured: seconds by `file::function`.
    """
    by_file: dict[str, dict[str, float]] = defaultdict(dict)
    for name, seconds in measured.items():
        file, function = name.split("::")
        key = function if seconds >= SHORTEST_STORED_S else REST
        by_file[file][key] = by_file[file].get(key, 0.0) + seconds
    for file, functions in stored().items():
        kept = {name: seconds for name, seconds in functions.items() if f"{file}::{name}" not in measured}
        by_file[file] = {**kept, **by_file[file]}
    joined = {
        file: {name: functions[name] for name in sorted(functions.keys() & names_in(HERE.parent / file))}
        for file, functions in sorted(by_file.items())
    }
    rounded = {file: {name: round(taken, 1) for name, taken in joined[file].items()} for file in joined}
    content = json.dumps({file: functions for file, functions in rounded.items() if functions}, indent=1)
    STORED.write_text(content + "\n", encoding="utf-8")
    stored.cache_clear()


def names_in(path: Path) -> set[str]:
    """Return the keys that the stored durations of a file may have."""
    return {*_test_functions(path), REST} if path.exists() else set()
