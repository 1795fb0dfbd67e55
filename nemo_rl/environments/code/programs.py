"""Give the source of the programs that run inside of the sandbox."""

from functools import cache
from pathlib import Path

_INSIDE = Path(__file__).parent / "inside"


@cache
def source_of(name: str) -> str:
    """Return the source code of a program of `nemo_rl/environments/code/inside`."""
    return (_INSIDE / f"{name}.py").read_text(encoding="utf-8")
