"""Run the tests of a solution that runs in another program.

The program is started as `main.py INCOMING OUTGOING VERDICT` in a folder with `tests.json`. Names that neither the
tests nor Python define are looked up in the solution. After each check, counts are written into the file VERDICT, which
the solution's program cannot access. Invariant: it reaches only those objects of this program that a test gives to it.
"""

import ast
import builtins
import importlib
import json
import os
import secrets
import sys
import types
from typing import Any, NoReturn

from counting import Counted, Counts
from offers import ARITHMETIC, NUMERIC, REQUESTS, SPECIAL
from peer import Name, Peer, Remote, StopError, ask_of, tainted
from program_tests import attributes_of_names, called_names, has_check, is_plain_test_class, methods, tests_to_call
from values import COMPARED, Channel

_FORBIDDEN = {
    *("eval", "exec", "compile", "open", "__import__", "globals", "locals", "vars", "getattr", "setattr", "delattr"),
    *("input", "breakpoint", "type", "super", "format", "format_map", "help", "dir", "exit", "quit"),
}
_HIDDEN = (types.ModuleType, types.FrameType, types.CodeType, types.TracebackType, types.CoroutineType)
_OF_FUNCTIONS = {"__name__", "__qualname__", "__doc__", "__module__"}
_ALLOWED = {*SPECIAL, "get", "set", "delete", "isinstance", "issubclass", "str", "repr", "format", "hash"}
_ORDERED = {"__eq__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__"}


