"""Handles values that no key can have, and keys without a value.

A key is without a value where all keys of its section are commented out, or where a shell variable is not set.
Invariant: an empty section changes nothing, and a text that is empty, that no file can store or that no path can have
is never used as a value.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from nemo_rl.config.base.defaults import is_interpolation
from nemo_rl.config.base.structure import FREE, Slot, mappings_in, value_at
from nemo_rl.config.loading.sources import Sources, dotted_path

_LONGEST_NAME = 4096
"""Characters of the longest path on Linux."""
_ONE_LINE = ("name", "dir", "path", "file", "host", "url", "service", "program", "plugin", "metric", "project")
"""Last words of keys that hold names and paths, which have one line."""
_WHITE_SPACE = "\t\n\r\f\v"

type Place = tuple[str | int, ...]


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


def unusable_values(schema: type[BaseModel], values: Any, unresolved: Any, sources: Sources) -> Iterator[str]:
    """Yield a sentence for each key whose value cannot be used, whatever the key means.

    Args:
        schema: section that `values` is.
        values: plain dicts and lists, interpolations resolved.
        unresolved: the same with interpolations; a key that only repeats another key is not reported.
        sources: the file or override that wrote each key.
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
    """Yield a value and its path, or those of the elements of a list; mappings are visited by themselves."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            if not isinstance(item, Mapping):
                yield from _leaves(item, (*path, index))
    elif not isinstance(value, Mapping):
        yield path, value


def _problem_of(value: Any, key: str, place: Slot | None) -> str | None:
    """Return why a key cannot have a value; None if it may.

    Args:
        value: no mapping and no list.
        key: name of the key.
        place: the place of the schema; None below free keys.
    """
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
    """Return why a text cannot be used: signs that files and terminals do not show, or a name that is none."""
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
