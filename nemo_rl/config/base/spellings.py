"""Move keys with two possible names or sections to the place that the library reads.

NeMo RL has the settings of every engine under `vllm_cfg`; here they are keys of `engine` (`Section.written_in`). The
section of its PyTorch backend is `dtensor_cfg` in some versions and `automodel_cfg` in others (`Section.renamed`).
Files, overrides and interpolations may use either name. Keys are moved in each file before files are merged, so that a
later file wins under either name. Invariant: in a tree that `unified` returns, each key has one place.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel

from nemo_rl.config.base.names import OVERRIDE_MARKER
from nemo_rl.config.base.structure import FREE, Slot
from nemo_rl.utils.errors import ConfigError


def unified(schema: type[BaseModel], tree: Any, *, newer_wins: bool = False) -> Any:
    """Return a copy of a tree with every key in its own section.

    Args:
        schema: section class of `tree`.
        newer_wins: whether values under the other name are newer and win. If false, they must not differ.

    Raises:
        ConfigError: a key has one value in its own section and a different one in the other section.
    """
    has_two_names = bool(_shared(schema) or _renamed(schema))
    return _unified(Slot.of_section(schema), tree, schema, newer_wins) if has_two_names else tree


def in_own_section(schema: type[BaseModel], text: str) -> str:
    """Rewrite a dotted path, or a text's interpolations, to use the sections to which the keys belong."""
    for other, own in _renamed(schema).items():
        text = re.sub(rf"(?<![^.{{]){other}(?![^.}}])", own, text)
    for other, (own, keys) in _shared(schema).items():
        text = re.sub(rf"(?<![^.{{]){other}\.({'|'.join(keys)})(?![^.}}])", rf"{own}.\1", text)
    return text


@cache
def _renamed(schema: type[BaseModel]) -> dict[str, str]:
    """Return the own name of each key by its other name, for the section and all sections below it."""
    found: dict[str, str] = dict(getattr(schema, "renamed", {}))
    for field in schema.model_fields.values():
        slot = Slot.of(field.annotation, field.metadata)
        for below in (*slot.sections, *(slot.named.sections.values() if slot.named else ())):
            found |= _renamed(below)
    return found


@cache
def _shared(schema: type[BaseModel]) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the own section's name and the keys that both sections accept, by the name of the other section."""
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    for name, field in schema.model_fields.items():
        for below in Slot.of(field.annotation, field.metadata).sections:
            found |= _shared(below)
            others = [other for other, own in getattr(schema, "written_in", {}).items() if own == name]
            found |= {other: (name, tuple(below.model_fields)) for other in others}
    return found


def _unified(slot: Slot, tree: Any, schema: type[BaseModel], newer_wins: bool) -> Any:
    if isinstance(tree, str):
        return in_own_section(schema, tree) if "${" in tree else tree
    if isinstance(tree, list):
        return [_unified(slot.item or FREE, value, schema, newer_wins) for value in tree]
    if not isinstance(tree, Mapping):
        return tree
    section = slot.section_for(tree)
    moved = _under_own_names(tree, getattr(section, "renamed", {}), newer_wins)
    for other, own in getattr(section, "written_in", {}).items():
        both = (moved.get(other), moved.get(own) or {})  # the schema refuses values that are not sections
        if section is not None and all(isinstance(part, Mapping) for part in both):
            moved[other], moved[own] = _moved(moved, other, own, _shared(section)[other][1], newer_wins)
    return {key: _unified(slot.child(key, moved) or FREE, value, schema, newer_wins) for key, value in moved.items()}


def _under_own_names(tree: Mapping[str, Any], names: Mapping[str, str], newer_wins: bool) -> dict[str, Any]:
    """Return a mapping with each key's own name instead of its other name."""
    renamed = {names.get(key, key): value for key, value in tree.items()}
    for other, own in names.items():
        if other in tree and own in tree:
            both = {other: tree[other] or {}, own: tree[own] or {}}
            if not all(isinstance(part, Mapping) for part in both.values()):
                raise ConfigError(f"{other} and {own} are the same section. Keep one of them.")
            _, renamed[own] = _moved(both, other, own, tuple(both[other]), newer_wins)
    return renamed


def _moved(
    tree: Mapping[str, Any], other: str, own: str, keys: tuple[str, ...], newer_wins: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the other section without `keys`, and the own section with them."""
    given = {key: value for key, value in tree[other].items() if key in keys}
    kept = dict(tree.get(own) or {})
    differing = [key for key, value in given.items() if key in kept and kept[key] != value]
    if differing and not newer_wins:
        key = differing[0]
        raise ConfigError(f"{other}.{key}={given[key]} and {own}.{key}={kept[key]} are the same key. Keep one of them.")
    if OVERRIDE_MARKER in tree[other]:
        kept.setdefault(OVERRIDE_MARKER, tree[other][OVERRIDE_MARKER])
    return {key: value for key, value in tree[other].items() if key not in given}, kept | given
