"""Registers arithmetic for interpolations in YAML files: `${mul:a,b}`, `div`, `add`, `max`.

Invariant: registering twice changes nothing, and a user's resolvers under other names are kept.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf


def _numbers(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(values) < 2:
        raise TypeError(f"it needs two numbers or more, and got {', '.join(map(repr, values)) or 'none'}")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{value!r} is not a number")
    return values


def _divided(number: float, by: float, *more: Any) -> float:
    if more:
        raise TypeError("it takes two numbers")
    if by == 0:
        raise TypeError(f"{number} cannot be divided by 0")
    return number / by


_RESOLVERS: dict[str, Callable[..., Any]] = {
    "mul": lambda *values: functools.reduce(operator.mul, _numbers(values)),
    "div": lambda *values: _divided(*_numbers(values)),
    "add": lambda *values: sum(_numbers(values)),
    "max": lambda *values: max(_numbers(values)),
}


def register_omegaconf_resolvers() -> None:
    """Register `mul`, `div` (true division), `add` and `max` with OmegaConf; safe to call again."""
    for name, function in _RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            OmegaConf.register_new_resolver(name, function)
