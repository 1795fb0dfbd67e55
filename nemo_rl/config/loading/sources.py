"""Remembers which file or override gave each value, for error messages.

Invariant: the last writer of a key is its source.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf

from nemo_rl.config.base.structure import value_at
from nemo_rl.config.loading.inheritance import Layer

_ABSENT = object()


@dataclass
class Sources:
    """Writers of a configuration, the earliest first.

    Attributes:
        layers: file name and plain content of each layer.
        overrides: dotted key and the text of each override.
    """

    layers: list[tuple[str, Any]] = field(default_factory=list)
    overrides: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def of_layers(cls, layers: Sequence[Layer]) -> "Sources":
        """The sources of a configuration before overrides."""
        return cls([(str(x.path), OmegaConf.to_container(x.content)) for x in layers])

    def of(self, path: Sequence[str | int]) -> str:
        """What set the value at `path`: an override, a file or the schema."""
        dotted = dotted_path(path)
        for key, text in reversed(self.overrides):
            if dotted == key or dotted.startswith(f"{key}.") or key.startswith(f"{dotted}."):
                return f"the override {text!r}"
        for name, content in reversed(self.layers):
            if self.is_written(path, content):
                return name
        return "a default of the schema"

    def has(self, path: Sequence[str | int]) -> bool:
        """Whether a file or an override sets `path`."""
        return any(self.is_written(path, content) for _, content in self.layers) or any(
            dotted_path(path) == key for key, _ in self.overrides
        )

    @staticmethod
    def is_written(path: Sequence[str | int], content: Any) -> bool:
        """Whether a file with this content sets `path`."""
        return value_at(content, path, _ABSENT) is not _ABSENT


def dotted_path(path: Sequence[str | int]) -> str:
    """A path as users write it in overrides: `data.train.0.seed`."""
    return ".".join(str(part) for part in path)
