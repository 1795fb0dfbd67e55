"""Fill in the defaults of a tree of plain values, before its types are checked.

A default that follows other keys is an OmegaConf interpolation in the schema (`section.derived`), so that files may
refer to its value. Keys that depend on typed values are filled afterwards, by `config.runs.dependent_keys`. Invariant:
only this module fills in defaults of the schema.
"""

import copy
import functools
import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException
from pydantic import BaseModel
from pydantic_core import PydanticCustomError, PydanticUndefined

from nemo_rl.config.base.structure import FREE, Slot


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
    """Register `mul`, `div` (true division), `add` and `max` with OmegaConf, even if they are already registered."""
    for name, function in _RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            OmegaConf.register_new_resolver(name, function)


MISSING = "???"
_REQUIRED = object()


def fill_defaults(section: type[BaseModel], tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Add the defaults of all keys that are missing in `tree` and in the sections below it.

    Args:
        section: schema of `tree`.
        tree: plain dicts and lists.

    Returns:
        The full tree, in which derived defaults are interpolations and required keys are `???`, and a dict from the
        dotted path of each derived default to the value that it has if the interpolation cannot be resolved.
    """
    derived: dict[str, Any] = {}
    filled = _fill(Slot.of_section(section), tree, "", derived)
    return filled, derived


def _fill(slot: Slot, value: Any, path: str, derived: dict[str, Any]) -> Any:
    if isinstance(value, list):
        item = slot.item or FREE
        return [_fill(item, v, f"{path}{i}.", derived) for i, v in enumerate(value)]
    if value is None and slot.sections and not slot.optional:
        value = {}
    if not isinstance(value, Mapping):
        return value
    section = slot.section_for(value)
    filled = dict(value)
    if section is not None:
        for name, field in section.model_fields.items():
            if name not in filled:
                filled[name] = _default(section, name)
                if is_interpolation(filled[name]):
                    optional = Slot.of(field.annotation, field.metadata).optional
                    derived[f"{path}{name}"] = _fallback(section, name, optional)
    for key, below in filled.items():
        child = slot.child(key, filled) or FREE
        filled[key] = _fill(child, below, f"{path}{key}.", derived)
    return filled


def _default(section: type[BaseModel], name: str) -> Any:
    """Return the default of a key as a plain value, an interpolation text or `???`."""
    inherits = getattr(section, "inherits", "")
    if inherits:
        return f"${{{inherits}.{name}}}"
    return _own_default(section, name)


def _own_default(section: type[BaseModel], name: str) -> Any:
    field = section.model_fields[name]
    if field.default_factory is not None:
        made = field.default_factory
        if isinstance(made, type) and issubclass(made, BaseModel):
            return {}
        return plain_values(made())  # type: ignore[call-arg]
    if field.default is PydanticUndefined:
        return {} if Slot.of(field.annotation, field.metadata).sections else MISSING
    return copy.deepcopy(field.default)


def _fallback(section: type[BaseModel], name: str, optional: bool) -> Any:
    own = _own_default(section, name)
    if not is_interpolation(own):
        return own
    return None if optional else _REQUIRED


def is_interpolation(value: Any) -> bool:
    """Return whether a value is a text that OmegaConf still has to resolve."""
    return isinstance(value, str) and re.search(r"(?<!\\)\$\{", value) is not None


def resolve_alone(section: type[BaseModel], filled: dict[str, Any], derived: Mapping[str, Any]) -> dict[str, Any]:
    """Resolve the interpolations of a section that is built outside a master config."""
    register_omegaconf_resolvers()
    place: str = getattr(section, "place", "")
    prefix = f"{place}." if place else ""
    config = OmegaConf.create(flags={"allow_objects": True})
    OmegaConf.update(config, place, filled, force_add=True) if prefix else config.merge_with(filled)
    for path, fallback in derived.items():
        try:
            OmegaConf.select(config, prefix + path, throw_on_missing=False)
        except InterpolationToMissingValueError:
            OmegaConf.update(config, prefix + path, MISSING)
        except OmegaConfBaseException:
            if fallback is _REQUIRED:
                raise PydanticCustomError(
                    "derived",
                    "{path} follows a key outside this section; give it a value here",
                    {"path": path},
                ) from None
            OmegaConf.update(config, prefix + path, fallback)
    node = OmegaConf.select(config, place) if prefix else config
    return OmegaConf.to_container(node, resolve=True)  # type: ignore[return-value]


def plain_values(value: Any) -> Any:
    """Convert sections, tuples and paths to the dicts, lists and texts of YAML."""
    if isinstance(value, BaseModel):
        return plain_values(value.model_dump())
    if isinstance(value, Mapping):
        return {key: plain_values(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(below) for below in value]
    return str(value) if isinstance(value, Path) else value
