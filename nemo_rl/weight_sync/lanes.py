"""Divide a weight stream into lanes: workers of engines that read the same parts of every tensor share one.

A stream starts with one lane, in which every worker receives whole tensors. When it is known what each worker reads
(`parts.ReadRecorder`), the workers at the same place of their engines get a lane of their own: a trainer rank sends
its parts once, to all of them. Lanes have different senders where there are enough trainer ranks, so that their
networks share the work. Invariant: every worker is in exactly one lane.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl.weight_sync.parts import Parts
from nemo_rl.weight_sync.transport import TransportSpec


@dataclass(frozen=True)
class Lane:
    """One way for weights from the trainer to engines."""

    spec: TransportSpec
    sender: int = 0
    """Trainer rank that sends; fetching transports have senders on every node or device instead."""
    parts: Parts | None = None
    """Parts that the workers read; None: whole tensors."""


@dataclass(frozen=True)
class LanePlan:
    """Workers of a lane, by rank among the workers of all engines, and what they read."""

    workers: tuple[int, ...]
    sender: int
    parts: Parts


def plan_lanes(reads: Sequence[Parts], num_workers: int, num_senders: int) -> list[LanePlan]:
    """Group the workers of all engines by what they read.

    Args:
        reads: what the workers of one engine read, by their place in it.
        num_workers: number of workers of all engines; worker w is at place `w % len(reads)`.
        num_senders: number of trainer ranks; the lanes' senders are spread over them.
    """
    places: list[list[int]] = []
    for place, parts in enumerate(reads):
        same = next((group for group in places if reads[group[0]] == parts), None)
        if same is None:
            places.append([place])
        else:
            same.append(place)
    plans = []
    for number, group in enumerate(places):
        workers = tuple(worker for worker in range(num_workers) if worker % len(reads) in group)
        plans.append(LanePlan(workers, number * num_senders // len(places) % num_senders, reads[group[0]]))
    return plans
