"""Run the blocks of code of an episode one after another, and print what the last one prints.

Started as `main.py` next to `session.json` with `blocks` and `context`, the variables that they start with. As in an
interactive Python, the value of an expression at the end of a block is printed. Earlier blocks only rebuild the
variables: their output is dropped.
"""

import ast
import contextlib
import json
import os
import sys
import traceback
from typing import Any

sys.path.insert(0, os.getcwd())

from values import decode


def run(block: str, names: dict[str, Any]) -> None:
    """Run a block; print the value of its last expression."""
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


def main() -> None:
    """Run all blocks."""
    with open("session.json", encoding="utf-8") as file:
        session = json.load(file)
    names = {"__name__": "__main__", **decode(session["context"])}
    *earlier, last = session["blocks"]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        for block in earlier:
            with contextlib.suppress(Exception):
                run(block, names)
    try:
        run(last, names)
    except Exception:
        kind, error, place = sys.exc_info()
        while place is not None and place.tb_frame.f_code.co_filename != "<code>":
            place = place.tb_next
        traceback.print_exception(kind, error, place)
        sys.exit(1)


if __name__ == "__main__":
    main()
