"""The source files of the library, for tests that read them with `ast`."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "nemo_rl"


def files() -> list[Path]:
    """Return all Python files of the library."""
    return sorted(PACKAGE.rglob("*.py"))


@cache
def tree_of(file: Path) -> ast.Module:
    """Parse a file, once per process."""
    return ast.parse(file.read_text(encoding="utf-8"))
