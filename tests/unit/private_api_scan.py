"""Find uses of private names of other libraries, and patches of them, in source code.

The scan is static. Names are followed through imports, and through local variables that stand for imported things. On
objects whose class cannot be seen, an attribute with a leading underscore counts unless the same file defines it.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

OWN = "nemo_rl"
LIBRARIES = ("ray", "vllm", "transformers", "torch", "megatron", "hydra", "omegaconf", "peft", "torchdata")
_PRIVATE = re.compile(r"_[A-Za-z]\w*")
_DOTTED = re.compile(rf"(?:{'|'.join(LIBRARIES)})(?:\.\w+)+")
_DOCUMENTED = {"os._exit", "_asdict", "_fields", "_replace"}
"""Names with an underscore that Python documents."""
_PATCHED = ("forward", "__class__")
"""Attributes of objects of unknown class whose assignment is a patch."""
_IN_VLLM = (
    *("driver_worker", "engine_core", "model_executor", "model_runner", "moe_kernel", "mq_broadcaster"),
    *("num_computed_tokens", "num_lookahead_tokens", "output_processor", "renderer"),
    *("do_not_compile", "intermediate_tensors", "init_worker", "quant_method", "request_states"),
)
"""Attributes of vLLM's objects that are internal without an underscore; looked for in folders named `vllm`."""
_INTERNAL_MODULES = re.compile(r"vllm\.(v1|model_executor|distributed|_custom_ops)\b.*")
"""Modules of vLLM that its documentation does not promise to keep."""

_RAY_DUNDER = re.compile(r"__ray_\w+__")
_OURS = {"_is_expert_parallel", "_pipeline_ends"}
"""Attributes that the project itself adds to modules of a library."""

type Names = dict[str, str]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def scan(package: Path) -> dict[str, set[str]]:
    """Return the uses in each file of a package, by path within the repository."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(package.rglob("*.py"))}
    nodes = {path: list(ast.walk(tree)) for path, tree in trees.items()}
    own = {path: defined_in(nodes[path]) for path in trees}
    project = frozenset().union(*own.values())
    found = {
        path.relative_to(package.parent).as_posix(): _uses(
            tree, nodes[path], own[path], project, in_vllm="vllm" in path.parts
        )
        for path, tree in trees.items()
    }
    return {file: uses for file, uses in found.items() if uses}


def defined_in(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the private names that a file defines: functions, classes, variables, fields, attributes of self."""
    found = set()
    for node in nodes:
        if isinstance(node, Function | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            found.add(node.attr)
    return {name for name in found if _PRIVATE.fullmatch(name)}


def uses_in(tree: ast.Module, *, in_vllm: bool = False) -> set[str]:
    """Return the uses in one file.

    Args:
        tree: the file.
        in_vllm: look for internal attributes of vLLM, too.

    Returns:
        `library.module.name` for names found through imports, `._name` for attributes of other objects, `._name()` for
        methods that a base class of a library calls, `"text"` for names in strings, and ` =` after what is assigned.
        `owner.* =` is a helper that replaces attributes of what it is given.
    """
    nodes = list(ast.walk(tree))
    return _uses(tree, nodes, defined_in(nodes), frozenset(), in_vllm=in_vllm)


def _uses(tree: ast.Module, nodes: list[ast.AST], own: set[str], project: frozenset[str], *, in_vllm: bool) -> set[str]:
    """Return the uses in one file; `own` are the private names that it defines, `project` those of all files."""
    found = {*_imports(nodes), *_strings(nodes)}
    everywhere = project | own
    called = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    for node, names in _with_names(tree, nodes):
        if isinstance(node, ast.Attribute):
            found |= {*_attribute(node, names, own, everywhere, in_vllm)}
        elif isinstance(node, ast.Call):
            found |= {*_reflection(node, names, tree)}
        else:
            found |= {*_overrides(node, names, called)}
    return {use for use in found if not any(other.startswith((f"{use}.", f"{use} =")) for other in found)}


def _with_names(tree: ast.Module, nodes: list[ast.AST]) -> Iterator[tuple[ast.AST, Names]]:
    """Attributes, calls and classes of a file, with what the names stand for in the function around them."""
    imported = _imported(nodes)
    stack: list[tuple[ast.AST, Names]] = [(tree, imported | _aliases(tree.body, imported))]
    while stack:
        node, names = stack.pop()
        if isinstance(node, Function):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            shadowed = {argument.arg for argument in arguments} & names.keys()
            names = {name: dotted for name, dotted in names.items() if name not in shadowed} if shadowed else names
            found = _aliases(ast.walk(node), names)
            names = names | found if found else names
        elif isinstance(node, ast.Attribute | ast.Call | ast.ClassDef):
            yield node, names
        stack += [(child, names) for child in ast.iter_child_nodes(node)]


def _imported(nodes: Iterable[ast.AST]) -> Names:
    names = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _aliases(nodes: Iterable[ast.AST], names: Names) -> Names:
    """Variables that stand for imported things: `x: Any = torch._C`, `x = importlib.import_module("...")`."""
    found = {}
    for node in nodes:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if value is None or len(targets) != 1 or not isinstance(targets[0], ast.Name):
            continue
        dotted = _loaded_module(value, names) if isinstance(value, ast.Call) else _resolved(value, names)
        if dotted is not None:
            found[targets[0].id] = dotted
    return found


def _loaded_module(call: ast.Call, names: Names) -> str | None:
    if _resolved(call.func, names) != "importlib.import_module" or not call.args:
        return None
    return _text(call.args[0], ast.Module([], []))


def _imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            dotted = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in dotted if _is_foreign(name) and _is_internal(name))


