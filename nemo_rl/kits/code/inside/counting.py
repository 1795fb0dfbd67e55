"""Rewrite tests so that each assert counts as a passed or failed check, and write the counts to a file.

assert                  passed if it ran and held each time; its failure does not end the test,
unless the test itself may catch it (`try`, `with`)
assert False            a failed check when it runs; without effect otherwise
assert in a loop        failed if the loop has no rounds
test without an assert  passed if it comes to its end, provided that something in it can fail
exception               a failed check, and with it all asserts of its test that did not run
"""

import ast
import os
import struct
from typing import Any

from program_tests import constant_value, is_constant, parse

_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_TRANSPARENT = (*_LOOPS, ast.With, ast.AsyncWith, ast.Try)


class Counts:
    """The passed and failed checks. The counts are written to the file of the verdict after each change.

    Args:
        verdict: Descriptor of the file of the verdict.
        num_known: Number of asserts in the tests, some of which may never run.
    """

    def __init__(self, verdict: int, num_known: int) -> None:
        self._verdict, self._num_known = verdict, num_known
        self._passed: set[int] = set()
        self._failed: set[int] = set()
        self._reached: set[int] = set()
        self._tests_passed = self._tests_failed = 0
        self.guards = 0
        self._write(False)

    @property
    def seen(self) -> int:
        """Number of checks that have a result so far."""
        return len(self._passed) + len(self._failed) + self._tests_failed

    @property
    def num_failed(self) -> int:
        """Number of failed checks so far."""
        return len(self._failed) + self._tests_failed

    def hold(self, number: int) -> None:
        """Record that an assert held."""
        if number not in self._passed and number not in self._failed:
            self._passed.add(number)
            self._write(False)

    def fail(self, number: int) -> bool:
        """Record that an assert failed, and return True if its exception must be raised further in the test."""
        if self.guards:
            return True
        self._passed.discard(number)
        self._failed.add(number)
        self._write(False)
        return False

    def fail_always(self) -> None:
        """Record that an assert ran that always fails."""
        self.add(False)

    def reach(self, *numbers: int) -> None:
        """Record that the loop around some asserts has started."""
        self._reached.update(numbers)

    def has_reached(self, numbers: set[int]) -> bool:
        """Return whether the loop of one of these asserts has started."""
        return not self._reached.isdisjoint(numbers)

    def add(self, passed: bool) -> None:
        """Count a test without asserts, or an exception outside of an assert, as one check."""
        self._tests_passed += passed
        self._tests_failed += not passed
        self._write(False)

    def fail_rest(self, numbers: set[int]) -> int:
        """Count the asserts that have no result yet as failed, and return their number."""
        rest = numbers - self._passed - self._failed
        self._failed |= rest
        self._write(False)
        return len(rest)

    def finish(self) -> None:
        """Write the final counts. Asserts in loops that began without running them have failed."""
        self._failed |= self._reached - self._passed
        self._write(True)

    def _write(self, finished: bool) -> None:
        passed, failed = len(self._passed) + self._tests_passed, self.num_failed
        known = 0 if finished else self._num_known + self._tests_passed + self._tests_failed
        os.pwrite(self._verdict, struct.pack("<QQQ?", passed, failed, known, finished), 0)

    def __enter__(self) -> None:
        self.guards += 1

    def __exit__(self, *error: object) -> None:
        self.guards -= 1


