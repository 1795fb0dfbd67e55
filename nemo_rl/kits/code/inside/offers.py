"""Answer the requests that one program may make about objects of the other program."""

import builtins
import copy
import operator
from collections.abc import Callable, Iterator
from typing import Any

from values import COMPARED

BASES: tuple[type[Any], ...] = (str, int, float, tuple, list, dict, set, frozenset, bytearray)
_ARITHMETIC = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
)
ARITHMETIC = {f"__{prefix}{name}__" for name in (*_ARITHMETIC, "divmod") for prefix in ("", "r", "i")}
NUMERIC = {"__abs__", "__int__", "__float__", "__round__", "__bool__", "__len__"}


def _operator(name: str) -> Callable[[Any, Any], Any]:
    return divmod if name == "divmod" else getattr(operator, f"{name}_" if name in ("and", "or") else name)


def _reflected(name: str) -> Callable[[Any, Any], Any]:
    return lambda one, other: _operator(name)(other, one)


SPECIAL: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name.strip("_")) for name in COMPARED},
    **{f"__{name}__": _operator(name) for name in (*_ARITHMETIC, "divmod")},
    **{f"__r{name}__": _reflected(name) for name in (*_ARITHMETIC, "divmod")},
    **{f"__i{name}__": getattr(operator, f"i{name}") for name in _ARITHMETIC},
    **{f"__{name}__": getattr(operator, name) for name in ("neg", "pos", "invert", "getitem", "setitem", "delitem")},
    **{f"__{name}__": getattr(builtins, name) for name in ("len", "iter", "bool", "int", "float", "abs", "round")},
    "__reversed__": reversed,
    "__contains__": operator.contains,
    "__next__": next,
    "__call__": lambda target, *arguments, **keywords: target(*arguments, **keywords),
    "__enter__": lambda target: type(target).__enter__(target),
    "__exit__": lambda target, *error: type(target).__exit__(target, *error),
}
"""Functions of the special methods that a `Remote` has if the type of its object has them."""


def _run(coroutine: Any) -> Any:
    import asyncio  # takes longer to load than all the rest

    return asyncio.run(coroutine)


_kept: dict[int, tuple[Iterator[Any], Exception]] = {}
"""Errors that an iterator raised after items that were not sent yet, by the iterator's id."""


def _batch(iterator: Iterator[Any], most: int) -> tuple[list[Any], bool]:
    """Return up to `most` items and whether the iterator ended, and keep an error after an item for the next call."""
    if id(iterator) in _kept:
        raise _kept.pop(id(iterator))[1]
    items: list[Any] = []
    for _ in range(most):
        try:
            items.append(next(iterator))
        except StopIteration:
            return items, True
        except Exception as error:
            if not items:
                raise
            _kept[id(iterator)] = (iterator, error)
            break
    return items, False


REQUESTS: dict[str, Callable[..., Any]] = {
    **SPECIAL,
    "get": getattr,
    "set": setattr,
    "delete": delattr,
    "isinstance": lambda kind, value: isinstance(value, kind),
    "issubclass": lambda kind, value: issubclass(value, kind),
    "batch": _batch,
    "send": lambda generator, value: generator.send(value),
    "run": _run,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "str": str,
    "repr": repr,
    "format": format,
    "hash": hash,
    "plain": lambda value: next(base for base in BASES if isinstance(value, base))(value),
}
"""Function that answers each request."""
