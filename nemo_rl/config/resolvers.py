"""Arithmetic that YAML files may use in interpolations: `${mul:a,b}`, `div`, `add`, `max`.

Used by the schema's derived defaults and by users' files. Law: registering twice changes nothing, and
resolvers that a user registered under other names stay.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf

_RESOLVERS: dict[str, Callable[..., Any]] = {
    "mul": lambda *values: functools.reduce(operator.mul, values),
    "div": operator.truediv,
    "add": lambda *values: sum(values),
    "max": lambda *values: max(values),
}


def register_omegaconf_resolvers() -> None:
    """Make `mul`, `div` (true division), `add` and `max` known to OmegaConf; safe to call again."""
    for name, function in _RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            OmegaConf.register_new_resolver(name, function)
