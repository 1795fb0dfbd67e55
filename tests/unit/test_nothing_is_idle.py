"""Every method that a user may implement is called by the library on some run.

The test reads the source with `ast`. A hook is a method of an abstract class that is abstract, or whose body does not
use `self`: a default to be replaced. Code in the package of the interface only forwards calls, as does a method of the
same name or a call through `super()`: another package has to call a public hook.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "nemo_rl"

HOSTED = {("SteppedEngine", "load_tensors"), ("SteppedEngine", "take_load")}
"""Called by `GenerationWorker` alone, which is in the package of the interface."""

type Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def library() -> Mapping[str, ast.Module]:
    """The library's files by their path within it, and its commands: a checkpoint is exported by one of those."""
    commands = [*(PACKAGE.parent / "examples").glob("*.py"), *(PACKAGE.parent / "examples/converters").glob("*.py")]
    return {
        path.relative_to(PACKAGE if PACKAGE in path.parents else PACKAGE.parent).as_posix(): ast.parse(
            path.read_text(encoding="utf-8")
        )
        for path in sorted([*PACKAGE.rglob("*.py"), *commands])
    }


PASSES_ON = {"environments/workers": "environments"}
"""Folders whose calls of hooks count as calls of their own package, because they pass on what others call."""


def last_name(node: ast.expr) -> str:
    """Return `ABC` of `abc.ABC` and `Generic` of `Generic[T]`."""
    if isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def hooks(trees: Mapping[str, ast.Module]) -> Iterator[tuple[str, str, str]]:
    """Return (package, class, method) of each method that a user may implement."""
    for file, tree in trees.items():
        yield from ((package_of(file), owner, name) for owner, name in hooks_in(tree))


@cache
def hooks_in(tree: ast.Module) -> list[tuple[str, str]]:
    """Return (class, method) of each method of a file that a user may implement."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and {"ABC", "ABCMeta"} & {
            last_name(base) for base in [*node.bases, *(keyword.value for keyword in node.keywords)]
        }:
            own = set(calls_of_its_own(node))
            names = [function.name for function in node.body if is_hook(function)]
            found += [(node.name, name) for name in names if name not in own]
    return found


def calls_of_its_own(node: ast.ClassDef) -> Iterator[str]:
    """Return the methods that a class calls on itself: they complete an algorithm of the class."""
    for function in node.body:
        for call in ast.walk(function):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            if getattr(call.func.value, "id", "") == "self" and call.func.attr != getattr(function, "name", ""):
                yield call.func.attr


def package_of(file: str) -> str:
    """Return the folder of a file; a folder below it is another package, unless it only passes calls on."""
    folder = str(Path(file).parent)
    return PASSES_ON.get(folder, folder)


def is_hook(node: ast.stmt) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("__"):
        return False
    names = {last_name(decorator) for decorator in node.decorator_list}
    if "abstractmethod" in names:
        return True
    uses_self = any(isinstance(inner, ast.Name) and inner.id == "self" for inner in ast.walk(node))
    return not node.name.startswith("_") and not names and not uses_self


@cache
def called_in(tree: ast.Module) -> frozenset[str]:
    """Return the names that `called_names` finds in a file."""
    return frozenset(called_names(tree))


def called_names(tree: ast.AST, inside: frozenset[str] = frozenset()) -> Iterator[str]:
    """Return names of methods called as `x.name(...)` or `x.name.remote(...)`, or named by a string.

    Args:
        tree: where to look.
        inside: names of the functions around it.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from called_names(node, inside | {node.name})
            continue
        if isinstance(node, ast.Call):
            yield from (name for name in names_in_call(node) if name not in inside)
        yield from called_names(node, inside)


def names_in_call(call: ast.Call) -> Iterator[str]:
    function = call.func
    if isinstance(function, ast.Attribute) and function.attr == "remote":
        function = function.value
    if isinstance(function, ast.Attribute):
        owner = function.value
        if not (isinstance(owner, ast.Call) and last_name(owner.func) == "super"):
            yield function.attr
    yield from (
        text.value for text in call.args if isinstance(text, ast.Constant) and isinstance(text.value, str)
    )  # `run_all("method", ...)`: a worker gets the name
    yield from (method.attr for method in call.args if isinstance(method, ast.Attribute))  # passed on, to be called


def idle_hooks(trees: Mapping[str, ast.Module]) -> set[tuple[str, str]]:
    callers: dict[str, set[str]] = {}
    for file, tree in trees.items():
        for name in called_in(tree):
            callers.setdefault(name, set()).add(package_of(file))
    idle = {
        (owner, name)
        for package, owner, name in hooks(trees)
        if not callers.get(name, set()) - (set() if name.startswith("_") else {package})
    }
    return idle - HOSTED


def test_every_hook_is_called_by_the_library():
    trees = library()
    found = {(owner, name) for _, owner, name in hooks(trees)}
    assert {owner for owner, _ in found} >= {
        "EnvironmentInterface",
        "GenerationInterface",
        "LoggerInterface",
        "PolicyInterface",
    }
    optional = {"open_episode", "close_episode", "global_post_process_and_metrics", "shutdown", "step"}
    assert {name for owner, name in found if owner == "EnvironmentInterface"} == optional
    assert idle_hooks(trees) == set()


def test_a_hook_without_a_caller_is_found():
    """Without any line that calls a hook of an environment, the test above fails."""
    calls = {
        "open_episode": ("experience/samples.py", "commands/regrade/replay.py", "agents/programs/environment.py"),
        "close_episode": ("experience/samples.py", "commands/regrade/replay.py", "agents/programs/environment.py"),
        "global_post_process_and_metrics": ("experience/post_processing.py", "kits/tools/grader.py"),
    }
    for name, files in calls.items():
        trees = dict(library())
        for file in files:
            source = (PACKAGE / file).read_text(encoding="utf-8")
            assert f"environment.{name}(" in source
            trees[file] = ast.parse(source.replace(f"environment.{name}(", "environment.other("))
        assert idle_hooks(trees) == {("EnvironmentInterface", name)}


def test_unused_hooks_are_found_and_forwarding_does_not_count_as_a_call():
    interface = """
import abc
class Interface(abc.ABC):
    @abc.abstractmethod
    def used(self): ...
    @abc.abstractmethod
    def remote(self): ...
    @abc.abstractmethod
    def by_name(self): ...
    @abc.abstractmethod
    def relayed(self): ...
    @abc.abstractmethod
    def mentioned(self): ...
    def optional(self, value):
        return value
    @abc.abstractmethod
    def hosted(self): ...
    @abc.abstractmethod
    def _private(self): ...
    def concrete(self):
        return self._private()
def host(thing):
    thing.hosted()
"""
    user = """
class Relay:
    def relayed(self):
        return self.inner.relayed()
    def optional(self, value):
        return super().optional(value)
def run(thing, group):
    thing.used()
    thing.remote.remote()
    group.run_all("by_name", 1)
    return thing.mentioned
"""
    idle = {("Interface", name) for name in ("relayed", "mentioned", "optional", "hosted")}
    assert idle_hooks({"one/interface.py": ast.parse(interface), "two/user.py": ast.parse(user)}) == idle
