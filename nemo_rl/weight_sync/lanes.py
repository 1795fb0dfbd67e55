"""Divide a weight stream into lanes, and choose the lanes of each weight sync.

A lane is a stream of weights from one sender to some workers of engines. At first, all workers are in one lane and
receive whole tensors. When the parts that each worker reads are known (`parts.ReadRecorder`), workers that read the
same parts share a lane, so that these parts are sent to all of them at once. Lanes have different senders if there are
enough trainer ranks, so that several networks share the work. Invariant: every worker is in exactly one lane.

`LaneChoice` chooses the lanes of a run's weight syncs:

    whole tensors, recorded ─► learn ─► parts, on trial ─► accept ─► parts
                                            └─► refuse ─► whole tensors from then on

Parts are used only for collectives to engines with several workers. With other transports, engines read the trainer's
memory, so nothing is sent. An engine with one worker reads everything. Invariant: parts are used only after a trial in
which the engines computed the same with parts as with whole tensors (`algorithms.rollout.refit`).
"""

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nemo_rl.weight_sync.parts import BlocksByName
from nemo_rl.weight_sync.transport import TransportSpec


@dataclass(frozen=True)
class Lane:
    """A stream of weights from a trainer rank to some workers of engines."""

    spec: TransportSpec
    sender: int = 0
    """The sending trainer rank, for collectives. Other transports use a rank on every node or device."""
    parts: BlocksByName | None = None
    """Parts of tensors for these workers. None for whole tensors."""


@dataclass(frozen=True)
class LanePlan:
    """A lane's workers (by their numbers among the workers of all engines), its sender, and the parts they read."""

    workers: tuple[int, ...]
    sender: int
    parts: BlocksByName


def plan_lanes(reads: Sequence[BlocksByName], num_workers: int, num_senders: int) -> list[LanePlan]:
    """Group the workers of all engines by the parts that they read.

    Args:
        reads: the parts that each worker of one engine reads.
        num_workers: number of workers of all engines; worker w reads the parts `reads[w % len(reads)]`.
        num_senders: number of trainer ranks; the lanes' senders are spread over these ranks.
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


logger = logging.getLogger(__name__)


class Trainers(Protocol):
    """The trainer ranks that can be senders."""

    @property
    def num_ranks(self) -> int:
        """Number of trainer ranks."""

    def meeting_point(self, rank: int) -> tuple[str, int]:
        """Return the address of a rank, and a port that it reserves for a process group."""


@dataclass(frozen=True)
class LaneOfWorkers:
    """A lane with the numbers of its workers among the workers of all engines."""

    lane: Lane
    workers: Sequence[int]


class LaneChoice:
    """Choose the lanes of a run's weight syncs.

    Args:
        spec: settings of the transport; for collectives, this class fills in addresses and receivers.
        send_parts: whether parts may be sent.
    """

    def __init__(self, spec: TransportSpec, trainers: Trainers, workers_per_engine: int, send_parts: bool):
        self._spec = spec
        self._trainers = trainers
        self._workers_per_engine = workers_per_engine
        self._may_divide = send_parts and spec.name == "collective" and workers_per_engine > 1
        self._reads: list[BlocksByName] | None = None
        self._is_proven = False
        self._lanes: list[LaneOfWorkers] = []
        self._made_for: tuple[int, int, bool] | None = None

    @property
    def wants_reads(self) -> bool:
        """Return True if the workers must record, in the next sync, which parts of tensors they read."""
        return self._may_divide and not self._is_proven

    def must_meet(self, num_workers: int, membership: int) -> bool:
        """Return whether `of`, with these arguments, makes lanes that need new process groups."""
        return self._spec.name == "collective" and self._key(num_workers, membership) != self._made_for

    def of(self, num_workers: int, membership: int) -> list[LaneOfWorkers]:
        """Return the lanes.

        Args:
            num_workers: number of workers of the running engines.
            membership: a number that changes when engines are added or lost, so that new process groups are formed.
        """
        key = self._key(num_workers, membership)
        if key != self._made_for:
            self._lanes = self._make(num_workers, membership)
            self._made_for = key
        return self._lanes

    def _key(self, num_workers: int, membership: int) -> tuple[int, int, bool]:
        """Return the values on which the lanes depend. If they change, new lanes are made."""
        return num_workers, membership, self._reads is None

    def _make(self, num_workers: int, membership: int) -> list[LaneOfWorkers]:
        everyone = tuple(range(num_workers))
        if self._spec.name != "collective":
            return [LaneOfWorkers(Lane(self._spec), everyone)]
        if self._reads is None:
            return [LaneOfWorkers(Lane(self._meeting(everyone, 0, str(membership))), everyone)]
        lanes = []
        for number, plan in enumerate(plan_lanes(self._reads, num_workers, self._trainers.num_ranks)):
            spec = self._meeting(plan.workers, plan.sender, f"{membership}-{number}")
            lanes.append(LaneOfWorkers(Lane(spec, plan.sender, plan.parts), plan.workers))
        return lanes

    def _meeting(self, workers: tuple[int, ...], sender: int, epoch: str) -> TransportSpec:
        """Return the transport settings for a process group of one trainer rank and some workers."""
        address, port = self._trainers.meeting_point(sender)
        extra = {"epoch": epoch}
        return dataclasses.replace(self._spec, master_address=address, master_port=port, receivers=workers, extra=extra)

    def start_over(self) -> None:
        """Send whole tensors and record the reads again, after an interrupted trial without a result."""
        self._reads = None

    def learn(self, reads: Sequence[BlocksByName]) -> bool:
        """Use the parts that workers read in a sync of whole tensors. Return whether a trial of parts begins."""
        of_engine = list(reads[: self._workers_per_engine])
        if not all(of_engine):  # reads outside PyTorch or in another thread
            self._may_divide = False
            return False
        self._reads = of_engine
        return True

    def accept(self) -> None:
        """Send parts from now on, because engines computed the same results with parts as with whole tensors."""
        self._is_proven = True

    def refuse(self, reason: str) -> None:
        """Send whole tensors from now on, because parts gave other results or the trial failed."""
        logger.warning("Weights are sent whole (as with policy.generation.weight_sync.send_parts=false): %s.", reason)
        self._reads, self._may_divide = None, False
