"""Stream the policy's weights to the engines, for `algorithms.rollout.refit`.

The stream runs in the controller, requests each bucket from all ranks and joins their reports. Invariant: ranks
exchange the blocks of a bucket, so every rank is called for every bucket.
"""

from contextlib import AbstractContextManager

from nemo_rl.distributed.workers.results import PendingCall
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.weight_sync.buckets import Bucket
from nemo_rl.weight_sync.endpoints import merge_buckets
from nemo_rl.weight_sync.exchange import Encoding
from nemo_rl.weight_sync.lanes import Lane


class PolicyWeightStream:
    """Stream a policy's weights.

    Args:
        dtype: Name of the torch dtype in which the engines compute, for example "bfloat16".
        timeout_s: Time limit for the packing of one bucket, in seconds.
        encoding: Encoding of weights that are not sent in `dtype`, such as float8 values with scales.
    """

    def __init__(self, policy: Policy, dtype: str, timeout_s: float, encoding: Encoding | None = None):
        self._policy = policy
        self._workers = policy.worker_group
        self._dtype = dtype
        self._encoding = encoding
        self._timeout_s = timeout_s
        self._senders: list[int] = []

    @property
    def weight_version(self) -> int:
        """The version of the policy's current weights."""
        return self._policy.weight_version

    def held(self) -> AbstractContextManager[None]:
        """Keep the weights unchanged during a block (`Policy.held`)."""
        return self._policy.held()

    @property
    def num_ranks(self) -> int:
        """The number of trainer ranks."""
        return len(self._workers.workers)

    def begin_weight_stream(self, lanes: list[Lane]) -> list[PendingCall]:
        """Start a stream on all ranks, and return the calls to wait for."""
        self._senders = [lane.sender for lane in lanes]
        calls = self._workers.run_all_workers_single_data("begin_weight_stream", lanes, self._dtype, self._encoding)
        return self._workers.pending_calls(calls)

    def next_weight_buckets(self) -> list[Bucket]:
        """Let the ranks exchange blocks of the next tensors and pack a bucket for each lane.

        Raises:
            WeightSyncError: ranks disagree about the stream.
            DeadlineExceededError, WorkerDiedError: a rank did not answer.
        """
        calls = self._workers.run_all_workers_single_data("next_weight_buckets")
        of_ranks = self._workers.get_all_worker_results(calls, self._timeout_s, "packing weights")
        return [merge_buckets(list(of_lane)) for of_lane in zip(*of_ranks, strict=True)]

    def send_weight_bucket(self, bucket: Bucket) -> list[PendingCall]:
        """Send a bucket through a sending transport, and return the calls to wait for."""
        if bucket.handles:
            return []
        sender = self._senders[bucket.lane]
        call = self._workers.run_single_worker_single_data("send_weight_bucket", sender, bucket)
        return [PendingCall(call, self._workers.slot(sender))]

    def meeting_point(self, rank: int) -> tuple[str, int]:
        """Return the address of a rank, and a port that it reserves for a process group."""
        return self._workers.meeting_point(rank)
