"""Find which attributes of which classes a source reads: a small type inference over its syntax trees.

An access `x.key` counts as a read of `Section.key` only where `x` is known to be that section: from an annotation, an
assignment, or the attribute one level up. So `packing.enabled` says nothing about `dynamic_batching.enabled`.
Invariant: a value of unknown type reads nothing, so a gap of the inference reports a key as unused and hides none.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

type Function = ast.FunctionDef | ast.AsyncFunctionDef

_SAME_TYPE = {"replace", "deepcopy", "copy", "model_copy", "list", "tuple", "sorted", "reversed", "next", "chain"}
_DUMPS = {"model_dump", "vars", "asdict"}


@dataclass
class _Class:
    bases: list[str]
    annotations: dict[str, ast.expr] = field(default_factory=dict)
    assigned: dict[str, list[tuple[ast.expr, Function]]] = field(default_factory=lambda: defaultdict(list))
    methods: dict[str, Function] = field(default_factory=dict)


class AttributeReads:
    """Follows calls from some functions and records the attributes that they read.

    Args:
        sources: text of each file.

    Attributes:
        found: (class, attribute) pairs that are read, the class as it is known at the place.
        wholes: (class, function) pairs in which all values of a section are taken at once, or by computed names.
    """

    def __init__(self, sources: dict[Path, str]) -> None:
        self.found: set[tuple[str, str]] = set()
        self.wholes: set[tuple[str, str]] = set()
        self._classes: dict[str, _Class] = {}
        self._functions: dict[str, list[Function]] = defaultdict(list)
        self._aliases: dict[str, ast.expr] = {}
        self._file: dict[Function, Path] = {}
        self._owner: dict[ast.AST, str] = {}
        self._scope: dict[ast.AST, Function] = {}
        self._bound: dict[Function, dict[str, list[ast.expr]]] = {}
        self._busy: set[tuple[int, int]] = set()
        for path, text in sources.items():
            self._declare(_tree(text), path, None, None)

    def follow(self, starts: Callable[[Path], bool], skip: Callable[[str, ast.expr | None], bool]) -> None:
        """Read the functions of the files that `starts` accepts, and all that they call.

        Args:
            starts: whether all functions of a file are entry points.
            skip: name and return annotation of a function -> whether to leave it out.
        """
        waiting = [function for function, path in self._file.items() if starts(path)]
        seen = set(waiting)
        while waiting:
            for called in self._visit(waiting.pop()):
                if called not in seen and not skip(called.name, called.returns):
                    seen.add(called)
                    waiting.append(called)

    def ancestors(self, name: str) -> list[str]:
        """Return a class and all its bases by name."""
        known = self._classes.get(name)
        return [name] if known is None else [name, *(a for base in known.bases for a in self.ancestors(base))]

    def _declare(self, node: ast.AST, path: Path, owner: str | None, scope: Function | None) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                self._classes[child.name] = _Class([n for base in child.bases for n in _names(base)])
                self._declare(child, path, child.name, scope)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                self._functions[child.name].append(child)
                self._file[child], self._bound[child] = path, _bindings(child)
                if owner is not None:
                    self._owner[child] = owner
                    if isinstance(node, ast.ClassDef):
                        self._classes[owner].methods[child.name] = child
                if scope is not None:
                    self._scope[child] = scope
                self._declare(child, path, owner, child)
            else:
                self._declare_value(child, node, owner, scope)
                self._declare(child, path, owner, scope)

    def _declare_value(self, child: ast.AST, node: ast.AST, owner: str | None, scope: Function | None) -> None:
        if isinstance(child, ast.AnnAssign) and isinstance(node, ast.ClassDef) and isinstance(child.target, ast.Name):
            self._classes[node.name].annotations[child.target.id] = child.annotation
        elif isinstance(child, ast.Assign) and isinstance(node, ast.Module) and isinstance(child.targets[0], ast.Name):
            self._aliases[child.targets[0].id] = child.value
        elif isinstance(child, ast.TypeAlias) and isinstance(child.name, ast.Name):
            self._aliases[child.name.id] = child.value
        elif owner is not None and scope is not None and isinstance(child, ast.Assign):
            for target, value in _pairs(child.targets[0], child.value):
                if isinstance(target, ast.Attribute) and _names(target.value) == ["self"]:
                    self._classes[owner].assigned[target.attr].append((value, scope))

    def _visit(self, function: Function) -> Iterator[Function]:
        for node in _own_nodes(function):
            if isinstance(node, ast.Attribute):
                yield from self._access(function, node.value, node.attr, is_load=isinstance(node.ctx, ast.Load))
            if not isinstance(node, ast.Call):
                if isinstance(node, ast.Name):
                    yield from self._functions.get(node.id, ())
                continue
            called = _last_name(node.func)
            if called == "getattr" and len(node.args) > 1:
                name = node.args[1]
                if isinstance(name, ast.Constant):
                    yield from self._access(function, node.args[0], str(name.value), is_load=True)
                else:
                    self._whole(function, node.args[0])
            elif called in _DUMPS:
                self._whole(function, node.func.value if isinstance(node.func, ast.Attribute) else node.args[0])

    def _access(self, function: Function, value: ast.expr, attribute: str, is_load: bool) -> Iterator[Function]:
        for name in self._infer(value, function):
            if is_load:
                self.found.add((name, attribute))
            method = self._method(name, attribute)
            if method is not None:
                yield method

    def _whole(self, function: Function, value: ast.expr) -> None:
        self.wholes |= {(name, function.name) for name in self._infer(value, function)}

    def _method(self, name: str, attribute: str) -> Function | None:
        for ancestor in self.ancestors(name):
            known = self._classes.get(ancestor)
            if known is not None and attribute in known.methods:
                return known.methods[attribute]
        return None

    def _infer(self, node: ast.AST, function: Function) -> set[str]:
        """Return the classes that the value of an expression may have; a container has the types of its items."""
        key = (id(node), id(function))
        if key in self._busy:
            return set()
        self._busy.add(key)
        try:
            return self._infer_new(node, function)
        finally:
            self._busy.discard(key)

    def _infer_new(self, node: ast.AST, function: Function) -> set[str]:
        match node:
            case ast.Name(id="self" | "cls"):
                return {self._owner[function]} if function in self._owner else set()
            case ast.Name(id=name):
                return self._type_of_name(name, function)
            case ast.Attribute(value=value, attr=attribute):
                return set().union(*(self._member(name, attribute) for name in self._infer(value, function)))
            case ast.Call(func=func, args=args):
                called = _last_name(func)
                if called in self._classes:
                    return {called}
                if called in _SAME_TYPE:
                    parts = [*args, func.value] if isinstance(func, ast.Attribute) else args
                    return set().union(*(self._infer(part, function) for part in parts))
                if isinstance(func, ast.Name):
                    return set().union(*(self._types(f.returns, "") for f in self._functions.get(called, ())))
                return self._infer(func, function)
            case ast.Subscript(value=value) | ast.Await(value=value) | ast.Starred(value=value):
                return self._infer(value, function)
            case ast.IfExp(body=first, orelse=second):
                return self._infer(first, function) | self._infer(second, function)
            case ast.ListComp(elt=item) | ast.GeneratorExp(elt=item) | ast.SetComp(elt=item):
                return self._infer(item, function)
            case ast.BoolOp(values=items) | ast.Tuple(elts=items) | ast.List(elts=items):
                return set().union(*(self._infer(item, function) for item in items))
            case ast.BinOp(left=first, right=second):
                return self._infer(first, function) | self._infer(second, function)
            case ast.NamedExpr(value=value):
                return self._infer(value, function)
        return set()

    def _type_of_name(self, name: str, function: Function | None) -> set[str]:
        while function is not None:
            arguments = function.args
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                if argument.arg == name:
                    return self._types(argument.annotation, self._owner.get(function, ""))
            values = self._bound[function].get(name)
            if values is not None:
                return set().union(*(self._infer(value, function) for value in values))
            function = self._scope.get(function)
        return {name} if name in self._classes else set()

    def _member(self, name: str, attribute: str) -> set[str]:
        for ancestor in self.ancestors(name):
            known = self._classes.get(ancestor)
            if known is None:
                continue
            if attribute in known.annotations:
                return self._types(known.annotations[attribute], name)
            if attribute in known.methods:
                return self._types(known.methods[attribute].returns, name)
            if attribute in known.assigned:
                return set().union(*(self._infer(value, scope) for value, scope in known.assigned[attribute]))
        return set()

    def _types(self, annotation: ast.AST | None, owner: str) -> set[str]:
        found: set[str] = set()
        for name in _names(annotation):
            if name in self._classes:
                found.add(name)
            elif name == "Self":
                found.add(owner)
            elif name in self._aliases:
                found |= self._types(self._aliases[name], owner)
        return found


@cache
def _tree(text: str) -> ast.Module:
    """Parse a file; several instances share the trees, and what is cached for a node of them."""
    return ast.parse(text)


@cache
def _names(node: ast.AST | None) -> list[str]:
    """Yield every name in an annotation, also in one that is a string."""
    names = []
    for part in ast.walk(node) if node is not None else ():
        if isinstance(part, ast.Name):
            names.append(part.id)
        elif isinstance(part, ast.Attribute):
            names.append(part.attr)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.isidentifier():
            names.append(part.value)
    return names


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@cache
def _own_nodes(function: Function) -> list[ast.AST]:
    """Return the nodes of a function without those of nested functions."""
    waiting = list(ast.iter_child_nodes(function))
    found = []
    while waiting:
        node = waiting.pop()
        found.append(node)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting.extend(ast.iter_child_nodes(node))
    return found


@cache
def _bindings(function: Function) -> dict[str, list[ast.expr]]:
    """Return what each local name may be: an assigned value, an item of a loop, or the class it is compared with."""
    bound: dict[str, list[ast.expr]] = defaultdict(list)
    for node in _own_nodes(function):
        pairs: Iterable[tuple[ast.expr, ast.expr]] = ()
        match node:
            case ast.Assign(targets=[target], value=value):
                pairs = _pairs(target, value)
            case ast.AnnAssign(target=target, annotation=annotation):
                pairs = [(target, annotation)]
            case ast.NamedExpr(target=target, value=value):
                pairs = [(target, value)]
            case ast.Call(func=ast.Name(id="isinstance"), args=[target, value]):
                pairs = [(target, value)]
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                pairs = _pairs(target, value)
        for target, value in pairs:
            if isinstance(target, ast.Name):
                bound[target.id].append(value)
    return bound


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Pair targets with their values; a value that is not a literal tuple belongs to each of several targets."""
    if not isinstance(target, ast.Tuple):
        return [(target, value)]
    if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
        return list(zip(target.elts, value.elts, strict=True))
    return [(item, value) for item in target.elts]
