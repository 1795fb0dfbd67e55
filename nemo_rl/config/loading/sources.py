"""Record which file or override set each value, for error messages.

Invariant: the source of a key is its last writer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf

from nemo_rl.config.base.names import OVERRIDE_MARKER
from nemo_rl.config.base.structure import value_at
from nemo_rl.config.loading.inheritance import Layer

_ABSENT = object()


@dataclass
class Sources:
    """Files and overrides that wrote a configuration, earliest first."""

    layers: list[tuple[str, Any]] = field(default_factory=list)
    """Name and plain content of each layer's file."""
    overrides: list[tuple[str, str, Any]] = field(default_factory=list)
    """Dotted key, text and value of each override."""

    @classmethod
    def of_layers(cls, layers: Sequence[Layer]) -> "Sources":
        """Return the sources of a configuration before overrides."""
        return cls([(str(x.path), OmegaConf.to_container(x.content)) for x in layers])

    def of(self, path: Sequence[str | int]) -> str:
        """Return the name of the source of the value at `path`: an override, a file or the schema."""
        dotted = dotted_path(path)
        for key, text, _ in reversed(self.overrides):
            if dotted == key or dotted.startswith(f"{key}.") or key.startswith(f"{dotted}."):
                return f"the override {text!r}"
        return self._file_of(path) or "a default of the schema"

    def has(self, path: Sequence[str | int]) -> bool:
        """Return whether a file or an override sets `path`."""
        return self._file_of(path) is not None or any(dotted_path(path) == key for key, *_ in self.overrides)

    def rank(self, path: Sequence[str | int]) -> int:
        """Return the number of the last file that sets `path` or a key below it, or -1.

        All overrides have the same number, which is higher than that of every file.
        """
        dotted = dotted_path(path)
        for key, _, value in self.overrides:
            below = dotted[len(key) + 1 :].split(".") if dotted.startswith(f"{key}.") else None
            is_inside = below is not None and value_at(value, below, _ABSENT) is not _ABSENT
            if dotted == key or key.startswith(f"{dotted}.") or is_inside:
                return len(self.layers)
        for number, (_, content) in reversed(list(enumerate(self.layers))):
            if self.is_written(path, content):
                return number
            if _replaces(path, content):
                return -1
        return -1

    def _file_of(self, path: Sequence[str | int]) -> str | None:
        """Return the last file that sets `path`, unless a later file replaces a whole mapping above it."""
        for name, content in reversed(self.layers):
            if self.is_written(path, content):
                return name
            if _replaces(path, content):
                return None
        return None

    @staticmethod
    def is_written(path: Sequence[str | int], content: Any) -> bool:
        """Return whether a file with this content sets `path`."""
        return value_at(content, path, _ABSENT) is not _ABSENT


def _replaces(path: Sequence[str | int], content: Any) -> bool:
    """Return whether a file drops earlier values at `path` by replacing a whole mapping above it."""
    above = [value_at(content, path[:depth], _ABSENT) for depth in range(1, len(path))]
    return any(
        value is not _ABSENT and (not isinstance(value, Mapping) or value.get(OVERRIDE_MARKER) is True)
        for value in above
    )


def dotted_path(path: Sequence[str | int]) -> str:
    """Return a path in the form of overrides: `data.train.0.seed`."""
    return ".".join(str(part) for part in path)
