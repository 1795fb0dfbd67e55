"""The names that a key may have which chooses a part of a run: built-in ones, or the dotted path of a class.

The classes themselves are found by `nemo_rl.utils.named_parts`. Invariant: nothing is imported here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from nemo_rl.config.base.availability import NOT_BUILT
from nemo_rl.utils.did_you_mean import did_you_mean

OWN_CLASS = "the dotted path of a class"


@dataclass(frozen=True)
class PartName:
    """Restricts a key to built-in names and dotted paths."""

    names: tuple[str, ...]
    """Built-in names."""
    not_built: Mapping[str, str] = field(default_factory=dict)
    """Names of NeMo RL whose features do not exist here yet, each with the feature."""

    @property
    def allowed(self) -> str:
        """The values that pass, for people."""
        return " or ".join([*self.names, OWN_CLASS])

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: str | None) -> str | None:
        if value is None or value in self.names or is_own_class(value):
            return value
        if value in self.not_built:
            raise PydanticCustomError("not_available", f"{NOT_BUILT}: {{feature}}", {"feature": self.not_built[value]})
        hint = did_you_mean(value, self.names).strip()
        problem = f"no such name ({hint[0].lower()}{hint[1:]})" if hint else "no such name"
        raise PydanticCustomError("part_name", "{problem}", {"problem": problem})


def is_own_class(name: str | None) -> bool:
    """Return whether a name is the dotted path of a user's class."""
    return name is not None and "." in name
