"""Define the base class of config sections, which declare the default of each key and refuse unknown keys.

Section files (grpo.py, policy.py, ...) declare keys, and load.py reads files into them. Defaults that follow from other
keys are OmegaConf interpolations in the schema, e.g. `${.train_micro_batch_size}`. A section can be used as a mapping
too (`config["policy"]["model_name"]`, `**config.loss_fn`). Invariant: a built section holds only plain values, because
construction resolves all interpolations.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from nemo_rl.config.base.availability import Later
from nemo_rl.config.base.defaults import MISSING, fill_defaults, plain_values, resolve_alone
from nemo_rl.config.base.spellings import unified
from nemo_rl.config.base.structure import Slot, has_key, known_keys
from nemo_rl.utils.errors import ConfigError

Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""A seed of random numbers. Derived seeds fit into the same 63 bits."""


def derived(interpolation: str) -> Any:
    """Declare a key whose default follows other keys.

    Args:
        interpolation: the default, e.g. `${.train_micro_batch_size}`. It is relative if the section may be used at
            several places.
    """
    return Field(default=interpolation)


class Section(BaseModel):
    """A group of keys. The text below a key is its description on the reference page.

    Class attributes a section may set (each a mapping from key to a text for the user, unless stated otherwise):
        later: NeMo RL keys of features that do not exist yet; accepted while off, refused when on.
        neutral: values of `later` keys that also mean off, besides null, false, 0, empty values and `enabled: false`.
        ignored: NeMo RL keys that have no meaning here, some with wildcards; accepted with any value and dropped.
        idle: keys that other code may read or check but that have no effect here, with the reason; a log line
            tells the user who writes one.
        moved: keys that have moved to another place; writing one is an error that names the new place, unless
            `without_effect` has it.
        renamed: other names of keys, each with the name that the library reads (`spellings`).
        written_in: section below this one, and its sibling section whose keys may be written there too
            (`spellings`).

    and plain texts:
        place: dotted path of the section in a master config; it lets the section be built alone although a
            derived default refers to it by its full name.
        inherits: dotted path of a section whose values are the defaults of this one.
        rest: key of this section, a mapping, that takes the keys that the section does not have.
        decided_by: key of this section on whose value `without_effect` depends; keys that were written before it are
            not reported.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False, defer_build=True)

    later: ClassVar[Mapping[str, str]] = {}
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    ignored: ClassVar[Mapping[str, str]] = {}
    idle: ClassVar[Mapping[str, str]] = {}
    moved: ClassVar[Mapping[str, str]] = {}
    renamed: ClassVar[Mapping[str, str]] = {}
    written_in: ClassVar[Mapping[str, str]] = {}
    place: ClassVar[str] = ""
    inherits: ClassVar[str] = ""
    rest: ClassVar[str] = ""
    decided_by: ClassVar[str] = ""

    _other_section: Section | None = PrivateAttr(default=None)
    """Sibling section whose keys can be read and written here too (`written_in`)."""

    @classmethod
    def build(cls, **values: Any) -> Self:
        """Make a section in code, with derived defaults filled in.

        A derived default that depends on other sections (for example `data.max_input_seq_length`, which follows the
        policy's length) becomes null if the key allows null.

        Example:
            >>> PolicyConfig.build(model_name="gpt2", train_micro_batch_size=2).logprob_batch_size
            2

        Raises:
            ConfigError: a key is unknown, missing, of a wrong type or out of range.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            raise ConfigError(f"{cls.__name__}: " + "; ".join(lines)) from None

    @classmethod
    def of(cls, given: Self | Mapping[str, Any]) -> Self:
        """Return a section unchanged, or build one from a dict."""
        return given if isinstance(given, cls) else cls.build(**given)

    @classmethod
    def without_effect(cls, values: Mapping[str, Any]) -> Mapping[str, str]:
        """Return the keys that have no effect in a section with these values, each with the reason."""
        return {**cls.ignored, **cls.idle}

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        plain = unified(cls, {str(key): plain_values(value) for key, value in values.items()})
        plain = with_rest(cls, plain) if cls.rest else plain
        filled, derived = fill_defaults(cls, plain)
        if derived:
            filled = resolve_alone(cls, filled, derived)
        return drop_inactive(cls, filled)

    @model_validator(mode="after")
    def _complete_below(self) -> Self:
        self._introduce()
        return self

    def _introduce(self) -> None:
        """Give each section below a reference to the sibling section whose keys it also accepts."""
        for other, own in self.written_in.items():
            getattr(self, other)._other_section = getattr(self, own)

    def __getattr__(self, name: str) -> Any:
        """Return a key's value by its other name, or the value of a key of the sibling section."""
        if name in type(self).renamed:
            return getattr(self, type(self).renamed[name])
        if (
            not name.startswith("_")
            and self._other_section is not None
            and name in type(self._other_section).model_fields
        ):
            return getattr(self._other_section, name)
        return super().__getattr__(name)  # type: ignore[misc]

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a key of this section or of the sibling section."""
        name = type(self).renamed.get(name, name)
        if name[0] != "_" and name not in type(self).model_fields and self._other_section is not None:
            setattr(self._other_section, name, value)
        else:
            super().__setattr__(name, value)

    def __getitem__(self, key: str) -> Any:
        """Return the value of a key, as in a mapping.

        Raises:
            KeyError: there is no such key, or it belongs to a feature that is not built yet.
        """
        key = self.renamed.get(key, key)
        if key not in self:
            reason = (
                f"belongs to {self.later[key]}, which is not built yet" if key in self.later else "is not a key here"
            )
            raise KeyError(f"{key} {reason}. {type(self).__name__} has: {', '.join(self.keys())}.")
        return getattr(self, key)

    def __setitem__(self, key: str, value: Any) -> None:
        """Set a key. A mapping is checked and completed like one in a file.

        Raises:
            ConfigError: a key is unknown, or a value of a wrong type or out of range.
        """
        key = self.renamed.get(key, key)
        if self._other_section is not None and key not in type(self).model_fields:
            self._other_section[key] = value
            return
        field = type(self).model_fields.get(key)
        whole = isinstance(value, Section) and field is not None
        if not (whole and isinstance(value, Slot.of(field.annotation, field.metadata).sections)):  # type: ignore[union-attr]
            value = getattr(self.build(**{**self.model_dump(), key: value}), key, None)
        if field is not None:
            setattr(self, key, value)
            self._introduce()

    def __contains__(self, key: object) -> bool:
        return key in self.keys() or key in self.renamed

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]  # keys, as in a mapping
        return iter(self.keys())

    def keys(self) -> KeysView[str]:
        """Return the keys of this section and of the sibling section."""
        return self._values().keys()

    def values(self) -> ValuesView[Any]:
        """Return the values of `keys`."""
        return self._values().values()

    def items(self) -> ItemsView[str, Any]:
        """Return pairs of keys and values."""
        return self._values().items()

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or a default if there is no such key."""
        return self._values().get(self.renamed.get(key, key), default)

    def _values(self) -> dict[str, Any]:
        other = {} if self._other_section is None else vars(self._other_section)
        return {**other, **{name: vars(self)[name] for name in type(self).model_fields}}


def with_rest(section: type[Section], values: Mapping[str, Any]) -> dict[str, Any]:
    """Move the keys that a section does not declare into its mapping for such keys (`rest`)."""
    own, rest = known_keys(section), values.get(section.rest, {})
    if not isinstance(rest, Mapping):
        return dict(values)  # pydantic refuses the other type
    others = {key: value for key, value in values.items() if key not in own}
    return {
        **{key: values[key] for key in values if key in own},
        section.rest: {**rest, **others},
    }


def drop_inactive(section: type[Section], values: dict[str, Any]) -> dict[str, Any]:
    """Remove keys without effect or value. Refuse keys of features that do not exist yet."""
    idle = section.without_effect(values)
    given = {key: value for key, value in values.items() if value != MISSING}
    given = {key: value for key, value in given.items() if key in section.model_fields or not has_key(idle, key)}
    kept = Later(section.later, section.neutral).drop(given)
    for key, place in section.moved.items():
        if key in kept:
            raise PydanticCustomError(
                "moved", "this is the spelling of NeMo RL up to 0.5: {place}", {"key": key, "place": place}
            )
    return kept
