"""Broadcast over gloo on loopback: one trainer, two engines, three processes."""

import dataclasses
import os
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from sync_processes import Child, ReceivingEngine, RemoteFailure, equal_to_sent

from nemo_rl.weight_sync import transport
from nemo_rl.weight_sync.buckets import Bucket
from nemo_rl.weight_sync.endpoints import WeightSender
from nemo_rl.weight_sync.lanes import Lane
from nemo_rl.weight_sync.parts import WholeWeights
from nemo_rl.weight_sync.transport import GroupMember, TransportSpec
from nemo_rl.weight_sync.verify import check_receipts

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

NUM_ENGINES = 2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def make_spec(epoch: int = 0) -> TransportSpec:
    return TransportSpec(
        "collective",
        run_id="test",
        bucket_size_bytes=4096,
        master_port=free_port(),
        receivers=tuple(range(NUM_ENGINES)),
        timeout_s=20.0,
        extra={"epoch": epoch},
    )


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {
        f"layer.{i}": torch.randn(17 + 100 * i, 5, generator=generator).to(dtype)
        for i, dtype in enumerate([torch.float32, torch.bfloat16, torch.float16, torch.float32])
    }


class SendingTrainer:
    """Trainer rank 0; `corrupt` flips a bit of the sent bytes, after the fingerprints were made."""

    def __init__(self, spec: TransportSpec):
        self._sender = WeightSender([Lane(spec)], rank=0, is_node_leader=True)

    def begin(self, version: int) -> None:
        self._sender.begin(WholeWeights(weights(version).items))

    def next_bucket(self) -> Bucket:
        return self._sender.next_buckets()[0]

    def push(self, bucket: Bucket, corrupt: bool = False) -> None:
        if corrupt:
            flat = self._sender._transports[0].buffer(bucket.num_bytes, bucket.index)
            flat[bucket.slots[0].offset] ^= 1
        self._sender.send(bucket)

    def close(self) -> None:
        self._sender.close()


def sync(trainer: Child, engines: list[Child], version: int, corrupt: bool = False) -> list[Bucket]:
    for engine in engines:
        engine.call("begin", version)
    trainer.call("begin", version)
    buckets: list[Bucket] = []
    while not buckets or not buckets[-1].is_last:
        bucket = trainer.call("next_bucket")
        assert bucket.handles == {}
        for engine in engines:
            engine.send("receive", bucket)
        trainer.call("push", bucket, corrupt)
        for engine in engines:
            engine.answer()
        buckets.append(bucket)
    return buckets


@pytest.fixture
def ends():
    spec = make_spec()
    engines = [Child(ReceivingEngine, spec, index) for index in range(NUM_ENGINES)]
    with Child(SendingTrainer, spec) as trainer, engines[0], engines[1]:
        for engine in engines:
            engine.send("ready")
        trainer.send("begin", 0)
        for each in (trainer, *engines):
            each.answer()
        yield trainer, engines


def test_all_engines_get_the_same_weights_again_and_again(ends):
    trainer, engines = ends
    for version in (1, 2, 3):
        buckets = sync(trainer, engines, version)
        assert len(buckets) > 1
        check_receipts([engine.call("finish") for engine in engines], buckets, version)
        for engine in engines:
            assert equal_to_sent(engine.call("weights"), weights(version))


def test_corruption_during_a_transfer_is_noticed_by_every_engine(ends):
    trainer, engines = ends
    buckets = sync(trainer, engines, 1, corrupt=True)
    expected = [bucket.slots[0].name for bucket in buckets]
    assert [engine.call("finish").mismatched for engine in engines] == [expected] * NUM_ENGINES


