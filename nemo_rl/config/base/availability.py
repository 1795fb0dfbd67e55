"""Handle keys of features that do not exist yet, and keys that depend on another key.

A key of a missing feature is accepted if its value leaves the feature off, and is refused otherwise. A section lists
such keys as `later`, or their fields have an `Only` constraint. Invariant: a refusal names the feature, says that it is
not built yet, and names the values that pass.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

NOT_BUILT = "not built yet"


@dataclass(frozen=True)
class Only:
    """Restrict a key to the values that work today, and name the missing feature of other values."""

    allowed: tuple[Any, ...]
    """Values that are accepted."""
    feature: str | Mapping[Any, str]
    """Name of the missing feature that all other values need, or a name for each other value."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: Any) -> Any:
        if value not in self.allowed:
            feature = self.feature if isinstance(self.feature, str) else self.feature[value]
            raise PydanticCustomError("not_available", f"{NOT_BUILT}: {{feature}}", {"feature": feature})
        return value


@dataclass(frozen=True)
class OnlyWith:
    """Mark a key that has an effect only if another key has certain values. The loader reports it otherwise."""

    key: str
    """The other key, in the same section. Each leading dot means one section further up."""
    values: tuple[Any, ...] = ()
    """Values of the other key with which this key has an effect. If empty, all values that are not off."""

    def path_from(self, section: Sequence[str | int]) -> tuple[str | int, ...]:
        """Return the path of the other key, given the path of the section that has this key."""
        name = self.key.lstrip(".")
        above = len(self.key) - len(name)
        return (*section[: len(section) - above], *name.split("."))

    def holds(self, value: Any) -> bool:
        """Return whether this key has an effect if the other key has this value."""
        return value in self.values if self.values else not is_off(value)

    @property
    def reason(self) -> str:
        """Return the condition as text for the user."""
        shown = " or ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in self.values)
        return f"only with {self.key.lstrip('.')}{f'={shown}' if shown else ''}"


@dataclass(frozen=True)
class Later:
    """Keys of one mapping whose features do not exist yet."""

    features: Mapping[str, str]
    """Feature of each key, by key."""
    neutral: Mapping[str, tuple[Any, ...]]
    """Values of a key that mean off, besides null, false, 0, empty values and `enabled: false`."""

    def switched_on(self, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield the keys of `values` that switch a feature on, with the text of their refusal."""
        for key, feature in self.features.items():
            neutral = self.neutral.get(key, ())
            if not is_off(values.get(key), neutral):
                yield key, f"{NOT_BUILT}: {feature}. Values that pass: {_passing(values[key], neutral)}"

    def drop(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return `values` without keys whose features do not exist yet.

        Raises:
            PydanticCustomError: one of these keys switches its feature on.
        """
        for key, refusal in self.switched_on(values):
            raise PydanticCustomError("not_available", "{refusal}", {"refusal": refusal, "key": key})
        return {key: value for key, value in values.items() if key not in self.features}


def is_off(value: Any, neutral: Collection[Any] = ()) -> bool:
    """Return whether the value of a feature's key leaves the feature off."""
    if isinstance(value, Mapping):
        if "enabled" in value:
            return not value["enabled"]
        return all(is_off(below) for below in value.values())
    return not value or (value in neutral and not isinstance(value, bool))


def _passing(value: Any, neutral: Collection[Any]) -> str:
    """Return, as text, the values that would be accepted instead."""
    if isinstance(value, Mapping):
        empty = "enabled: false" if "enabled" in value else "{}"
    elif isinstance(value, bool):
        empty = "false"
    else:
        empty = "[]" if isinstance(value, list) else "''" if isinstance(value, str) else "0"
    return ", ".join([*map(str, neutral), empty, "null"])
