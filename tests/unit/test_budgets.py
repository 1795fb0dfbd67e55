"""Budgets for the size of the library: lines, files, folders, names and long signatures.

A feature that needs more lines or files raises `LINES` and `FILES` in its own commit, with the reason. All other
budgets only tighten.
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from package_source import PACKAGE, files, tree_of

pytestmark = pytest.mark.fast

OPTIONAL = ("sandbox", "kits", "agents", "serving", "commands")
"""Packages above the core."""

LINES = {"core": 105_600, "all": 137_000}
FILES = {"core": 579, "all": 778}
FOLDERS = 95
SHORT_FILES = 49
"""Files under 60 lines, without `__init__.py`."""
DOCUMENTATION = 0.4
"""Lines of docstrings and of texts below fields, for each line of code."""
IMPORTS = 0.134
"""Lines of imports, for each line of code."""
SEMICOLONS = 0
"""Summaries of docstrings with a semicolon: two thoughts."""
NAMES_OF_SEVERAL_CLASSES = 1
LONG_SIGNATURES = 42
"""Functions with more than 6 parameters, `self` and `cls` not counted."""


def is_core(file: Path) -> bool:
    return file.relative_to(PACKAGE).parts[0] not in OPTIONAL


@cache
def lines_of(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


@cache
def kinds_of(file: Path) -> Counter[str]:
    """Count a file's lines of code, documentation, imports, comments and blank lines."""
    kinds = dict.fromkeys(range(1, len(lines_of(file)) + 1), "code")
    for number, line in enumerate(lines_of(file), start=1):
        if not line.strip():
            kinds[number] = "blank"
        elif line.strip().startswith("#"):
            kinds[number] = "comment"
    for node in ast.walk(tree_of(file)):
        kind = "documentation" if is_text(node) else "import" if isinstance(node, ast.Import | ast.ImportFrom) else None
        if kind is not None and isinstance(node, ast.stmt):
            kinds |= dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), kind)
    return Counter(kinds.values())


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    for file in files():
        for node in ast.walk(tree_of(file)):
            yield file, node


def at_most(found: float, budget: float, what: str) -> None:
    assert found <= budget, f"{what}: {found}, and the budget is {budget}"
    assert found >= 0.97 * budget, f"{what}: {found}; lower the budget of {budget}, so that it stays tight"


@pytest.mark.parametrize("part", ["core", "all"])
def test_lines_and_files(part: str) -> None:
    counted = [file for file in files() if part == "all" or is_core(file)]
    at_most(sum(len(lines_of(file)) for file in counted), LINES[part], f"lines of {part}")
    at_most(len(counted), FILES[part], f"files of {part}")


def test_folders_and_short_files() -> None:
    at_most(len({file.parent for file in files()}), FOLDERS, "folders with code")
    short = [file for file in files() if file.name != "__init__.py" and len(lines_of(file)) < 60]
    at_most(len(short), SHORT_FILES, "files under 60 lines")


def test_lines_that_are_not_code() -> None:
    total = sum((kinds_of(file) for file in files()), Counter())
    at_most(round(total["documentation"] / total["code"], 3), DOCUMENTATION, "documentation per line of code")
    at_most(round(total["import"] / total["code"], 3), IMPORTS, "imports per line of code")


def test_a_summary_has_one_thought() -> None:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    texts = [ast.get_docstring(node) or "" for _, node in nodes() if isinstance(node, kinds)]
    at_most(sum(";" in re.split(r"\n\n", text)[0] for text in texts), SEMICOLONS, "summaries with a semicolon")


def test_class_names_mean_one_thing() -> None:
    places: dict[str, set[Path]] = defaultdict(set)
    for file, node in nodes():
        if isinstance(node, ast.ClassDef):
            places[node.name].add(file)
    several = [name for name, where in places.items() if len(where) > 1]
    at_most(len(several), NAMES_OF_SEVERAL_CLASSES, f"names of several classes ({', '.join(sorted(several))})")


def test_signatures_are_short() -> None:
    long = 0
    for _, node in nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [given.arg for given in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            long += len([name for name in names if name not in ("self", "cls")]) > 6
    at_most(long, LONG_SIGNATURES, "functions with more than 6 parameters")
