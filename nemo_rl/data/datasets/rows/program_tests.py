"""Analyse the source code of tests: find their checks, and decide whether they can judge a solution.

This file also runs in the sandbox, so it imports only the standard library.
"""

import ast
import builtins
import re
import symtable
import sys
import warnings
from collections.abc import Iterator, Sequence

SOLUTION = "solution"
"""Module from which tests may import the names of a solution."""
_CHECKING = re.compile(r"_*(assert|fail(_|$|[A-Z]))")
_INPUT = {"builtins.input", "sys.stdin", "input", "stdin"}
_OWN_NAMES = frozenset(dir(builtins))
_MODULES = frozenset(sys.stdlib_module_names)

type Function = ast.FunctionDef | ast.AsyncFunctionDef


def parse(code: str) -> ast.Module:
    """Return the syntax tree of source code.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: The code is not valid Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about escape sequences in the code
        return ast.parse(code.removeprefix("\ufeff"))


def reason_against(tests: Sequence[str], setup: str = "", names: Sequence[str] = ()) -> str | None:
    """Return why tests cannot judge a solution, or None if they can.

    Args:
        tests: Source code of each test.
        setup: Source code that runs before the tests.
        names: Names that the solution defines, although Python or `setup` also defines them.
    """
    codes, trees = (setup, *tests), []
    for number, code in enumerate(codes):
        try:
            trees.append(parse(code))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compile(trees[-1], "tests", "exec")  # finds more errors than `parse`
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            name = f"test {number}" if number else "the setup of the tests"
            return f"{name} is no Python ({getattr(error, 'msg', None) or type(error).__name__})"
    text = "\n".join(codes)
    if "import" in text and (missing := sorted(missing_modules(trees))):
        return f"the tests need the module {missing[0]}, which programs in the sandbox do not have"
    replaced = (name for tree in trees for name in replaced_inputs(tree))
    if ("stdin" in text or "input" in text) and (source := next(replaced, None)):
        return f"the tests replace {source}, which a solution in another process does not see"
    for function in (one for tree in trees for one in tests_to_call(tree, trees)):
        if required_parameters(function):
            return f"the test function {function.name} has parameters, which nothing gives"
        if isinstance(function, ast.AsyncFunctionDef):
            return f"the test function {function.name} is a coroutine function, which nothing runs"
    if not any(has_check(tree, trees) for tree in trees):
        return "the tests have no check: no assert that runs and depends on the solution"
    if not names and not used_names(codes, trees):
        return "the tests use no name that only a solution defines (names that Python has too belong into 'names')"
    return None


def missing_modules(trees: Sequence[ast.AST]) -> set[str]:
    """Return the modules that tests import outside of `try`, and that the standard library does not have."""
    optional = {
        id(node) for tree in trees for one in ast.walk(tree) if isinstance(one, ast.Try) for node in ast.walk(one)
    }
    found: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import) and id(node) not in optional:
                found.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and id(node) not in optional:
                found.add("." if node.level else str(node.module).split(".")[0])
    return found - set(sys.stdlib_module_names) - {SOLUTION}


def replaced_inputs(tree: ast.AST) -> Iterator[str]:
    """Yield the names of the input functions and streams that tests replace in their own process."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in ("stdin", "input"):
            yield ast.unparse(node)
        elif isinstance(node, ast.Call) and _name_of(node.func) in ("patch", "object", "setattr"):
            constants = [one.value for one in node.args if isinstance(one, ast.Constant)]
            yield from (str(one) for one in constants if isinstance(one, str) and one in _INPUT)


def used_names(codes: Sequence[str], trees: Sequence[ast.Module]) -> set[str]:
    """Return the names that tests read, but that neither they nor Python nor its modules define."""
    read: set[str] = set()
    defined: set[str] = set()
    for code in codes:
        _collect(symtable.symtable(code.removeprefix("\ufeff"), "tests", "exec"), read, defined)
    own = defined | _OWN_NAMES
    if read - own - _MODULES:
        return read - own - _MODULES
    imports = {
        alias.asname or alias.name
        for tree in trees
        for node in ast.walk(tree)
        if (isinstance(node, ast.ImportFrom) and node.module == SOLUTION)
        or (isinstance(node, ast.Import) and node.names[0].name == SOLUTION)
        for alias in node.names
    }
    return (read - own - (_MODULES - called_names(trees))) | imports


def called_names(trees: Sequence[ast.AST]) -> set[str]:
    """Return the names that the code calls."""
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}


