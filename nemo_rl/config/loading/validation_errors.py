"""Turns pydantic's errors into short messages for users.

Invariant: each line names the key, the given value, the allowed values and the file or override that set it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from nemo_rl.config.base.defaults import is_interpolation
from nemo_rl.config.base.structure import find_slot, type_text, value_at
from nemo_rl.config.loading.sources import Sources, dotted_path

_BRANCH_ERRORS = {"list_type", "model_type", "model_attributes_type", "dict_type", "none_required"}
_OWN_SENTENCES = {"metric_name", "moved", "scheduler"}


def problem_lines(schema: type[BaseModel], details: Sequence[ErrorDetails], tree: Any, sources: Sources) -> list[str]:
    """Return a line for each of pydantic's errors on `tree`, the values that were validated."""
    precise = [tuple(_path_in(tree, e["loc"])) for e in details if e["type"] not in _BRANCH_ERRORS]
    told = [e for e in details if e["type"] not in _BRANCH_ERRORS or not _covered(_path_in(tree, e["loc"]), precise)]
    return list(dict.fromkeys(_line(schema, e, tree, sources) for e in told))


def _covered(path: Sequence[str | int], precise: Sequence[tuple[str | int, ...]]) -> bool:
    """Return whether another error is about a path or a key below it, so that it says more than the type does."""
    return any(other[: len(path)] == tuple(path) for other in precise)


def without_followers(details: Sequence[ErrorDetails], tree: Any, unresolved: Any) -> list[ErrorDetails]:
    """Return the errors of values that are written in files or overrides, not of keys that only refer to another key.

    Args:
        details: pydantic's errors.
        tree: the values that were validated.
        unresolved: the same values with their interpolations.
    """
    return [e for e in details if not is_interpolation(value_at(unresolved, _path_in(tree, e["loc"])))]


def _line(schema: type[BaseModel], error: ErrorDetails, tree: Any, sources: Sources) -> str:
    path = _path_in(tree, error["loc"])
    context: Mapping[str, Any] = error.get("ctx", {})
    if error["type"] == "missing":
        name = str(error["loc"][-1])
        key = dotted_path(path if path[-1:] == [name] else [*path, name])
        return f"{key} has no value. Write it in the config file or add the override {key}=..."
    if "key" in context:
        path = [*path, str(context["key"])]
    key = dotted_path(path)
    value = value_at(tree, path)
    given = f"{key}={short(value)} (set by {sources.of(path)})"
    allowed = _allowed(schema, path, tree)
    if error["type"] == "not_available":
        return f"{given}: {error['msg']}.{allowed}"
    if error["type"] in _OWN_SENTENCES:
        return f"{given}: {error['msg']}."
    if error["type"] == "literal_error":  # pydantic would list the values of features that are not built too
        return f"{given} is not allowed.{allowed}"
    return f"{given} is not allowed: {_lower(error['msg'])}.{allowed}"


def _allowed(schema: type[BaseModel], path: Sequence[str | int], tree: Any) -> str:
    slot = find_slot(schema, path, tree)
    if slot is None or slot.annotation is None:
        return ""
    return f" Allowed: {type_text(slot.annotation, slot.metadata)}."


def _path_in(tree: Any, loc: Sequence[str | int]) -> list[str | int]:
    """Return the parts of pydantic's location that are keys; the location also names members of unions."""
    path: list[str | int] = []
    for part in loc:
        here = value_at(tree, path)
        if isinstance(here, Mapping) and part in here or isinstance(here, list) and isinstance(part, int):
            path.append(part)
    return path


def short(value: Any) -> str:
    """Return a value as text for a message."""
    text = "null" if value is None else repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _lower(message: str) -> str:
    return (message[:1].lower() + message[1:]).rstrip(".")
