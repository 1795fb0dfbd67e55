"""Run the tests of a solution that lives in another program.

Started as `main.py INCOMING OUTGOING VERDICT` next to `tests.json`. Names that the tests do not define stand for those
of the solution; calls go through the pipes, and only plain data comes back. After every check the counts are written
into the file VERDICT, which the solution's program does not have.
"""

import ast
import builtins
import importlib
import json
import os
import struct
import sys
from typing import Any, NoReturn

sys.path.insert(0, os.getcwd())

from values import Channel, decode, encode


class SolutionError(Exception):
    """The solution raised an exception that is not one of Python's own."""


class Counts:
    """Passed and failed checks, written down after each."""

    def __init__(self, verdict: int, num_known: int) -> None:
        self._verdict, self._num_known = verdict, num_known
        self.passed = self.failed = 0
        self.write(False)

    def add(self, passed: bool) -> None:
        """Count one check."""
        self.passed += passed
        self.failed += not passed
        self.write(False)

    def write(self, finished: bool) -> None:
        """Write the counts."""
        os.pwrite(self._verdict, struct.pack("<QQQ?", self.passed, self.failed, self._num_known, finished), 0)


class Remote:
    """A function, class or object of the solution. Two of them are never equal: equality is the tests' business."""

    def __init__(self, solution: "Solution", reference: dict[str, Any]) -> None:
        self.__dict__.update(solution=solution, reference=reference)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call it in the solution's program."""
        asked = {"arguments": encode(list(arguments), refer), "keywords": encode(keywords, refer)}
        return vars(self)["solution"].ask({"do": "call", "target": vars(self)["reference"], **asked})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return vars(self)["solution"].ask({"do": "get", "target": vars(self)["reference"], "name": name})

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)["solution"].ask(
            {"do": "set", "target": vars(self)["reference"], "name": name, "value": encode(value, refer)}
        )


def refer(value: Any) -> dict[str, Any]:
    """Return the reference of a remote object."""
    if isinstance(value, Remote):
        return vars(value)["reference"]
    raise TypeError(f"tests cannot pass a {type(value).__name__} to a solution")


class Solution:
    """The other program."""

    def __init__(self, channel: Channel, counts: Counts) -> None:
        self._channel, self._counts = channel, counts
        if self._receive()["ready"] is not None:
            self._end()

    def ask(self, request: dict[str, Any]) -> Any:
        """Return the result of a request, or raise the solution's exception."""
        self._channel.send(request)
        answer = self._receive()
        if "error" not in answer:
            return decode(answer["result"], lambda data: Remote(self, data))
        for name in [answer["error"], *answer["bases"]]:
            kind = getattr(builtins, name, None)
            if isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception:
                raise _made(kind, answer["text"])
        raise SolutionError(answer["text"])

    def _receive(self) -> Any:
        try:
            return self._channel.receive()
        except (EOFError, OSError, ValueError, RecursionError):
            self._end()

    def _end(self) -> NoReturn:
        """End the tests: nothing that follows can pass without a solution."""
        self._counts.add(False)
        os._exit(0)


def _made(kind: type[Exception], text: str) -> Exception:
    try:
        return kind(text)
    except TypeError:  # such as UnicodeDecodeError, which takes five arguments
        return SolutionError(text)


class _CountedAsserts(ast.NodeTransformer):
    """Turns `assert x` into a check that is counted and does not end the test."""

    def __init__(self) -> None:
        self.number = 0

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        if isinstance(node.test, ast.Constant):
            return ast.Pass()  # `assert True` says nothing about a solution
        self.number += 1
        counted = ast.parse("try:\n  pass\nexcept Exception:\n  __count__(False)\nelse:\n  __count__(True)").body[0]
        assert isinstance(counted, ast.Try)
        counted.body = [node]
        return counted


def free_names(tree: ast.AST) -> set[str]:
    """Return the names that code reads and neither defines nor finds among Python's own."""
    read: set[str] = set()
    defined = set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).split(".")[0])
    return read - defined


def main(incoming: int, outgoing: int, verdict: int) -> None:
    """Run all tests."""
    with open("tests.json", encoding="utf-8") as file:
        plan = json.load(file)
    counted = _CountedAsserts()
    names: dict[str, Any] = {"__name__": "tests"}
    trees = [ast.fix_missing_locations(counted.visit(ast.parse(code))) for code in plan["tests"]]
    counts = Counts(verdict, counted.number)
    solution = Solution(Channel(incoming, outgoing), counts)
    setup = ast.parse(plan["setup"])
    everything = ast.Module([*setup.body, *(one for tree in trees for one in tree.body)], [])
    called = {
        node.func.id for node in ast.walk(everything) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    for name in free_names(everything):
        if name in sys.stdlib_module_names and name not in called:
            names[name] = importlib.import_module(name)
        else:
            names[name] = Remote(solution, {"type": "name", "value": name})
    names["__count__"] = counts.add
    try:
        exec(compile(setup, "setup.py", "exec"), names)
        names.update({name: Remote(solution, {"type": "name", "value": name}) for name in plan["names"]})
    except Exception:
        counts.add(False)
    for tree in trees:
        try:
            exec(compile(tree, "tests.py", "exec"), names)
        except Exception:
            counts.add(False)
    counts.write(True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
