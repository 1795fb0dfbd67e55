"""How models and engines that share devices take turns: who rests moves its state to host memory.

Any number of parties. Invariant: before a party works, all others that share its devices have been asked to rest.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from nemo_rl.models.policy.lm_policy import Policy


class Party(Protocol):
    """Something with state on shared devices; both methods have nothing to do when called again."""

    def rest(self) -> None:
        """Move what can be moved to host memory."""

    def wake(self) -> None:
        """Take it back."""


@dataclass(frozen=True)
class TrainedModel:
    """A model under training: its optimizer state rests, its weights stay for the next weight sync.

    Attributes:
        policy: its ranks.
    """

    policy: Policy

    def rest(self) -> None:
        """Optimizer state to the host."""
        self.policy.offload_optimizer()

    def wake(self) -> None:
        """Optimizer state back."""
        self.policy.onload_optimizer()


@dataclass(frozen=True)
class FrozenModel:
    """A model for inference only: its weights rest.

    Attributes:
        policy: its ranks.
    """

    policy: Policy

    def rest(self) -> None:
        """Weights to the host."""
        self.policy.offload_weights()

    def wake(self) -> None:
        """Weights back."""
        self.policy.onload_weights()


class MemorySharing:
    """Hands shared devices from party to party.

    Args:
        parties: those that share devices, by name; none where every party has devices of its own, or on a CPU, whose
            memory holds all of them.
    """

    def __init__(self, parties: Mapping[str, Party] | None = None):
        self._parties = parties or {}
        self._working: set[str] = set()

    def is_shared(self, name: str) -> bool:
        """Return whether a party shares its devices."""
        return name in self._parties

    def hand_to(self, names: Collection[str]) -> None:
        """Let the others rest, then wake these.

        Args:
            names: parties that are about to work; without one that shares devices everything stays as it is.
        """
        working = self._parties.keys() & set(names)
        if not working or working == self._working:
            return
        for name, party in self._parties.items():
            if name not in working:
                party.rest()
        for name in working:
            self._parties[name].wake()
        self._working = working
