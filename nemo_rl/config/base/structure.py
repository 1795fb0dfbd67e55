"""Read the structure of the schema: the allowed keys at each place of a config tree.

Loading, key checks, overrides and the reference page use this module instead of inspecting pydantic types. Invariant: a
`Slot` describes places in a tree of plain dicts and lists, and never holds a value. Every pydantic model of this
package is a `Section` (section.py), so "a section" is "a model" here.
"""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from nemo_rl.config.base.availability import Later, Only
from nemo_rl.config.base.names import PartName


@dataclass(frozen=True)
class NamedSections:
    """Mark a `dict[str, Any]` in which some names hold a section and all other names are free."""

    typed_dict: type
    """A `TypedDict` whose keys are the names with a schema."""
    switches: tuple[tuple[str, str], ...] = ()
    """Keys that may be written next to the sections, with the section to which each belongs."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._unified, handler.generate_schema(self.typed_dict))

    def _unified(self, values: Any) -> Any:
        """Move each switch into its section. Drop a switch that is off if its section is not written."""
        if not isinstance(values, Mapping):
            return values
        moved = {key: value for key, value in values.items() if key not in dict(self.switches)}
        for key, name in self.switches:
            value, section = values.get(key), moved.get(name, {})
            if value is not None and isinstance(section, Mapping) and (value or name in moved):
                moved[name] = {**section, key: value}
        return moved

    @property
    def sections(self) -> Mapping[str, type[BaseModel]]:
        """Return the section class of each name that has one."""
        return inspect.get_annotations(self.typed_dict, eval_str=True)


@dataclass(frozen=True)
class Slot:
    """One place of the config tree."""

    sections: tuple[type[BaseModel], ...] = ()
    """Classes of a mapping at this place."""
    item: Slot | None = None
    """Place of the list elements, if this may be a list."""
    values: Slot | None = None
    """Place of the values, if this is a mapping from free names to sections."""
    named: NamedSections | None = None
    """Names with a schema in a mapping that is otherwise free."""
    annotation: Any = None
    """The type in the schema. None for free places."""
    metadata: tuple[Any, ...] = ()
    """Constraints that pydantic has moved out of the annotation."""

    @classmethod
    def of(cls, annotation: Any, metadata: Iterable[Any] = ()) -> Slot:
        """Return the place that a field with this annotation describes."""
        metadata = tuple(metadata)
        item = next((get_args(a)[0] for a in _options(annotation) if get_origin(a) is list), None)
        values = next((get_args(a)[1] for a in _options(annotation) if get_origin(a) is dict), None)
        named = next((m for m in metadata if isinstance(m, NamedSections)), None)
        return cls(
            sections=tuple(a for a in _options(annotation) if _is_section(a)),
            item=None if item is None else cls.of(item),
            values=cls.of(values) if _is_section(values) else None,
            named=named,
            annotation=annotation,
            metadata=metadata,
        )

    @classmethod
    def of_section(cls, section: type[BaseModel]) -> Slot:
        """Return the place that holds exactly this section."""
        return cls(sections=(section,), annotation=section)

    @property
    def optional(self) -> bool:
        """Return True if null is an allowed value with its own meaning."""
        return self.annotation is None or type(None) in _options(self.annotation)

    @property
    def takes_numbers_only(self) -> bool:
        """Return True if this is a place for a number, or for a number or null."""
        options = [option for option in _options(self.annotation) if option is not type(None)]
        return bool(options) and all(option in (int, float) for option in options)

    @property
    def is_mapping(self) -> bool:
        """Return True if this is a mapping for which null has no meaning of its own."""
        kinds = [*self.sections, *(a for a in _options(self.annotation) if get_origin(a) is dict)]
        return bool(kinds) and not self.optional

    def section_for(self, keys: Iterable[str]) -> type[BaseModel] | None:
        """Return the section class to which a mapping with these keys most likely belongs."""
        if len(self.sections) == 1:
            return self.sections[0]
        given = set(keys)
        ranked = sorted(self.sections, key=lambda s: -len(given & known_keys(s)))
        return ranked[0] if ranked else None

    def later_for(self, keys: Iterable[str]) -> Later:
        """Return the keys of a mapping at this place whose features do not exist yet."""
        section = self.section_for(keys)
        return Later(getattr(section, "later", {}), getattr(section, "neutral", {}))

    def child(self, key: str | int, value: Any) -> Slot | None:
        """Return the place below `key` of `value`, or None if the schema has no such key.

        Args:
            key: a mapping key, or an index if `value` is a list.
            value: the dict or list at this place.
        """
        if isinstance(value, list):
            return self.item or FREE
        if self.values is not None:
            return self.values
        if self.named is not None:
            section = self.named.sections.get(str(key))
            return FREE if section is None else Slot.of_section(section)
        section = self.section_for(value if isinstance(value, Mapping) else ())
        if section is None:
            return FREE
        return _slot_in(section, str(key))


FREE = Slot()


@cache
def _slot_in(section: type[BaseModel], key: str) -> Slot | None:
    """Return the place below a key of a section. Return None if the section does not accept the key."""
    field = section.model_fields.get(key)
    if field is not None:
        return Slot.of(field.annotation, field.metadata)
    takes_others = bool(getattr(section, "rest", None))
    return FREE if has_key(known_keys(section), key) or takes_others else None


def has_key(keys: Iterable[str], key: str) -> bool:
    """Return whether a key is one of `keys`, which may have wildcards."""
    return any(key == each or ("*" in each and fnmatchcase(key, each)) for each in keys)


def known_keys(section: type[BaseModel]) -> set[str]:
    """Return every key that a user may write in this section, including keys without effect."""
    extra = (getattr(section, kind, {}) for kind in ("later", "ignored", "moved"))
    return set(section.model_fields).union(*extra)


def mappings_in(
    slot: Slot, tree: Any, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[Slot, Mapping[str, Any], tuple[str | int, ...]]]:
    """Yield each mapping of a tree that the schema describes: its place in the schema, the mapping and its path.

    Args:
        slot: the place of `tree`.
        tree: plain dicts and lists.
        path: path of `tree`.
    """
    if isinstance(tree, Mapping):
        yield slot, tree, path
    children = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in children:
        child = slot.child(key, tree)
        if child is not None:
            yield from mappings_in(child, value, (*path, key))


def find_slot(root: type[BaseModel], path: Sequence[str | int], tree: Any) -> Slot | None:
    """Follow `path` from the root section. Return None if a key is not in the schema."""
    slot: Slot | None = Slot.of_section(root)
    for part in path:
        if slot is None:
            return None
        slot = slot.child(part, tree)
        tree = value_at(tree, [part])
    return slot


def value_at(tree: Any, path: Sequence[str | int], default: Any = None) -> Any:
    """Return the value at `path` in plain dicts and lists, or `default` if the path does not exist."""
    for part in path:
        if isinstance(tree, Mapping) and part in tree:
            tree = tree[part]
        elif isinstance(tree, list) and str(part).isdigit() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            return default
    return tree


def type_text(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Return a type as text for the reference page, for example `int > 0 or null`."""
    metadata = tuple(metadata)
    only = next((m for m in metadata if isinstance(m, Only)), None)
    if only is not None:
        return " or ".join(_value_text(v) for v in only.allowed)
    part_name = next((m for m in metadata if isinstance(m, PartName)), None)
    if part_name is not None:
        return part_name.allowed
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(args[0], args[1:])
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(a) for a in args)
    if origin is Literal:
        return " or ".join(_value_text(v) for v in args)
    if origin is list:
        return f"list of {type_text(args[0])}"
    if origin is dict:
        return "mapping" if args[1] is Any else f"mapping to {type_text(args[1])}"
    if annotation is type(None):
        return "null"
    if _is_section(annotation):
        return "section"
    return f"{getattr(annotation, '__name__', annotation)}{_bounds_text(metadata)}"


def _bounds_text(metadata: Iterable[Any]) -> str:
    bounds = []
    for m in _flatten(metadata):
        for kind, sign, name in ((Gt, ">", "gt"), (Ge, ">=", "ge"), (Lt, "<", "lt"), (Le, "<=", "le")):
            if isinstance(m, kind):
                bounds.append(f" {sign} {_number_text(getattr(m, name))}")
    return " and".join(bounds)


def _number_text(bound: float) -> str:
    """Return a bound as text, with an exponent if it is large, such as 10^6."""
    exponent = round(math.log10(bound)) if bound >= 1e6 else 0
    return f"10^{exponent}" if exponent and bound == 10**exponent else str(bound)


def _flatten(metadata: Iterable[Any]) -> Iterable[Any]:
    for m in metadata:
        nested = getattr(m, "metadata", None)
        yield from _flatten(nested) if nested else (m,)


def _value_text(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _options(annotation: Any) -> list[Any]:
    """Return the members of a union without `Annotated`, or the annotation itself if it is not a union."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _options(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [o for a in get_args(annotation) for o in _options(a)]
    return [annotation]


def _is_section(annotation: Any) -> bool:
    return inspect.isclass(annotation) and issubclass(annotation, BaseModel)
