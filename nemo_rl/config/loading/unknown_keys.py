"""Refuses keys that the schema does not have and names the key that was probably meant.

Every file is checked, and the merged configuration again after overrides. Invariant: the message names the file or
override, the full key and the nearest valid key.
"""

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from nemo_rl.config.base.names import OVERRIDE_MARKER
from nemo_rl.config.base.structure import Slot, mappings_in
from nemo_rl.config.loading.sources import dotted_path
from nemo_rl.utils.errors import ConfigError


def refuse_unknown_keys(schema: type[BaseModel], tree: Any, where: str, variables: Collection[str] = ()) -> None:
    """Check every key of `tree`.

    Args:
        schema: section that `tree` should be.
        tree: plain dicts and lists.
        where: file or override, for the message.
        variables: keys at the top level that only interpolations read.

    Raises:
        ConfigError: at least one key is unknown; the message lists all.
    """
    problems = [sentence for path, sentence in unknown_keys(schema, tree) if path[0] not in variables]
    if problems:
        raise ConfigError(f"{where}: " + "\n  ".join(problems))


def unknown_keys(schema: type[BaseModel], tree: Any) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the path of each key that the schema does not have, with a sentence for the user."""
    for slot, values, path in mappings_in(Slot.of_section(schema), tree):
        for key in values:
            if key == OVERRIDE_MARKER and not isinstance(values[key], bool):
                place = dotted_path([*path, key])
                yield (*path, key), f"{place}={values[key]!r} must be true (drop what parent files wrote) or false."
            if key != OVERRIDE_MARKER and slot.child(key, values) is None:
                yield (*path, key), _sentence(slot, str(key), path, values, schema)


def explain_unknown(schema: type[BaseModel], path: Sequence[str | int], tree: Any) -> str:
    """Return a sentence about the first key of `path` that is unknown or not set."""
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
    near = _nearest(key, parent, siblings, schema)
    if near:
        return f"unknown key {full!r}. Did you mean {near!r}?"
    where = dotted_path(parent) or "the top level"
    return f"unknown key {full!r}. Keys of {where}: {', '.join(sorted(siblings))}."


def _nearest(key: str, parent: Sequence[str | int], siblings: list[str], schema: type[BaseModel]) -> str | None:
    close = difflib.get_close_matches(key, siblings, n=1, cutoff=0.75)
    if close:
        return dotted_path([*parent, close[0]])
    everywhere = dict(_all_keys(schema, ""))
    for name in (key, *difflib.get_close_matches(key, everywhere, n=1, cutoff=0.75)):
        if name in everywhere:
            return everywhere[name]
    close = difflib.get_close_matches(key, siblings, n=1, cutoff=0.5)
    return dotted_path([*parent, close[0]]) if close else None


def _all_keys(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    """Yield each key's last name with its dotted path; the shallowest path of a name comes last."""
    for name, field in section.model_fields.items():
        slot = Slot.of(field.annotation, field.metadata)
        below = {type_.__name__: type_ for type_ in slot.sections}
        for type_ in below.values():
            yield from _all_keys(type_, f"{prefix}{name}.")
    for name in section.model_fields:
        yield name, f"{prefix}{name}"
