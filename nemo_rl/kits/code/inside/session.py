"""Run the blocks of code of an episode one after another, and print the output of the last block.

The program is started as `main.py` in a folder with `session.json`, which has `blocks` and `context` (the variables
before the first block). As in an interactive Python, the value of an expression at the end of a block is printed.
Earlier blocks run only to restore the variables, and their output is dropped. The exit code is `COMPLETED` if all
blocks ended, and `RAISED` if all ended and the last one raised an exception.
"""

import ast
import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

sys.path.insert(0, os.getcwd())

from values import COMPLETED, RAISED, decode


def run(block: str, names: dict[str, Any]) -> None:
    """Run a block and print the value of its last expression."""
    tree = ast.parse(block)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        exec(compile(tree, "<code>", "exec"), names)
    else:
        tree.body.pop()
        exec(compile(tree, "<code>", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "<code>", "eval"), names)
        if value is not None:
            sys.stdout.write(f"{value!r}\n")


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Drop everything that this process and its children write to standard output and standard error."""
    kept = [os.dup(1), os.dup(2)]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
        try:
            yield
        finally:
            for stream, descriptor in zip((1, 2), kept, strict=True):
                os.dup2(descriptor, stream)
                os.close(descriptor)


def main() -> int:
    """Run all blocks and return the exit code."""
    with open("session.json", encoding="utf-8") as file:
        session = json.load(file)
    names = {"__name__": "__main__", **decode(session["context"])}
    *earlier, last = session["blocks"]
    with silenced():
        for block in earlier:
            with contextlib.suppress(Exception, SystemExit):
                run(block, names)
    try:
        run(last, names)
    except SystemExit as request:  # as at the end of a script, where a text is the exit message
        if isinstance(request.code, str):
            sys.stderr.write(f"{request.code}\n")
    except Exception:
        kind, error, place = sys.exc_info()
        while place is not None and place.tb_frame.f_code.co_filename != "<code>":
            place = place.tb_next
        traceback.print_exception(kind, error, place)
        return RAISED
    return COMPLETED


if __name__ == "__main__":
    sys.exit(main())