def test_a_dead_rank_ends_the_wait_of_all_ranks(ends):
    """The second engine waits for the trainer alone, which never reaches it."""
    trainer, engines = ends
    trainer.call("begin", 1)
    for engine in engines:
        engine.call("begin", 1)
    bucket = trainer.call("next_bucket")
    engines[1].send("receive", bucket)
    engines[0].process.kill()
    engines[0].process.join()
    started = time.monotonic()
    with pytest.raises(RemoteFailure, match="WeightSyncError: The broadcast of weights failed"):
        trainer.call("push", bucket)
    with pytest.raises(RemoteFailure, match="WeightSyncError: The broadcast of weights failed"):
        engines[1].answer()
    assert time.monotonic() - started < 15, "the timeout of the group is 20 s"
    with pytest.raises(RemoteFailure, match="has left the group"):
        trainer.call("push", bucket)


def test_a_new_rendezvous_replaces_a_dead_engine(ends):
    """The controller recovers so: a new epoch, a new port, and a new sender."""
    trainer, engines = ends
    engines[1].process.kill()
    engines[1].process.join()
    trainer.call("close")
    spec = make_spec(epoch=1)
    with (
        Child(SendingTrainer, spec) as new_trainer,
        Child(ReceivingEngine, spec, 0) as first,
        Child(ReceivingEngine, spec, 1) as second,
    ):
        for each in (first, second):
            each.send("ready")
        new_trainer.send("begin", 0)
        for each in (new_trainer, first, second):
            each.answer()
        buckets = sync(new_trainer, [first, second], 5)
        check_receipts([engine.call("finish") for engine in (first, second)], buckets, 5)


@pytest.mark.parametrize("before", [None, "2"])
def test_the_nccl_group_of_a_sync_does_not_abort_its_process(monkeypatch, before):
    """A recorder replaces the group: it reads the variable during construction, where other code must not see it."""
    variable = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    seen = []

    class Recorder:
        class Options:
            pass

        def __init__(self, store: dist.Store, rank: int, world_size: int, options: Options):
            seen.append((os.environ.get(variable), rank, world_size, options._timeout))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Recorder, raising=False)
    monkeypatch.delenv(variable, raising=False)
    if before is not None:
        monkeypatch.setenv(variable, before)
    GroupMember(dataclasses.replace(make_spec(), device="cuda", receivers=()), rank=0)
    assert seen == [("0", 0, 1, timedelta(seconds=20))]
    assert os.environ.get(variable) == before


@pytest.mark.parametrize(("device", "aborts"), [("cuda", 1), ("cpu", 0)])
def test_a_member_that_leaves_frees_the_memory_of_its_communicator(monkeypatch, device, aborts):
    calls = []

    class Group:
        def abort(self):
            calls.append("abort")

    monkeypatch.setattr(transport, "_join", lambda spec, rank: Group())
    member = GroupMember(dataclasses.replace(make_spec(), device=device), rank=0)
    member.leave()
    member.leave()
    assert calls == ["abort"] * aborts


@pytest.mark.parametrize(
    ("device", "timeout_s", "num_bytes", "seconds"),
    [
        ("cuda", 600.0, 1000, 60.00005),
        ("cuda", 600.0, 2_000_000_000, 160.0),  # one large tensor
        ("cuda", 25.0, 1000, 25.0),
        ("cpu", 600.0, 1000, 600.0),  # gloo reports a peer's death
    ],
)
def test_a_broadcast_on_gpus_ends_long_before_the_sync_does(monkeypatch, device, timeout_s, num_bytes, seconds):
    """NCCL does not report a peer that dies within a kernel, so only the limit ends the wait for it."""
    waits = []

    class Work:
        def wait(self, timeout):
            waits.append(timeout)

    class Group:
        def broadcast(self, tensors, options):
            waits.append(options.timeout)
            return Work()

    monkeypatch.setattr(transport, "_join", lambda spec, rank: Group())
    member = GroupMember(dataclasses.replace(make_spec(), device=device, timeout_s=timeout_s), rank=0)
    member.broadcast(torch.empty(num_bytes, dtype=torch.uint8, device="meta"))
    assert [wait.total_seconds() for wait in waits] == pytest.approx([seconds] * 2, abs=0.001)


def test_close_may_be_called_twice(ends):
    trainer, engines = ends
    for each in (trainer, *engines):
        each.call("close")
    for engine in engines:
        engine.call("close")
