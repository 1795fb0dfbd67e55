"""Handles names with dots in overrides: an environment given by the dotted path of a class, `env.my_env.Env.key=value`.

Hydra's grammar divides a key at its dots. Invariant: a name that is one key of the configuration, or the environment of
a data entry, stays one key.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

DOT = "\x1f"
"""Replaces the dots of a name while an override is applied."""


def names_in(key: str, tree: Any) -> list[str]:
    """Return the names with dots that an override's key contains, the longest first.

    Args:
        key: dotted key, for example `env.my_env.Env.key`.
        tree: the configuration as plain dicts and lists.
    """
    known = sorted({name for name in _dotted_keys(tree) if _place_of(name).search(key)}, key=len, reverse=True)
    return [name for i, name in enumerate(known) if not any(name in longer for longer in known[:i])]


def joined(key: str, names: list[str]) -> str:
    """Return the key with the dots of these names replaced."""
    for name in names:
        key = _place_of(name).sub(name.replace(".", DOT), key)
    return key


def with_names(tree: Any, names: list[str]) -> Any:
    """Return the tree with the dots of these keys replaced."""
    table = {name: name.replace(".", DOT) for name in names}
    return _renamed(tree, lambda key: table.get(key, key))


def with_dots(tree: Any) -> Any:
    """Return the tree with the dots restored."""
    return _renamed(tree, shown)


def shown(text: Any) -> Any:
    """Return a key or a message as a user writes it."""
    return text.replace(DOT, ".") if isinstance(text, str) else text


def _renamed(tree: Any, rename: Any) -> Any:
    if isinstance(tree, Mapping):
        return {rename(key): _renamed(value, rename) for key, value in tree.items()}
    return [_renamed(value, rename) for value in tree] if isinstance(tree, list) else tree


def _dotted_keys(tree: Any) -> Iterator[str]:
    """Yield keys with dots, and environments with dots that data entries name."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if isinstance(key, str) and "." in key:
                yield key
            if key == "env_name" and isinstance(value, str) and "." in value and "${" not in value:
                yield value
    children = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list) else ()
    for child in children:
        yield from _dotted_keys(child)


def _place_of(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=\.){re.escape(name)}(?=\.|$)")
