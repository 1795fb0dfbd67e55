"""Parts of a run whose state a checkpoint stores together with the position in the data."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol


class StoredPart(Protocol):
    """State that is stored with the position, such as groups that were sampled ahead of training."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, plain values, and lists and dicts of them."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a stored state; a part that holds groups calls `Prompts.claim` for their prompts."""


class StoredParts:
    """The parts that a stream stores, by name."""

    def __init__(self) -> None:
        self._parts: dict[str, StoredPart] = {}

    def attach(self, name: str, part: StoredPart) -> None:
        """Add a part, or replace the one of this name."""
        self._parts[name] = part

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each part."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the parts that have a stored state."""
        for name in self._parts.keys() & state.keys():
            self._parts[name].load_state_dict(state[name])


def unfinished_state(outstanding: Iterable[tuple[int, int]], parts: StoredParts) -> dict[str, Any]:
    """Return the entries of a stream's state about prompts that were drawn and not trained on.

    Args:
        outstanding: epoch and row of each of these prompts.
        parts: the parts that hold their groups.

    Returns:
        `outstanding`, a list of `[epoch, row]`, and `parts`, the state of each part by its name. Empty ones are left
        out.
    """
    entries = {"outstanding": [list(position) for position in outstanding], "parts": parts.state_dict()}
    return {name: entry for name, entry in entries.items() if entry}