def _strings(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Private modules and folders in strings: to import, for loggers, for paths."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            if text == "_private" or (_DOTTED.fullmatch(text) and _has_private_part(text)):
                yield f'"{text}"'


def _overrides(node: ast.AST, names: Names, called: set[str]) -> Iterator[str]:
    """Private methods of a class with a base in a library that the file never calls: the base calls them."""
    if isinstance(node, ast.ClassDef) and any(_is_in_library(_resolved(base, names)) for base in node.bases):
        for method in node.body:
            if isinstance(method, Function) and _PRIVATE.fullmatch(method.name) and method.name not in called:
                yield f".{method.name}()"


def _attribute(
    node: ast.Attribute, names: Names, own: set[str], project: frozenset[str], in_vllm: bool
) -> Iterator[str]:
    changes = "" if isinstance(node.ctx, ast.Load) else " ="
    resolved = _resolved(node, names)
    if resolved is not None:
        if _is_foreign(resolved) and (changes or _is_internal(resolved)) and resolved not in _DOCUMENTED:
            yield resolved + changes
        return
    known = project if _is_self(node.value) else own
    if (
        _PRIVATE.fullmatch(node.attr)
        and node.attr not in known | _DOCUMENTED
        or not _is_self(node.value)
        and ((changes and node.attr in _PATCHED) or (in_vllm and node.attr in _IN_VLLM) or _RAY_DUNDER.match(node.attr))
    ):
        yield f".{node.attr}{changes}"


def _reflection(node: ast.Call, names: Names, tree: ast.Module) -> Iterator[str]:
    """`setattr` on what was imported or is named `owner`, helpers that replace its attributes, `getattr` by a name."""
    called = getattr(node.func, "id", "")
    if called in ("setattr", "delattr", "_replaced"):
        target = _resolved(node.args[0], names)
        if target is not None and _is_foreign(target):
            yield f"{target}.* ="
        elif getattr(node.args[0], "id", "") == "owner":
            yield "owner.* ="
    if called in ("getattr", "hasattr", "setattr", "delattr") and not _is_self(node.args[0]):
        name = _text(node.args[1], tree)
        if name == "_*" or (_PRIVATE.fullmatch(name) and name not in _OURS | _DOCUMENTED):
            yield f".{name}"


def _text(node: ast.AST, tree: ast.Module) -> str:
    """Return the text of a string, or of a constant of the file; `*` for what is not constant, empty for the rest."""
    if isinstance(node, ast.Name):
        assigned = [each for each in tree.body if isinstance(each, ast.Assign)]
        values = [each.value for each in assigned if getattr(each.targets[0], "id", "") == node.id]
        node = values[0] if values else node
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    if isinstance(node, ast.JoinedStr | ast.Constant):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts)
    return ""


def _resolved(node: ast.AST, names: Names) -> str | None:
    """Return the dotted name of an expression that begins with an imported name; None for others."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not (isinstance(node, ast.Name) and node.id in names):
        return None
    return ".".join([names[node.id], *reversed(parts)])


def _is_foreign(dotted: str) -> bool:
    return dotted.split(".")[0] not in (OWN, "__future__", "sys")


def _is_in_library(dotted: str | None) -> bool:
    return dotted is not None and dotted.split(".")[0] in LIBRARIES


def _is_internal(dotted: str) -> bool:
    return _has_private_part(dotted) or _INTERNAL_MODULES.fullmatch(dotted) is not None


def _has_private_part(dotted: str) -> bool:
    return any(_PRIVATE.fullmatch(part) for part in dotted.split("."))


def _is_self(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return getattr(node.func, "id", "") == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")
