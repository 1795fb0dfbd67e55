"""Stream the policy's weights to the engines, for `algorithms.rollout.refit`.

Runs in the controller: requests each bucket from all ranks and joins their reports. Invariant: gathering a bucket is
collective, so every rank is called every time, whichever rank packs.
"""

from contextlib import AbstractContextManager

from nemo_rl.distributed.workers.results import PendingCall
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.weight_sync.buckets import Bucket
from nemo_rl.weight_sync.endpoints import merge_buckets
from nemo_rl.weight_sync.transport import TransportSpec


class PolicyWeightStream:
    """Streams a policy's weights.

    Args:
        policy: the policy.
        dtype: torch dtype that the engines compute in, for example "bfloat16".
        timeout_s: seconds to wait for the packing of one bucket.
    """

    def __init__(self, policy: Policy, dtype: str, timeout_s: float):
        self._policy = policy
        self._workers = policy.worker_group
        self._dtype = dtype
        self._timeout_s = timeout_s

    @property
    def weight_version(self) -> int:
        """The version of the policy's current weights."""
        return self._policy.weight_version

    def held(self) -> AbstractContextManager[None]:
        """See `Policy.held`."""
        return self._policy.held()

    def begin_weight_stream(self, spec: TransportSpec) -> list[PendingCall]:
        """Start a stream on all ranks; return the calls to wait for."""
        calls = self._workers.run_all_workers_single_data("begin_weight_stream", spec, self._dtype)
        return self._workers.pending_calls(calls)

    def next_weight_bucket(self) -> Bucket:
        """Gather and pack the next bucket.

        Raises:
            WeightSyncError: ranks disagree about the stream.
            DeadlineExceededError, WorkerDiedError: a rank did not answer.
        """
        calls = self._workers.run_all_workers_single_data("next_weight_bucket")
        reports = self._workers.get_all_worker_results(calls, self._timeout_s, "packing weights")
        return merge_buckets(reports)

    def send_weight_bucket(self, bucket: Bucket) -> list[PendingCall]:
        """Send a bucket through a sending transport; return the calls to wait for."""
        if bucket.handles:
            return []
        return [
            PendingCall(
                self._workers.run_single_worker_single_data("send_weight_bucket", 0, bucket),
                self._workers.slot(0),
            )
        ]

    def meeting_point(self) -> tuple[str, int]:
        """Return the address of rank 0 and a port that it reserves for one process group."""
        return self._workers.meeting_point()
