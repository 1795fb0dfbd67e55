"""Handles keys without a value: sections whose keys are all commented out, and texts of unset shell variables.

Invariant: an empty section changes nothing, and an empty text is never used as a value.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from nemo_rl.config.base.defaults import is_interpolation
from nemo_rl.config.base.structure import FREE, Slot, mappings_in, value_at
from nemo_rl.config.loading.sources import Sources, dotted_path


def keep_sections(schema: type[BaseModel], tree: Any) -> Any:
    """Return a copy of a file's content in which `section:` without keys is an empty mapping, which inherits all.

    YAML reads such a section as null. Null is kept where it has a meaning (`policy.generation`, `data.validation`).

    Args:
        schema: section that `tree` is.
        tree: plain dicts and lists.
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


def without_value(schema: type[BaseModel], values: Any, unresolved: Any, sources: Sources) -> Iterator[str]:
    """Yield a sentence for each key of the schema that holds an empty text.

    Args:
        schema: section that `values` is.
        values: plain dicts and lists, interpolations resolved.
        unresolved: the same with interpolations; a key that only repeats another empty key is not reported.
        sources: the file or override that wrote each key.
    """
    for slot, below, path in mappings_in(Slot.of_section(schema), values):
        for key, value in below.items():
            place = slot.child(key, below)
            if place is None or place.annotation is None or is_interpolation(value_at(unresolved, [*path, key])):
                continue
            way = f"Give it a value{', or null' if place.optional else ''}; a shell variable that is not set is empty."
            for where in _empty_in(value, (*path, key)):
                yield f"{dotted_path(where)} is empty (set by {sources.of(where)}). {way}"


def _empty_in(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Yield the places of empty texts in a value that is a text or a list of texts."""
    if value == "":
        yield path
    if isinstance(value, list):
        yield from ((*path, index) for index, item in enumerate(value) if item == "")