class Solution(Peer):
    """Program of the solution, as the tests use it."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel, 0)
        if self._receive().get("ready", "") is not None:
            self._end()

    def special(self, name: str, remote: Remote, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Return the result of a special method of the solution's object.

        A result counts if the object compares or combines itself with another object of the solution. A result with
        plain data, such as equality with 9, does not count, nor does a comparison that also holds with a random text.
        """
        other = arguments[0] if arguments else None
        base = object.__getattribute__(remote, "_remote_base")
        if name in COMPARED | ARITHMETIC and not isinstance(other, Remote):
            if base is not None:
                plain = getattr(ask_of(remote, "plain"), name, None)
                return NotImplemented if plain is None else plain(*arguments)
            return NotImplemented if name in COMPARED else self._mixed(name, remote, arguments)
        if name in NUMERIC and object.__getattribute__(remote, "_remote_tainted"):
            raise TypeError("a number made of a solution's object and plain data says nothing")
        found = super().special(name, remote, arguments, keywords)
        if name in _ORDERED and found and self._says_it_of_anything(name, remote):
            return False
        return found

    def _mixed(self, name: str, remote: Remote, arguments: tuple[Any, ...]) -> Any:
        found = self.ask(name, remote, *arguments)
        if not isinstance(found, Remote):
            return NotImplemented
        return tainted(found)

    def _says_it_of_anything(self, name: str, remote: Remote) -> bool:
        try:
            return bool(self.ask(name, remote, secrets.token_hex(8)))
        except Exception:
            return False

    def permit(self, do: str, target: Any, arguments: tuple[Any, ...]) -> None:
        """Refuse a request that could read or change more than a test has given to the solution."""
        if do not in _ALLOWED or isinstance(target, str | bytes):
            raise AttributeError(f"tests do not offer {do}")
        is_code = isinstance(target, types.FunctionType | types.BuiltinFunctionType | types.MethodType | type)
        if do in ("get", "set", "delete"):
            name = arguments[0]
            hidden = str(name).startswith("_") or name in _FORBIDDEN
            if type(name) is not str or (hidden and not (is_code and do == "get" and name in _OF_FUNCTIONS)):
                raise AttributeError(name)
            if is_code and (do != "get" or (not isinstance(target, type) and name not in _OF_FUNCTIONS)):
                raise AttributeError(name)

    def permit_reference(self, value: Any) -> None:
        """Refuse to let the solution use an object through which it could reach the tests."""
        name, module = getattr(value, "__name__", ""), str(getattr(type(value), "__module__", ""))
        if isinstance(value, _HIDDEN) or name in _FORBIDDEN or module.split(".")[0] in ("operator", "counting", "peer"):
            raise TypeError(f"tests cannot pass a {type(value).__name__} to a solution")
        if module.startswith("unittest") and "mock" not in module:
            raise TypeError("tests cannot pass a test case to a solution")

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request of the solution about an object that a test has given to the solution."""
        target = request.get("target")
        while isinstance(target, dict) and target.get("type") == "attribute":
            target = target["value"][0]
        if not isinstance(target, dict) or target.get("type") != "mine" or request.get("do") not in REQUESTS:
            self._end()
        return super().answer(request)

    def print(self, text: str) -> None:
        """Write the solution's output to standard output, which a test may have redirected."""
        sys.stdout.write(text)

    def _receive(self) -> dict[str, Any]:
        try:
            message = super()._receive()
        except (OSError, EOFError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
            self._end()
        if not isinstance(message, dict) or not message.keys() & {"ready", "do", "result", "error"}:
            self._end()
        return message

    def _end(self) -> NoReturn:
        """Exit before the end of the tests, because no later test can pass without the solution."""
        os._exit(0)


class Names(dict[str, Any]):
    """The global names of the tests. Names that the tests do not define are looked up in the solution.

    Args:
        solution: Program that defines the other names.
        modules: Modules of the standard library that tests use without an import.
    """

    def __init__(self, solution: Solution, modules: set[str]) -> None:
        super().__init__(__name__="__main__", __builtins__=builtins, __StopError__=StopError, __float__=as_float)
        self._solution = solution
        self._modules = modules
        self._kept: dict[str, Any] = {}

    def __missing__(self, name: str) -> Any:
        """Return the current value of a name in the solution. A function or class is remembered."""
        if name in self._kept:
            return self._kept[name]
        if hasattr(builtins, name):
            raise KeyError(name)
        if name in self._modules:
            self[name] = importlib.import_module(name)
            return self[name]
        found = self.of_solution(name)
        if callable(found):
            self._kept[name] = found
        return found

    def of_solution(self, name: str) -> Any:
        """Return the value of a name in the solution."""
        try:
            return self._solution.ask("value", Name(name))
        except NameError as error:
            raise KeyError(name) from error


def as_float(value: Any) -> float:
    """Return `float(value)`, also for an object of the solution, which the built-in `float` cannot convert."""
    if not isinstance(value, Remote):
        return float(value)
    if object.__getattribute__(value, "_remote_tainted"):
        raise TypeError("a number made of a solution's object and plain data says nothing")
    return float(ask_of(value, "__float__"))


class TestsRun:
    """Run tests one after another.

    Args:
        names: The names of the tests.
        counts: Receives the results.
        trees: Syntax trees of all tests and of their setup.
    """

    def __init__(self, names: Names, counts: Counts, trees: list[ast.Module]) -> None:
        self._names, self._counts, self._trees = names, counts, trees

    def all(self, tree: ast.Module, to_call: list[Any], can_fail: bool) -> None:
        """Run the code of a test, and then the test functions and test classes that this code defines."""
        self._one(lambda: exec(compile(tree, "tests.py", "exec"), self._names), tree, can_fail)
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                self._class(node)
            elif node in to_call and node.name in self._names:  # type: ignore[attr-defined]
                self._one(self._names[node.name], node, True)  # type: ignore[attr-defined]

    def _class(self, node: ast.ClassDef) -> None:
        kind = self._names.get(node.name)
        unittest: Any = sys.modules.get("unittest")
        if unittest is not None and isinstance(kind, type) and issubclass(kind, unittest.TestCase):
            for name in unittest.TestLoader().getTestCaseNames(kind):
                result = unittest.TestResult()
                own = next((one for one in methods(node) if one.name == name), node)
                self._one(lambda name=name, result=result: _run_case(unittest, kind(name), result), own, True)
        elif is_plain_test_class(node) and isinstance(kind, type):
            for method in methods(node):
                if method.name.startswith("test"):
                    self._one(lambda name=method.name: _run_method(kind, name), method, True)

    def _one(self, run: Any, node: Any, can_fail: bool) -> None:
        """Run a part of the tests, which counts as one check if it has no asserts."""
        counts = self._counts
        seen, failed = counts.seen, counts.num_failed
        try:
            outcome = run()
        except BaseException:  # also an exit of the solution, or of the tests
            counts.guards = 0
            if not counts.fail_rest(node.asserts) and counts.num_failed == failed:
                counts.add(False)
            return
        if can_fail and outcome is not SKIPPED and counts.seen == seen and not counts.has_reached(node.asserts):
            counts.add(True)


SKIPPED = object()
"""Result of a test that did not run."""


def _run_case(unittest: Any, case: Any, result: Any) -> Any:
    unittest.TestSuite([case]).run(result)
    if result.failures or result.errors or result.unexpectedSuccesses:
        raise AssertionError("a test case failed")
    return SKIPPED if result.skipped else None


def _run_method(kind: type[Any], name: str) -> None:
    instance = kind()
    for before in ("setup_method", "setUp"):
        if hasattr(instance, before):
            getattr(instance, before)()
    getattr(instance, name)()


def modules_without_import(trees: list[ast.Module]) -> set[str]:
    """Return the modules of which tests read existing attributes, and nothing else, without an import."""
    found, called = set(), called_names(trees)
    for name, attributes in attributes_of_names(trees).items():
        if name in sys.stdlib_module_names and name not in called and name not in ("this", "antigravity", "idlelib"):
            try:
                module = importlib.import_module(name)
            except Exception:
                continue
            if all(hasattr(module, one) for one in attributes):
                found.add(name)
    return found


def prepared(code: str) -> None:
    """Replace `unittest.main` by a function that does nothing, because test classes run without it."""
    if "unittest" in code:
        unittest: Any = importlib.import_module("unittest")
        unittest.main = lambda *arguments, **keywords: None


def _name(node: ast.stmt) -> str | None:
    return getattr(node, "name", None)


def main(incoming: int, outgoing: int, verdict: int) -> None:
    """Run all tests."""
    with open("tests.json", encoding="utf-8") as file:
        plan = json.load(file)
    counted = Counted()
    originals = [ast.parse(code.removeprefix("\ufeff")) for code in (plan["setup"], *plan["tests"])]
    setup, *trees = [counted.tree(code) for code in (plan["setup"], *plan["tests"])]
    counts = Counts(verdict, counted.number)
    solution = Solution(Channel(incoming, outgoing))
    names = Names(solution, modules_without_import(originals))
    names["__checks__"] = counts
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
    prepared(plan["setup"] + "".join(plan["tests"]))
    run = TestsRun(names, counts, originals)
    try:
        names["__solution__"] = solution.ask("value", Name("__solution__"))
        exec(compile(setup, "setup.py", "exec"), names)
        names.update({name: names.of_solution(name) for name in plan["names"]})
    except BaseException:
        counts.add(False)
    for original, tree in zip(originals[1:], trees, strict=True):
        to_call = {node.name for node in tests_to_call(original, originals) if node in original.body}
        called = [node for node in tree.body if _name(node) in to_call]
        rest = [node for node in original.body if not (isinstance(node, ast.ClassDef) or _name(node) in to_call)]
        run.all(tree, called, has_check(ast.Module(rest, []), originals))
    counts.finish()
