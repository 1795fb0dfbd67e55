"""Registers arithmetic for interpolations in YAML files: `${mul:a,b}`, `div`, `add`, `max`.

Invariant: registering twice changes nothing, and a user's resolvers under other names are kept.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf


def _numbers(values: tuple[Any, ...]) -> tuple[Any, ...]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{value!r} is not a number")
    return values


_RESOLVERS: dict[str, Callable[..., Any]] = {
    "mul": lambda *values: functools.reduce(operator.mul, _numbers(values)),
    "div": lambda *values: operator.truediv(*_numbers(values)),
    "add": lambda *values: sum(_numbers(values)),
    "max": lambda *values: max(_numbers(values)),
}


def register_omegaconf_resolvers() -> None:
    """Register `mul`, `div` (true division), `add` and `max` with OmegaConf; safe to call again."""
    for name, function in _RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            OmegaConf.register_new_resolver(name, function)