def attributes_of_names(trees: Sequence[ast.AST]) -> dict[str, set[str]]:
    """Return the attributes of each name that tests read."""
    found: dict[str, set[str]] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                found.setdefault(node.value.id, set()).add(node.attr)
    return found


def tests_to_call(tree: ast.Module, trees: Sequence[ast.Module]) -> list[Function]:
    """Return the functions `test...` of a module, including methods, that no other code calls."""
    if not any(getattr(node, "name", "")[:4].lower() == "test" for node in tree.body):
        return []
    referenced = {node.id for one in trees for node in ast.walk(one) if isinstance(node, ast.Name)}
    functions: list[Function] = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test")
        and node.name not in referenced
    ]
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and is_plain_test_class(node):
            functions += [one for one in methods(node) if one.name.startswith("test")]
    return functions


def is_plain_test_class(node: ast.ClassDef) -> bool:
    """Return whether a class without a base class is a test class, so that its methods are tests."""
    return node.name.startswith("Test") and not node.bases and "__init__" not in {one.name for one in methods(node)}


def methods(node: ast.ClassDef) -> list[Function]:
    """Return the methods that a class defines."""
    return [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]


def required_parameters(function: Function) -> bool:
    """Return whether a test function has required parameters besides `self`."""
    given = function.args
    positional = [one.arg for one in (*given.posonlyargs, *given.args)]
    needed = len(positional) - len(given.defaults) - bool(positional[:1] == ["self"])
    return needed > 0 or any(default is None for default in given.kw_defaults)


def is_constant(test: ast.expr) -> bool:
    """Return whether an assert's condition is equal for all solutions, as with a non-empty tuple."""
    if isinstance(test, ast.Tuple) and test.elts:
        return True
    return not any(isinstance(node, ast.Name | ast.Call | ast.Attribute | ast.Await) for node in ast.walk(test))


def constant_value(test: ast.expr) -> bool:
    """Return the truth value of a condition for which `is_constant` is true."""
    if isinstance(test, ast.Tuple):
        return bool(test.elts)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return bool(eval(compile(ast.Expression(test), "tests", "eval"), {"__builtins__": {}}))
    except (ArithmeticError, LookupError, TypeError, ValueError):  # for example 1 / 0
        return False


def judges(node: ast.AST) -> bool:
    """Return whether a node is a check: an assert that may fail, a raise, or a call of a function that checks."""
    if isinstance(node, ast.Assert):
        return not (is_constant(node.test) and constant_value(node.test))
    if isinstance(node, ast.Call):
        return bool(_CHECKING.match(_name_of(node.func)))
    return isinstance(node, ast.Raise)


def has_check(tree: ast.AST, trees: Sequence[ast.Module]) -> bool:
    """Return whether code has a check that runs. A check in a function counts only if the code calls the function."""
    if any(judges(node) for node in getattr(tree, "body", ())):
        return True
    return _has_check(tree, _functions(trees), set(), set())


def _has_check(node: ast.AST, functions: dict[str, list[ast.AST]], seen: set[str], entered: set[int]) -> bool:
    stack = [(node, True)]
    while stack:
        one, is_root = stack.pop()
        if id(one) in entered:
            continue
        entered.add(id(one))
        if not is_root and isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and not one.name.startswith("test"):
            stack += [(each, False) for each in one.decorator_list]
            continue
        name = one.id if isinstance(one, ast.Name) else one.attr if isinstance(one, ast.Attribute) else None
        if name in functions and name not in seen:
            seen.add(name)
            stack += [(each, True) for each in functions[name]]
        if judges(one) and not (isinstance(one, ast.Call) and _name_of(one.func) in functions):
            return True
        stack += [(child, False) for child in ast.iter_child_nodes(one)]
    return False


def _functions(trees: Sequence[ast.Module]) -> dict[str, list[ast.AST]]:
    found: dict[str, list[ast.AST]] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.setdefault(node.name, []).append(node)
    return found


def _collect(table: symtable.SymbolTable, read: set[str], defined: set[str]) -> None:
    is_module = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (is_module or symbol.is_global()):
            read.add(symbol.get_name())
        if (is_module or symbol.is_declared_global()) and (symbol.is_assigned() or symbol.is_imported()):
            defined.add(symbol.get_name())
        if is_module and symbol.is_namespace():
            defined.add(symbol.get_name())
    for child in table.get_children():
        _collect(child, read, defined)


def _name_of(function: ast.expr) -> str:
    if isinstance(function, ast.Name):
        return function.id
    return function.attr if isinstance(function, ast.Attribute) else ""
