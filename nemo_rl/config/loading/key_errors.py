"""Describe errors of keys in short messages: unknown keys, values of a wrong type, impossible values.

A message about an unknown key names the key that was probably meant.
"""

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from nemo_rl.config.base.defaults import is_interpolation
from nemo_rl.config.base.names import OVERRIDE_MARKER
from nemo_rl.config.base.structure import FREE, Slot, find_slot, mappings_in, type_text, value_at
from nemo_rl.config.loading.sources import Sources, dotted_path
from nemo_rl.utils.errors import ConfigError


def refuse_unknown_keys(schema: type[BaseModel], tree: Any, where: str, variables: Collection[str] = ()) -> None:
    """Check every key of `tree`.

    Args:
        schema: section class of `tree`.
        where: file or override, for the message.
        variables: keys at the top level that only interpolations read.

    Raises:
        ConfigError: at least one key is unknown; the message lists all.
    """
    problems = [sentence for path, sentence in unknown_keys(schema, tree) if path[0] not in variables]
    if problems:
        raise ConfigError(f"{where}: " + "\n  ".join(problems))


def unknown_keys(schema: type[BaseModel], tree: Any) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the path of each key that is not in the schema, with a sentence for the user."""
    for slot, values, path in mappings_in(Slot.of_section(schema), tree):
        for key in values:
            if key == OVERRIDE_MARKER and not isinstance(values[key], bool):
                place = dotted_path([*path, key])
                yield (*path, key), f"{place}={values[key]!r} must be true (drop what parent files wrote) or false."
            if key != OVERRIDE_MARKER and slot.child(key, values) is None:
                yield (*path, key), _sentence(slot, str(key), path, values, schema)


def explain_unknown(schema: type[BaseModel], path: Sequence[str | int], tree: Any) -> str:
    """Return a sentence about the first unknown or unset key of `path`."""
    slot, value = Slot.of_section(schema), tree
    for depth, key in enumerate(path):
        child = slot.child(key, value)
        if child is None:
            return _sentence(slot, str(key), path[:depth], value, schema)
        slot = child
        value = value.get(key) if isinstance(value, Mapping) else None
    return f"{dotted_path(path)!r} is not set."


def _sentence(slot: Slot, key: str, parent: Sequence[str | int], value: Any, schema: type[BaseModel]) -> str:
    section = slot.section_for(value if isinstance(value, Mapping) else ())
    assert section is not None
    full = dotted_path([*parent, key])
    siblings = list(section.model_fields)
    if key in _ENTRIES and "problem_key" in siblings:
        return f"unknown key {full!r}. An evaluation has one data set, whose keys are in {dotted_path(parent)} itself."
    near = _nearest(key, parent, siblings, schema)
    if near:
        return f"unknown key {full!r}. Did you mean {near!r}?"
    where = dotted_path(parent) or "the top level"
    return f"unknown key {full!r}. Keys of {where}: {', '.join(sorted(siblings))}."


_ENTRIES = ("train", "validation", "default")
"""Keys of `data` that exist only in training."""
_COLUMN_KEYS = (
    ("input_key", "problem_key", "question_key", "prompt_key"),
    ("output_key", "solution_key", "answer_key"),
)
"""Names of the same column in training, in evaluation and in other programs."""
_OPTIMIZER_ARGUMENTS = {"lr": "lr", "learning_rate": "lr", "weight_decay": "weight_decay"}
"""Arguments of the optimizer's class, by the names that users write. No section declares them."""


def _nearest(key: str, parent: Sequence[str | int], siblings: list[str], schema: type[BaseModel]) -> str | None:
    same = next((names for names in _COLUMN_KEYS if key in names), ())
    column = next((name for name in same if name in siblings), None)
    if column is not None:
        return dotted_path([*parent, column])
    close = difflib.get_close_matches(key, siblings, n=1, cutoff=0.75)
    if close:
        return dotted_path([*parent, close[0]])
    argument = _OPTIMIZER_ARGUMENTS.get(key)
    if argument in siblings:
        return dotted_path([*parent, argument])
    if argument is not None and "policy" in schema.model_fields:
        place = parent if parent and parent[-1] == "optimizer" else ("policy", "optimizer")
        return dotted_path([*place, "kwargs", argument])
    everywhere = dict(_all_keys(schema, ""))
    for name in (key, *difflib.get_close_matches(key, everywhere, n=1, cutoff=0.75)):
        if name in everywhere:
            return everywhere[name]
    close = difflib.get_close_matches(key, siblings, n=1, cutoff=0.5)
    return dotted_path([*parent, close[0]]) if close else None


