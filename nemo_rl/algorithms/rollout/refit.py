"""Send the policy's weights to the engines if the engines' weights are outdated.

This module connects `models.policy` and `models.generation`, which do not import each other. One sync:

    engines.begin ─┐                        ┌─ next buckets are packed while these are loaded
    policy.begin  ─┴► policy.next_buckets ─►│─► engines.receive_bucket  (+ policy.send for collectives)
                            ▲───────────────┘        until the last bucket of each lane
    engines.finish ─► receipts ─► verify: version, tensor count, checksums, nothing left unbound

With engines of several workers and a collective transport, the first sync is done twice. In the first pass workers get
whole tensors and record which parts they read. In the second pass they get only these parts (`weight_sync.lanes`).
Every wait has the deadline `cluster.timeouts.weight_sync_s`. If an engine dies, it is replaced and the sync restarts.

A sync runs in the training thread or, when an engine has died, in the thread that replaces the engine, at any time
while other threads generate, validate, score or train. A sync first locks the engines (`EngineGroup.exclusively`) and
then the policy (`WeightSource.held`). An update of the policy locks it from its first gradient to its new version.

Invariants: a sync delivers all tensors of one version. When `ensure_fresh` has returned, every engine answers with the
policy's weight version.
"""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from nemo_rl.algorithms.runtime.device_sharing import MemorySharing
from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.distributed.workers.results import PendingCall, gather
from nemo_rl.models.generation.engine_group import EngineGroup
from nemo_rl.models.generation.registry import engine_kind
from nemo_rl.utils.errors import NonFiniteError
from nemo_rl.weight_sync.buckets import Bucket
from nemo_rl.weight_sync.lanes import Lane, LaneChoice, LaneOfWorkers, Trainers
from nemo_rl.weight_sync.transport import TransportSpec
from nemo_rl.weight_sync.verify import SyncReceipt, check_receipts

logger = logging.getLogger(__name__)


_COMPARED_TOKENS = list(range(1, 17))
"""Prompt for a comparison of hidden states after a sync of whole tensors and after a sync of parts."""


class WeightSource(Trainers, Protocol):
    """The methods of the policy that a sync calls."""

    @property
    def weight_version(self) -> int:
        """Version of the current weights."""

    def held(self) -> AbstractContextManager[None]:
        """Keep the weights and their version unchanged, after waiting for a running update.

        Raises:
            DeadlineExceededError: On entering, if a running update does not end in time.
        """

    def begin_weight_stream(self, lanes: list[Lane]) -> list[PendingCall]:
        """Start a stream of weights on all ranks, and return the calls to wait for."""

    def next_weight_buckets(self) -> list[Bucket]:
        """Pack the next tensors into one bucket per lane."""

    def send_weight_bucket(self, bucket: Bucket) -> list[PendingCall]:
        """Send a bucket if the transport needs a call for it, and return the calls to wait for."""


NO_WEIGHTS = -1
"""Version number of engines that have released their weights."""


@dataclass(frozen=True)
class Engines:
    """The engines as a `DeviceUser` of devices that the policy shares (`runtime.device_sharing`)."""

    generation: EngineGroup
    timeout_s: float
    """Time limit in seconds for answers of the engines."""
    drops_weights: bool = False
    """Whether the engines lose their weights when they sleep."""

    def rest(self) -> None:
        """Release device memory."""
        self._all("sleep")
        if self.drops_weights:
            self.generation.weight_version = NO_WEIGHTS

    def wake(self) -> None:
        """Allocate device memory again."""
        self._all("wake_up")

    def _all(self, method: str) -> None:
        workers = self.generation.workers

        def call_all() -> None:
            calls = self.generation.call_all(method)
            workers.get_all_worker_results(calls, self.timeout_s, f"engines: {method}")

        self.generation.with_replacements(call_all)


def shared_engines(policy: PolicyConfig, cluster: ClusterConfig, engines: EngineGroup | None) -> Engines | None:
    """Return the engines as a user of shared devices, or None if there are none or they have their own devices."""
    generation = policy.generation
    if engines is None or generation is None or not generation.colocated.enabled:
        return None
    drops_weights = engine_kind(generation.backend).drops_weights(generation)
    return Engines(engines, cluster.timeouts.weight_sync_s, drops_weights)


