"""Keys of features that do not exist yet: accepted while switched off, refused when on.

Such keys are listed as `later` in their section, or their field has an `Only` constraint. Invariant: a refusal names
the feature and says that it is not available yet.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


@dataclass(frozen=True)
class Only:
    """Restricts a key to the values that work today; others name the missing feature.

    Attributes:
        allowed: values that are accepted.
        feature: what the other values would switch on, as the start of a sentence.
    """

    allowed: tuple[Any, ...]
    feature: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: Any) -> Any:
        if value not in self.allowed:
            raise PydanticCustomError("not_available", "{feature} is not available yet", {"feature": self.feature})
        return value


def drop_switched_off(values: Mapping[str, Any], later: Mapping[str, str]) -> dict[str, Any]:
    """Take out the keys of `later`.

    Args:
        values: keys of one section.
        later: key and feature.

    Raises:
        PydanticCustomError: one of the keys switches its feature on.
    """
    for key, feature in later.items():
        if not is_off(values.get(key)):
            raise PydanticCustomError(
                "not_available", "{feature} is not available yet", {"feature": feature, "key": key}
            )
    return {key: value for key, value in values.items() if key not in later}


def is_off(value: Any) -> bool:
    """Whether the value of a feature's key leaves the feature switched off."""
    if isinstance(value, Mapping):
        if "enabled" in value:
            return not value["enabled"]
        return all(is_off(below) for below in value.values())
    return not value
