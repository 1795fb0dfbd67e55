"""Environment variables: each one that the library reads is on docs/reference/environment-variables.md."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "nemo_rl"
PAGE = ROOT / "docs" / "reference" / "environment-variables.md"
_OWN = re.compile(r"(?:NRL|NEMO_RL)_[A-Z0-9_]*[A-Z0-9]")


def read_in(tree: ast.Module) -> set[str]:
    """Names that a file reads from `os.environ`: literal, in a variable of the file, or from a tuple by a loop."""
    values: dict[str, list[str]] = defaultdict(list)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                values[getattr(target, "id", "")] += texts(node.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.comprehension) and isinstance(node.target, ast.Name):
            values[node.target.id] += values[getattr(node.iter, "id", "")] or texts(node.iter)
    found: set[str] = set()
    for node in names_of_reads(tree):
        found |= {*(values[node.id] if isinstance(node, ast.Name) else texts(node))}
    return found


def texts(node: ast.expr) -> list[str]:
    """The strings of a literal: one, or those of a tuple or list."""
    parts = node.elts if isinstance(node, ast.Tuple | ast.List) else [node]
    return [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]


def names_of_reads(tree: ast.Module) -> Iterator[ast.expr]:
    """Expressions of the names: `os.environ[name]`, `os.environ.get(name)`, `name in os.environ`, `os.getenv(name)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and is_environment(node.value):
            yield node.slice
        elif isinstance(node, ast.Compare) and is_environment(node.comparators[-1]):
            yield node.left
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            is_read = node.func.attr in ("get", "pop") and is_environment(node.func.value)
            if is_read or is_of_os(node.func, "getenv"):
                yield node.args[0]


def is_environment(node: ast.expr) -> bool:
    return is_of_os(node, "environ")


def is_of_os(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name and getattr(node.value, "id", "") == "os"


@cache
def trees() -> dict[str, ast.Module]:
    paths = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "examples").rglob("*.py")])
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def own_variables() -> set[str]:
    """Variables of this project in any string of the source that is nothing but a name."""
    return {
        node.value
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _OWN.fullmatch(node.value)
    }


def tables() -> tuple[set[str], dict[str, str]]:
    """Own variables of the page, and those of others with the file that reads each."""
    own, _, others = PAGE.read_text(encoding="utf-8").partition("## Variables of other programs")
    rows = [row for row in others.splitlines() if row.startswith("| `")]
    cells = [row.strip("| ").split(" | ") for row in rows]
    return (
        set(re.findall(r"^\| `(\w+)`", own, re.MULTILINE)),
        {name: file.strip("`") for names, file, *_ in cells for name in re.findall(r"`(\w+)`", names)},
    )


def test_own_variables_are_on_the_page_and_are_read() -> None:
    assert tables()[0] == own_variables()
    assert len(own_variables()) > 5


def test_variables_of_others_are_on_the_page_with_a_file_that_reads_them() -> None:
    read = {file: read_in(tree) for file, tree in trees().items()}
    everything = set().union(*read.values()) - own_variables()
    on_page = tables()[1]
    assert sorted(everything - on_page.keys()) == [], f"Explain each on {PAGE.name}."
    assert sorted(on_page.keys() - everything) == [], f"Remove each from {PAGE.name}: it is not read any more."
    assert [name for name, file in on_page.items() if name not in read.get(file, set())] == []


@pytest.mark.parametrize(
    "source",
    [
        "os.environ['A']",
        "os.environ.get('A', '')",
        "os.getenv('A')",
        "'A' in os.environ",
        "NAME = 'A'\nos.environ.get(NAME)",
        "NAMES = ('A',)\nnext(os.environ[name] for name in NAMES)",
        "{key: os.environ[key] for key in ('A',) if key in os.environ}",
    ],
)
def test_each_way_to_read_a_variable_is_found(source: str) -> None:
    assert read_in(ast.parse(source)) == {"A"}


def test_a_variable_that_is_only_set_is_not_read() -> None:
    assert read_in(ast.parse("os.environ['A'] = '1'\nos.environ.setdefault('B', '1')")) == set()
