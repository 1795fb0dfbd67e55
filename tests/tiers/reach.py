"""Find the tests that a change can reach: by imports, and by names of files and dotted paths in texts.

    changed files ◄── files that name them ◄── ... ◄── test modules

The distance of a test module is the number of these steps; a test that names a changed file itself has distance 1.
"""

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

SOURCES = ("nemo_rl", "tests", "tools", "examples", "docs/site")
_FILE_NAME = re.compile(r"[\w.-]+\.(?:py|ya?ml|md|sub|sh|toml|json|jinja|js|html|css|txt)\b")
_DOTTED = re.compile(r"\bnemo_rl(?:\.\w+)+")
_MOST_OF_A_NAME = 4
"""A file name that more files have says nothing about which one is meant."""


def changed_files(root: Path, base: str | None = None) -> set[str]:
    """Return the files that differ from a commit, those of the working tree included, relative to the root.

    Args:
        root: the repository.
        base: the commit; None: the newest one that is older than a day, or else the first one.
    """
    if base is None:
        old = _git(root, "rev-list", "-1", "--before=1.day.ago", "HEAD")
        base = old or _git(root, "rev-list", "--max-parents=0", "HEAD").split()[0]
    committed = _git(root, "diff", "--name-only", "--no-renames", base).split("\n")
    new = _git(root, "ls-files", "--others", "--exclude-standard").split("\n")
    return {name for name in (*committed, *new) if name}


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def distances(root: Path, changed: Iterable[str]) -> dict[str, int]:
    """Return for each test module that the changed files can reach its distance from the nearest one."""
    users: dict[str, set[str]] = defaultdict(set)
    for file, named in links(root).items():
        for other in named:
            users[other].add(file)
    found = dict.fromkeys(changed, 0)
    layer = set(found)
    while layer:
        layer = {user for file in layer for user in users[file]} - found.keys()
        found |= dict.fromkeys(layer, 1 + max(found.values()))
    return {file: steps for file, steps in found.items() if Path(file).name.startswith("test_")}


def links(root: Path) -> dict[str, set[str]]:
    """Return for each file the files of the repository that it imports or names."""
    files = [path.relative_to(root).as_posix() for top in SOURCES for path in (root / top).rglob("*") if _is_text(path)]
    named: dict[str, list[str]] = defaultdict(list)
    for file in files:
        named[Path(file).name].append(file)
    modules = {module: file for file in files for module in _modules_of(file)}
    return {file: set(_links_of(root / file, file, modules, named)) - {file} for file in files}


def _is_text(path: Path) -> bool:
    return path.suffix in (".py", ".yaml", ".sh", ".jinja", ".js", ".json") and "__pycache__" not in path.parts


def _modules_of(file: str) -> Iterator[str]:
    """Yield the names under which a file is imported: helpers of tests and tools are found by `sys.path`."""
    path = Path(file)
    if path.suffix != ".py":
        return
    parts = path.with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    if parts[0] == "nemo_rl":
        yield ".".join(parts)
    elif parts[0] in ("tests", "tools"):
        yield ".".join(parts[1:])
        yield parts[-1]


def _links_of(path: Path, file: str, modules: Mapping[str, str], named: Mapping[str, list[str]]) -> Iterator[str]:
    if file.startswith("tests/"):
        yield from (
            conftest
            for conftest in named["conftest.py"]
            if file.startswith(conftest.removesuffix("conftest.py")) and conftest != file
        )
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix != ".py":
        yield from _named_in(text, modules, named)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (modules[name.name] for name in node.names if name.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = (node.module, *(f"{node.module}.{name.name}" for name in node.names))
            yield from (modules[name] for name in names if name in modules)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 1000:
            yield from _named_in(node.value, modules, named)


def _named_in(text: str, modules: Mapping[str, str], named: Mapping[str, list[str]]) -> Iterator[str]:
    for name in _FILE_NAME.findall(text):
        files = named.get(name, [])
        if len(files) <= _MOST_OF_A_NAME:
            yield from files
    for dotted in _DOTTED.findall(text):
        while dotted and dotted not in modules:
            dotted = dotted.rpartition(".")[0]
        if dotted:
            yield modules[dotted]
