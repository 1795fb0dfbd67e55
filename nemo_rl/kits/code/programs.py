"""Give the programs that run inside of the sandbox: the source of one file, or the compiled modules of several."""

import marshal
from functools import cache
from importlib.util import MAGIC_NUMBER
from pathlib import Path

from nemo_rl.data.datasets.rows import program_tests

_INSIDE = Path(__file__).parent / "inside"
_ELSEWHERE = {"program_tests": Path(program_tests.__file__)}
_HEADER_REST = bytes(12)  # flags, and time and size of the source, which are not compared


@cache
def source_of(name: str) -> str:
    """Return the source code of a file of `nemo_rl/environments/code/inside`."""
    return _ELSEWHERE.get(name, _INSIDE / f"{name}.py").read_text(encoding="utf-8")


@cache
def compiled(name: str) -> bytes:
    """Return a module as the content of a file `.pyc`, which Python imports faster than its source.

    Programs in the sandbox run on the Python of this process, so its byte code fits.
    """
    code = compile(source_of(name), f"{name}.py", "exec")
    return MAGIC_NUMBER + _HEADER_REST + marshal.dumps(code)