def _all_keys(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the last part of each key's name with its dotted path. Keys of deeper sections come first."""
    for name, field in section.model_fields.items():
        slot = Slot.of(field.annotation, field.metadata)
        below = {type_.__name__: type_ for type_ in slot.sections}
        for type_ in below.values():
            yield from _all_keys(type_, f"{prefix}{name}.")
    for name in section.model_fields:
        yield name, f"{prefix}{name}"


_BRANCH_ERRORS = {"list_type", "model_type", "model_attributes_type", "dict_type", "none_required"}
_OWN_SENTENCES = {"metric_name", "moved", "scheduler"}


def problem_lines(schema: type[BaseModel], details: Sequence[ErrorDetails], tree: Any, sources: Sources) -> list[str]:
    """Return a line for each of pydantic's errors about `tree`, the validated values."""
    precise = [tuple(_path_in(tree, e["loc"])) for e in details if e["type"] not in _BRANCH_ERRORS]
    told = [e for e in details if e["type"] not in _BRANCH_ERRORS or not _covered(_path_in(tree, e["loc"]), precise)]
    return list(dict.fromkeys(_line(schema, e, tree, sources) for e in told))


def _covered(path: Sequence[str | int], precise: Sequence[tuple[str | int, ...]]) -> bool:
    """Return whether a more precise error concerns this path or a key below it."""
    return any(other[: len(path)] == tuple(path) for other in precise)


def without_followers(details: Sequence[ErrorDetails], tree: Any, unresolved: Any) -> list[ErrorDetails]:
    """Return the errors of values in files or overrides, without those of keys that refer to another key.

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
    if error["type"] == "literal_error":  # pydantic also lists values of missing features
        return f"{given} is not allowed.{allowed}"
    return f"{given} is not allowed: {_lower(error['msg'])}.{allowed}"


def _allowed(schema: type[BaseModel], path: Sequence[str | int], tree: Any) -> str:
    slot = find_slot(schema, path, tree)
    if slot is None or slot.annotation is None:
        return ""
    return f" Allowed: {type_text(slot.annotation, slot.metadata)}."


def _path_in(tree: Any, loc: Sequence[str | int]) -> list[str | int]:
    """Return the parts of pydantic's location that are keys. Names of union members are left out."""
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


_LONGEST_NAME = 4096
"""Number of characters of the longest path on Linux."""
_ONE_LINE = ("name", "dir", "path", "file", "host", "url", "service", "program", "plugin", "metric", "project")
"""Last words of the names of keys for names or paths, whose values must be one line."""
_WHITE_SPACE = "\t\n\r\f\v"

type Place = tuple[str | int, ...]


def keep_sections(schema: type[BaseModel], tree: Any) -> Any:
    """Return a copy of a file's content in which `section:` without keys is an empty mapping, which inherits all keys.

    YAML reads such a section as null. Null is kept if it has a meaning (`policy.generation`, `data.validation`).
    """
    return _kept(Slot.of_section(schema), tree)


def _kept(slot: Slot, tree: Any) -> Any:
    if tree is None and slot.is_mapping:
        return {}
    if isinstance(tree, list):
        return [_kept(slot.item or FREE, value) for value in tree]
    if not isinstance(tree, Mapping):
        return tree
    return {key: _kept(slot.child(key, tree) or FREE, value) for key, value in tree.items()}


def unusable_values(schema: type[BaseModel], values: Any, unresolved: Any, sources: Sources) -> Iterator[str]:
    """Yield a message for each key name or value that is invalid regardless of the key's own rules.

    Examples are empty strings, control characters in a text, and true or false instead of a number.

    Args:
        unresolved: `values` before interpolation; a key whose value has an interpolation is skipped.
        sources: the file or override that set each key.
    """
    for slot, below, path in mappings_in(Slot.of_section(schema), values):
        for key, value in below.items():
            if is_interpolation(value_at(unresolved, [*path, key])):
                continue
            if problem := _problem_of_text(str(key), is_name=True):
                yield f"a key of {dotted_path(path) or 'the top level'} is {str(key)[:40]!r}, which {problem}."
            place = slot.child(key, below)
            typed = place is not None and place.annotation is not None
            for where, leaf in _leaves(value, (*path, key)):
                problem = _problem_of(leaf, str(key), place if typed else None)
                if problem is not None:
                    given = f"{dotted_path(where)} is empty" if leaf == "" else f"{dotted_path(where)}={_shown(leaf)}"
                    yield f"{given} (set by {sources.of(where)}){problem}."


def _leaves(value: Any, path: Place) -> Iterator[tuple[Place, Any]]:
    """Yield a value, or each element of a list, with its path, except mappings, which are visited separately."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            if not isinstance(item, Mapping):
                yield from _leaves(item, (*path, index))
    elif not isinstance(value, Mapping):
        yield path, value


def _problem_of(value: Any, key: str, place: Slot | None) -> str | None:
    """Return why a key cannot have a value, or None."""
    if isinstance(value, bool) and place is not None and place.takes_numbers_only:
        return " is not a number: true and false are switches"
    if not isinstance(value, str):
        return None
    if value == "" and place is not None:
        way = f"Give it a value{', or null' if place.optional else ''}; a shell variable that is not set is empty"
        return f". {way}"
    is_name = place is not None and key.rpartition("_")[2] in _ONE_LINE
    problem = _problem_of_text(value, is_name=is_name)
    return problem and f" {problem}"


def _problem_of_text(text: str, *, is_name: bool) -> str | None:
    """Return why a text cannot be used, for example because of control characters, or None."""
    if text.isascii() and text.isprintable() and len(text) <= _LONGEST_NAME:
        return None
    allowed = "" if is_name else _WHITE_SPACE
    odd = next((sign for sign in text if (ord(sign) < 32 or ord(sign) == 127) and sign not in allowed), None)
    if odd is not None:
        sort = "a line break or a tab" if odd in _WHITE_SPACE else f"the control character {odd!r}"
        return f"has {sort}. Remove it"
    if any(0xD800 <= ord(sign) < 0xE000 for sign in text):
        return "has half of a character (a surrogate), which UTF-8 cannot store. Write the character itself"
    if is_name and len(text) > _LONGEST_NAME:
        return f"has {len(text):,} characters, and names and paths have at most {_LONGEST_NAME:,}"
    return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