class Refitter:
    """Keep the engines' weights equal to the policy's. Methods may be called from several threads.

    Args:
        timeout_s: Time limit of every wait within a sync, in seconds.
        memory: Moves shared devices between "generation" and "policy".
        send_parts: Send each worker only what it reads, if the transport sends (`lane_choice`).
    """

    def __init__(
        self,
        policy: WeightSource,
        generation: EngineGroup,
        spec: TransportSpec,
        timeout_s: float,
        memory: MemorySharing | None = None,
        send_parts: bool = True,
    ):
        self._policy = policy
        self._generation = generation
        self._lanes = LaneChoice(spec, policy, generation.workers_per_engine, send_parts)
        self._transport = spec.name
        self._timeout_s = timeout_s
        self._memory = memory or MemorySharing()
        self._synced: tuple[int, int] | None = None
        self.last_sync: dict[str, float] = {}
        """Sizes and durations (seconds) of the last sync."""
        self.before_update: list[Callable[[], None]] = []
        """Functions that are called in order before the engines get new weights or go to sleep. They wait until running
        answers that must not get new weights are finished."""
        generation.load_weights = self.sync

    @property
    def weight_version(self) -> int:
        """Version of the policy's current weights."""
        return self._policy.weight_version

    @property
    def _is_fresh(self) -> bool:
        version = self._policy.weight_version
        holds = self._generation.weight_version == version
        return holds and self._synced == (version, self._generation.membership)

    def ensure_fresh(self) -> None:
        """Wake the engines, and sync if their weights are outdated or if an engine was replaced or added.

        Raises:
            WeightSyncError: The weights did not arrive, or arrived with other values.
            DeadlineExceededError: Policy or engines did not answer in time.
        """
        self._generation.follow_number()
        if not self._is_fresh:
            self._wait_for_answers()  # without the locks, because the restart of an engine needs them
        with self._generation.exclusively(), self._policy.held(), self._generation.changing():
            self._memory.hand_to(("generation",))
            if not self._is_fresh:
                self.sync()

    def before_training(self) -> None:
        """Give the policy the device memory that it shares with the engines."""
        if self._memory.is_shared("generation"):
            self._wait_for_answers()
        self._memory.hand_to(("policy",))

    def _wait_for_answers(self) -> None:
        for wait in self.before_update:
            wait()

    def sync(self) -> None:
        """Send the policy's current weights to all engines, and replace engines that died."""
        with self._generation.exclusively(), self._policy.held():
            started = time.perf_counter()
            receipts = self._generation.with_replacements(self._sync_once)
            self._note_sync(receipts, time.perf_counter() - started)

    def _note_sync(self, receipts: list[SyncReceipt], seconds: float) -> None:
        version = self._policy.weight_version
        self._synced = (version, self._generation.membership)
        self._generation.weight_version = version
        num_bytes = max(receipt.num_bytes for receipt in receipts)
        self.last_sync = {
            "sync_s": seconds,
            "sync_mb": num_bytes / 1e6,
            "sync_mb_per_s": num_bytes / 1e6 / max(seconds, 1e-9),
            "num_tensors": float(max(receipt.num_tensors for receipt in receipts)),
        }
        logger.debug("Weights of version %d reached %d workers in %.3f s.", version, len(receipts), seconds)

    def _sync_once(self) -> list[SyncReceipt]:
        if not self._lanes.wants_reads:
            return self._transfer()
        self._lanes.start_over()
        self._wait(self._on_engines("record_reads"), "recording")
        receipts = self._transfer()
        if not self._lanes.learn(self._wait(self._on_engines("take_reads"), "recording")):
            return receipts
        expected = self._computed()
        if not all(expected[1][:: self._generation.workers_per_engine]):  # their first workers answer
            self._lanes.refuse("the engines do not report what their layers compute, so parts cannot be tried")
            return receipts
        receipts = self._transfer(is_trial=True)
        if self._computes(expected):
            self._lanes.accept()
            return receipts
        self._lanes.refuse("the engines read more of them than was recorded")
        return self._transfer()

    def _computes(self, expected: list[Any]) -> bool:
        try:
            return self._computed() == expected
        except NonFiniteError:  # an element was read that was not sent
            return False

    def _computed(self) -> list[Any]:
        """Return a summary of the engines' weights: names of non-finite weights, and hidden states as bytes."""
        spoilt = self._wait(self._on_engines("weights_not_finite"), "comparing")
        outputs = self._wait(self._on_engines("layer_outputs", _COMPARED_TOKENS), "comparing")
        return [spoilt, [[layer.numpy().tobytes() for layer in of_worker] for of_worker in outputs]]

    def _transfer(self, is_trial: bool = False) -> list[SyncReceipt]:
        """Send all tensors once. With trial, the workers fill tensors that they do not receive with NaN."""
        engines = (self._generation.num_workers, self._generation.membership)
        if self._lanes.must_meet(*engines):  # a trainer rank would wait a minute for a dead engine
            self._wait(self._on_engines("ready"), "looking for engines")
        lanes = self._lanes.of(*engines)
        version = self._policy.weight_version
        opening = [call for lane in lanes for call in self._on(lane, "begin_weight_update", lane.lane.spec, version)]
        self._wait(opening + self._policy.begin_weight_stream([lane.lane for lane in lanes]), "opening")
        streams: list[list[Bucket]] = []
        in_flight: list[PendingCall] = []
        while not streams or not streams[-1][0].is_last:
            buckets = self._policy.next_weight_buckets()
            self._wait(in_flight, f"bucket {len(streams) - 1}")
            streams.append(buckets)
            in_flight = []
            for lane, bucket in zip(lanes, buckets, strict=True):
                bucket.is_trial = is_trial
                in_flight += self._on(lane, "receive_bucket", bucket)
                in_flight += self._policy.send_weight_bucket(bucket)
        self._wait(in_flight, f"bucket {len(streams) - 1}")
        receipts: list[SyncReceipt] = self._wait(self._on_engines("finish_weight_update", version), "closing")
        for lane, of_lane in zip(lanes, zip(*streams, strict=True), strict=True):
            check_receipts([receipts[worker] for worker in lane.workers], list(of_lane), version)
        return receipts

    def _on(self, lane: LaneOfWorkers, method: str, *args: Any) -> list[PendingCall]:
        return self._generation.workers.pending_calls(self._generation.call_all(method, *args, workers=lane.workers))

    def _on_engines(self, method: str, *args: Any) -> list[PendingCall]:
        return self._generation.workers.pending_calls(self._generation.call_all(method, *args))

    def _wait(self, calls: list[PendingCall], part: str) -> list[Any]:
        workers = [call.slot for call in calls]
        return gather(calls, workers, self._timeout_s, f"weight sync, {part} ({self._transport})")