class Counted(ast.NodeTransformer):
    """Rewrite asserts, so that each reports its result to `Counts`."""

    def __init__(self) -> None:
        self.number = 0
        """Number of asserts so far."""
        self._numbers: dict[int, int] = {}

    def tree(self, code: str) -> ast.Module:
        """Return the syntax tree of tests with rewritten asserts. Each function, class and module knows its asserts."""
        tree = parse(code)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assert) and not is_constant(node.test):
                self._numbers[id(node)] = self.number
                self.number += 1
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                node.asserts = self._inside(node)  # type: ignore[union-attr]
        changed: ast.Module = self.visit(tree)
        return ast.fix_missing_locations(changed)

    def visit_Assert(self, node: ast.Assert) -> Any:
        """Rewrite an assert, so that its result is counted."""
        number = self._numbers.get(id(node))
        self.generic_visit(node)
        if number is None:
            if constant_value(node.test):
                return ast.Pass()
            return [*parse("__checks__.fail_always()").body, node]
        counted = parse(
            f"try:\n  pass\nexcept Exception:\n  if __checks__.fail({number}):\n    raise\n"
            f"else:\n  __checks__.hold({number})"
        ).body[0]
        assert isinstance(counted, ast.Try)
        counted.body = [node]
        return counted

    def visit_For(self, node: ast.For) -> Any:
        """Add a statement before a loop that reports the asserts in it."""
        return self._loop(node)

    def visit_While(self, node: ast.While) -> Any:
        """Add a statement before a loop that reports the asserts in it."""
        return self._loop(node)

    def visit_AsyncFor(self, node: ast.AsyncFor) -> Any:
        """Add a statement before a loop that reports the asserts in it."""
        return self._loop(node)

    def visit_Try(self, node: ast.Try) -> Any:
        """Make a failing assert in a `try` body raise, so that the test's own `except` clauses can catch it."""
        self.generic_visit(node)
        if node.handlers:
            node.body = self._guarded(node.body)
        for handler in node.handlers:
            if handler.type is not None:
                handler.type = _Stops().visit(handler.type)
        return node

    def visit_With(self, node: ast.With) -> Any:
        """Let the exceptions of asserts reach the context managers of the test."""
        self.generic_visit(node)
        node.body = self._guarded(node.body)
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        """Let `float` convert objects of a solution too, and let `StopIteration` match the solution's errors too."""
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "float" and len(node.args) == 1 and not node.keywords:
            node.func = ast.Name("__float__", ast.Load())
        node.args = [_Stops().visit(one) if isinstance(one, ast.Name | ast.Tuple) else one for one in node.args]
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        """Replace imports from the solution by assignments, because the names of the solution exist already."""
        if node.module != "solution" or node.level:
            return node
        pairs = [(one.asname, one.name) for one in node.names if one.asname and one.name != "*"]
        return [ast.Assign([ast.Name(to, ast.Store())], ast.Name(name, ast.Load())) for to, name in pairs] or ast.Pass()

    def visit_Import(self, node: ast.Import) -> Any:
        """Replace an import of the solution by an assignment of an object that represents the solution's module."""
        own = [one for one in node.names if one.name == "solution"]
        node.names = [one for one in node.names if one.name != "solution"]
        given: list[ast.stmt] = [node] if node.names else []
        for one in own:
            given += parse(f"{one.asname or one.name} = __solution__").body
        return given

    def _loop(self, node: Any) -> Any:
        inside = _directly(node)
        numbers = sorted(self._numbers[id(one)] for one in inside if id(one) in self._numbers)
        self.generic_visit(node)
        noted = parse(f"__checks__.reach({', '.join(map(str, numbers))})").body
        return [*noted, node] if numbers else node

    def _guarded(self, body: list[ast.stmt]) -> list[ast.stmt]:
        if not any(isinstance(one, ast.Assert | ast.Call) for each in body for one in ast.walk(each)):
            return body
        guard = ast.With([ast.withitem(ast.Name("__checks__", ast.Load()))], body)
        return [guard]

    def _inside(self, node: ast.AST) -> set[int]:
        return {self._numbers[id(one)] for one in ast.walk(node) if id(one) in self._numbers}


class _Stops(ast.NodeTransformer):
    """Replace `StopIteration` by a tuple with the error that represents a `StopIteration` of the solution."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id != "StopIteration":
            return node
        return ast.Tuple([node, ast.Name("__StopError__", ast.Load())], ast.Load())

    def visit_Tuple(self, node: ast.Tuple) -> ast.expr:
        own = ast.Name("__StopError__", ast.Load())
        stops = any(isinstance(one, ast.Name) and one.id == "StopIteration" for one in node.elts)
        return ast.Tuple([*node.elts, own], node.ctx) if stops else node


def _directly(loop: ast.AST) -> list[ast.AST]:
    """Return the asserts that run in each round of a loop, including asserts in inner loops."""
    found: list[ast.AST] = []
    stack: list[ast.AST] = list(getattr(loop, "body", []))
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Assert):
            found.append(node)
        elif isinstance(node, _TRANSPARENT):
            stack += node.body
    return found
