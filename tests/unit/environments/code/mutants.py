"""Change reference solutions in one place, and run programs in plain Python to see what tests say about them."""

import ast
import copy
import json
import os
import random
import resource
import signal
import sys
from collections.abc import Iterator

_COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_COMPUTED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.Mult,
}
_SIMPLE = (ast.Assign, ast.AugAssign, ast.Expr)
_SECONDS = 10
_MEMORY = 1 << 30


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield other nodes for a node."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        yield ast.Compare(node.left, [_COMPARED[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield ast.Constant(node.value + 1)
        yield ast.Constant(node.value - 1)
    elif isinstance(node, ast.Constant) and type(node.value) is str:
        yield ast.Constant(node.value + "x")
    elif isinstance(node, ast.BinOp) and type(node.op) in _COMPUTED:
        yield ast.BinOp(node.left, _COMPUTED[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Return):
        yield ast.Return(ast.Constant(None))
        yield ast.Raise(ast.Call(ast.Name("StopIteration", ast.Load()), [], []), None)
        if node.value is not None:
            yield ast.Return(ast.List([node.value], ast.Load()))
    elif isinstance(node, _SIMPLE):
        yield ast.Pass()


class _Replace(ast.NodeTransformer):
    def __init__(self, at: int, number: int) -> None:
        self.at, self.number, self.seen = at, number, -1

    def generic_visit(self, node: ast.AST) -> ast.AST:
        self.seen += 1
        if self.seen == self.at:
            return list(_changes(node))[self.number]
        return super().generic_visit(node)


def mutants(code: str, function: str | None, count: int, seed: str) -> list[str]:
    """Return up to this many programs that differ from `code` in one place, inside of `function` if one is named."""
    tree = ast.parse(code)
    sites: list[tuple[int, int]] = []
    inside: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (function is None or node.name == function):
            body = node.body[1:] if isinstance(node.body[0], ast.Expr) and len(node.body) > 1 else node.body
            inside |= {id(one) for statement in body for one in ast.walk(statement)}

    class Find(ast.NodeTransformer):
        seen = -1

        def generic_visit(self, node: ast.AST) -> ast.AST:
            self.seen += 1
            if id(node) in inside:
                sites.extend((self.seen, number) for number, _ in enumerate(_changes(node)))
            return super().generic_visit(node)

    Find().visit(tree)
    random.Random(seed).shuffle(sites)
    made: list[str] = []
    for at, number in sites:
        text = ast.unparse(ast.fix_missing_locations(_Replace(at, number).visit(copy.deepcopy(tree))))
        if text not in made:
            made.append(text)
        if len(made) == count:
            break
    return made


def passes(program: str) -> bool:
    """Return whether a program comes to its end in a process of its own."""
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        signal.alarm(_SECONDS)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        try:
            exec(compile(program, "program", "exec"), {"__name__": "__main__"})
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    programs = json.load(sys.stdin)
    json.dump([passes(program) for program in programs], sys.stdout)
