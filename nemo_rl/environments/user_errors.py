"""Describe errors that the user's code raises.

The user's code may also raise exceptions that are no `Exception`, such as a `CancelledError` of one of its own tasks or
`pytest.skip`. For this reason callers run it inside a `Boundary(BaseException)`.
"""

import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nemo_rl.host.boundary import Boundary

MOST_LINES = 15
"""Largest number of lines of a report."""

USER_MISTAKES = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError, RuntimeError)
"""Errors that mistakes in code usually raise."""

_MOST_FRAMES = 4
_WIDTH = 300
_FRAME = re.compile(
    r'^\s*File "([^"\n]{1,4096})", line (\d{1,9}), in ([^\n]{1,200})\n(?:[ \t]{2,}([^\n]{0,500}))?', re.M
)
_ESCAPES = re.compile(r"\x1b\[[0-9;]{0,20}[A-Za-z]")
_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class CodeLine:
    """Line of code that an error passed through."""

    file: str
    number: int
    """Number of the line in its file."""
    function: str
    """Function that the line belongs to."""
    text: str = ""
    """Text of the line, which is empty if the line cannot be read."""

    @property
    def is_users(self) -> bool:
        """True if the line belongs to the user's code: not to this library, an installed package or Python."""
        path = Path(self.file)
        if self.file.startswith("<") or {"site-packages", "dist-packages"} & set(path.parts):
            return False
        if path.parent == _PACKAGE.parent / "examples" and path.name.startswith("run_"):
            return False
        return not any(path.is_relative_to(folder) for folder in _folders_of_others())

    def __str__(self) -> str:
        code = f"\n    {self.text.strip()[:_WIDTH]}" if self.text.strip() else ""
        return f'  File "{self.file}", line {self.number}, in {self.function}{code}'


def user_lines(error: BaseException) -> list[CodeLine]:
    """Return the lines of the user's code that an error or one of its causes has passed, the innermost last."""
    for each in reversed(list(_chain(error))):
        frames = traceback.extract_tb(each.__traceback__)
        here = [CodeLine(f.filename, f.lineno or 0, f.name, f.line or "") for f in frames]
        lines = [line for line in (*here, *lines_in(_whole_text_of(each))) if line.is_users]
        if lines:
            return lines
    return []


def lines_in(text: str) -> list[CodeLine]:
    """Return the lines of code that a text names in a traceback inside it."""
    plain = _ESCAPES.sub("", text)
    found = (match.groups() for match in _FRAME.finditer(plain))
    return [CodeLine(file, int(number), function, code or "") for file, number, function, code in found]


def report(error: BaseException) -> str | None:
    """Return the user's lines and the error in at most `MOST_LINES` lines, or None if no line is of the user's code."""
    lines = user_lines(error)
    if not lines:
        return None
    notes = [note for each in _chain(error) for note in getattr(each, "__notes__", [])]
    shown = "\n".join(map(str, lines[-_MOST_FRAMES:])).splitlines()
    head = ["A mistake in your own code (frames of libraries are left out):", *dict.fromkeys(notes)]
    what = f"{type(error).__name__}: {_first_lines(error)}".splitlines()
    room = MOST_LINES - len(shown) - len(head)
    return "\n".join([*head, *shown, *what[: max(room, 1)]])


def _first_lines(error: BaseException) -> str:
    """Return the text of an error without the traceback that PyTorch and Ray put into it."""
    text = _ESCAPES.sub("", _whole_text_of(error))
    rows = [row for row in text.splitlines() if row.strip()]
    if any("Traceback (most recent call last)" in row for row in rows):
        rows = rows[-1:]
    return "\n".join(row[:_WIDTH] for row in rows)


def _whole_text_of(error: BaseException) -> str:
    """Return the text of an error. The class of the error may be the user's own, whose `__str__` may raise."""
    notes = {row for note in getattr(error, "__notes__", []) for row in str(note).splitlines()}
    rows = "".join(traceback.format_exception_only(error)).splitlines()
    return "\n".join(row for row in rows if row not in notes).partition(": ")[2]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and then the chain of errors that it was raised from."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _folders_of_others() -> list[Path]:
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    return [_PACKAGE, *(Path(sysconfig.get_path(kind)) for kind in kinds), Path(sys.base_prefix) / "lib"]


def describe(error: BaseException) -> str:
    """Describe an error by its type, its text and the innermost line of code, by preference one of the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = user_lines(error) or [CodeLine(frame.filename, frame.lineno or 0, frame.name) for frame in frames]
    place = f" ({os.path.basename(lines[-1].file)}:{lines[-1].number})" if lines else ""
    return f"{type(error).__name__}: {_text_of(error)}{place}"


def _text_of(error: BaseException) -> str:
    with Boundary(BaseException) as caught:  # the class may be the user's own
        return str(error)
    return f"(its text raises {type(caught.take()).__name__})"
