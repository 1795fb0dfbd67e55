"""Wait for the start of workers: their processes answer, then their constructors end.

`worker_groups` makes the calls, all before the first wait, so that all workers start at the same time. Invariant: both
waits together have one deadline.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nemo_rl.distributed.workers.results import PendingCall, WorkerSlot, gather
from nemo_rl.distributed.workers.start_phases import PROCESS, WorkerPhase, slowest_of


def await_start(
    slots: list[WorkerSlot],
    indices: Sequence[int],
    calls: tuple[Sequence[Any], Sequence[Any]],
    end: float,
    phase: str,
    began: float,
) -> list[WorkerPhase]:
    """Wait until processes have reported their identity and built their worker objects.

    Args:
        slots: workers of the group; those that start get their identities here, also if a constructor fails.
        indices: positions of those that start.
        calls: calls of `WorkerHost.report_identity` and of `WorkerHost.build`, in the order of `indices`.
        end: `time.monotonic()` at the deadline.
        phase: name of the wait for errors.
        began: `time.monotonic()` at which the processes were requested.

    Returns:
        The parts of their start.

    Raises:
        Exception: as `gather`.
    """
    reports, builds = calls
    new, arrivals = [slots[idx] for idx in indices], dict[int, float]()
    asked = [PendingCall(ref, slot) for ref, slot in zip(reports, new, strict=True)]
    identities = gather(asked, new, end - time.monotonic(), phase, arrivals)
    for idx, who in zip(indices, identities, strict=True):
        slots[idx] = replace(slots[idx], identity=who)
    called = [PendingCall(ref, slots[idx]) for idx, ref in zip(indices, builds, strict=True)]
    built = gather(called, [call.slot for call in called], max(end - time.monotonic(), 0.0), phase)
    workers = [(who.name, who.node_ip) for who in identities]
    return slowest_of(workers, [{PROCESS: arrivals[idx] - began} for idx in indices]) + slowest_of(workers, built)
