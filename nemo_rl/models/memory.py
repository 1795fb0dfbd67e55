"""Predicted memory of a rank, as runs show it and compare it with what there is; backends make it.

Invariant: bytes are those that a rank's tensors take; what the C library, the communication library and other processes
take comes on top.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

type Moment = Mapping[str, float]
"""What is held, by kind, in bytes."""


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one rank.

    Attributes:
        stays: what is held on the device all the time.
        moments: what points of a step add to it.
        host: what a rank with a device of its own keeps in host memory.
        missing: what is not in the numbers, for people; empty if nothing is known to be missing.
    """

    stays: Moment
    moments: Mapping[str, Moment]
    host: Moment
    missing: str = ""

    @property
    def peak_moment(self) -> str:
        """When most is held."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def certain(self) -> float:
        """Bytes that a rank holds whatever it works on."""
        return sum(self.stays.values())

    @property
    def peak(self) -> float:
        """Most bytes on the device."""
        return self.certain + sum(self.moments[self.peak_moment].values())

    def table(self, title: str) -> str:
        """Lines for people: kinds down, moments across, in GiB."""
        kinds = dict.fromkeys(kind for held in self.moments.values() for kind, size in held.items() if size)
        lines = [f"{title}, GiB on each rank (the most is held in the column {self.peak_moment!r}):"]
        lines.append(_line("", self.moments))
        lines += [_line(kind, [_gib(size)] * len(self.moments)) for kind, size in self.stays.items() if size]
        lines += [_line(kind, [_gib(held.get(kind, 0.0)) for held in self.moments.values()]) for kind in kinds]
        lines.append(_line("all", [_gib(self.certain + sum(held.values())) for held in self.moments.values()]))
        if self.host:
            lines.append("  in host memory: " + ", ".join(f"{kind} {_gib(size)}" for kind, size in self.host.items()))
        return "\n".join([*lines, self.missing] if self.missing else lines)


def _line(kind: str, cells: Iterable[str]) -> str:
    return f"  {kind:<34}" + "".join(f"{cell:>20}" for cell in cells)


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g}" if size else "-"
