"""Shared memory between two processes: content, growth, corruption, and cleanup."""

import os
from pathlib import Path

import pytest
import torch
from sync_processes import Child, ReceivingEngine, RemoteFailure, equal_to_sent

from nemo_rl.utils.errors import WeightSyncError
from nemo_rl.weight_sync import endpoints
from nemo_rl.weight_sync.buckets import Bucket, TensorSlot
from nemo_rl.weight_sync.endpoints import WeightReceiver, WeightSender, merge_buckets
from nemo_rl.weight_sync.lanes import Lane
from nemo_rl.weight_sync.parts import WholeWeights
from nemo_rl.weight_sync.transport import SharedMemoryReceiver, SharedMemorySender, TransportSpec, allocate, map_memory
from nemo_rl.weight_sync.verify import check_receipts

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

SPEC = TransportSpec("shared_memory", run_id="test", bucket_size_bytes=1024)


def weights(seed: int, scale: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(50 * scale, 8, generator=generator),
        "norm": torch.randn(8, generator=generator).bfloat16(),
        "up": torch.randn(8, 33 * scale, generator=generator).half(),
        "scalar": torch.tensor(float(seed)),
        "empty": torch.empty(0, 8),
        "ids": torch.arange(7 * scale) + seed,
        "head": torch.randn(50 * scale, 8, generator=generator).bfloat16(),
    }


def sync(sender: WeightSender, engine: Child, tensors: dict[str, torch.Tensor], version: int) -> list[Bucket]:
    """Run one sync as the controller does; the next bucket is packed while the engine reads the last one."""
    engine.call("begin", version)
    sender.begin(WholeWeights(tensors.items))
    buckets = [sender.next_buckets()[0]]
    while not buckets[-1].is_last:
        engine.send("receive", buckets[-1])
        buckets.append(sender.next_buckets()[0])
        engine.answer()
    engine.call("receive", buckets[-1])
    return buckets


def open_memory() -> set[int]:
    """Return the inodes of shared memory that this process holds open; all its senders use one name."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return {os.stat(link).st_ino for link in links if os.path.exists(link) and "nemo_rl" in os.readlink(link)}


@pytest.fixture
def engine():
    with Child(ReceivingEngine, SPEC, 0) as child:
        yield child


@pytest.fixture
def sender():
    sender = WeightSender([Lane(SPEC)], rank=0, is_node_leader=True)
    yield sender
    sender.close()


def test_two_processes_pass_weights_over_several_growing_syncs(sender, engine):
    for version, scale in enumerate([1, 1, 4, 2, 9], start=1):
        sent = weights(version, scale)
        buckets = sync(sender, engine, sent, version)
        assert len(buckets) > 2
        check_receipts([engine.call("finish")], buckets, version)
        assert equal_to_sent(engine.call("weights"), sent)


def test_tensors_kept_by_the_engine_survive_later_buckets(sender, engine):
    """Tensors of earlier buckets are copies: the sender reuses its two buffers."""
    sent = weights(1)
    last_names = {slot.name for slot in sync(sender, engine, sent, 1)[-1].slots}
    sender.begin(WholeWeights(weights(2).items))
    sender.next_buckets()[0], sender.next_buckets()[0]
    early = {name: value for name, value in sent.items() if name not in last_names}
    assert len(early) > 2
    kept = engine.call("weights")
    assert equal_to_sent({name: kept[name] for name in early}, early)


def test_a_corrupted_byte_stops_the_run_with_the_tensor_s_name(sender, engine):
    engine.call("begin", 1)
    sender.begin(WholeWeights(weights(1).items))
    buckets = []
    while not buckets or not buckets[-1].is_last:
        bucket = sender.next_buckets()[0]
        buckets.append(bucket)
        for slot in bucket.slots:
            if slot.name == "head":
                (handle,) = bucket.handles.values()
                map_memory(handle)[slot.offset + 5] ^= 4
        engine.call("receive", bucket)
    receipt = engine.call("finish")
    assert receipt.mismatched == ["head"]
    with pytest.raises(WeightSyncError, match="content differs in head"):
        check_receipts([receipt], buckets, 1)


@pytest.mark.parametrize(("threads", "half"), [(4, 2), (1, 1)])
def test_buckets_are_copied_on_half_of_the_threads(sender, monkeypatch, threads, half):
    """The sender packs a bucket while the receiver loads the one before, on the same cores."""
    seen: list[int] = []

    def watched(function):
        return lambda *args: (seen.append(torch.get_num_threads()), function(*args))[1]

    for name in ("fill", "mismatched_names"):
        monkeypatch.setattr(endpoints, name, watched(getattr(endpoints, name)))
    before, receiver = torch.get_num_threads(), WeightReceiver(SPEC, 0, "engine")
    try:
        torch.set_num_threads(threads)
        sender.begin(WholeWeights(weights(1).items))
        with receiver.received(sender.next_buckets()[0]):
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert seen == [half, half]


def test_verification_can_be_switched_off(sender):
    lane = Lane(TransportSpec("shared_memory", run_id="test", verify=False))
    unverified = WeightSender([lane], 0, is_node_leader=True)
    unverified.begin(WholeWeights(weights(1).items))
    assert {slot.fingerprint for slot in unverified.next_buckets()[0].slots} == {None}
    unverified.close()


def test_close_releases_the_memory():
    before, files = open_memory(), set(Path("/dev/shm").glob("*nemo_rl*"))
    sender = WeightSender([Lane(SPEC)], rank=0, is_node_leader=True)
    for scale in (1, 5, 3):
        sender.begin(WholeWeights(weights(1, scale).items))
        while not sender.next_buckets()[0].is_last:
            pass
    assert len(open_memory() - before) >= 1
    sender.close()
    assert open_memory() == before
    assert set(Path("/dev/shm").glob("*nemo_rl*")) <= files
    sender.close()


class Packer:
    """A sender in a separate process."""

    def pack(self) -> Bucket:
        self._sender = WeightSender([Lane(SPEC)], rank=0, is_node_leader=True)
        self._sender.begin(WholeWeights(lambda: [("w", torch.ones(4))]))
        return self._sender.next_buckets()[0]


def test_memory_is_released_when_the_sender_is_killed_and_the_engine_raises():
    with Child(Packer) as packer:
        bucket = packer.call("pack")
        receiver = WeightReceiver(SPEC, 0, "engine 0")
        receiver.begin(1)
        loaded: dict[str, torch.Tensor] = {}
        with receiver.received(bucket) as tensors:
            loaded.update(tensors)
        packer.process.kill()
        packer.process.join()
    assert torch.equal(loaded["w"], torch.ones(4)), "a mapping that exists stays valid"
    (handle,) = bucket.handles.values()
    assert not os.path.exists(handle.path)
    with pytest.raises(WeightSyncError, match="process has ended.*transport=collective"):
        WeightReceiver(SPEC, 1, "engine 1").received(bucket).__enter__()


def test_a_reused_descriptor_is_mapped_again():
    """Growing closes one memory file; the next one may get the same path."""
    sender, receiver = SharedMemorySender(SPEC), SharedMemoryReceiver(SPEC)
    for index, size in enumerate([64, 32, 4096, 2048, 8192, 8192]):
        sender.buffer(size, index).fill_(index + 1)
        bucket = Bucket(index, [], size)
        sender.publish(bucket)
        assert receiver.receive(bucket).eq(index + 1).all()
    sender.close()


def test_memory_of_another_size_is_refused():
    buffer = allocate(100)
    with pytest.raises(OSError, match="100 bytes instead of 50"):
        map_memory(buffer.handle._replace(num_bytes=50))
    buffer.close()


def test_a_temporary_file_is_used_without_memfd(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    buffer = allocate(1000)
    assert Path(buffer.handle.path).parent == tmp_path
    buffer.flat.fill_(3)
    assert map_memory(buffer.handle).eq(3).all()
    buffer.close()
    assert list(tmp_path.iterdir()) == []


def test_an_engine_on_another_host_is_refused_with_advice(sender):
    sender.begin(WholeWeights(weights(1).items))
    bucket = sender.next_buckets()[0]
    bucket.handles = {"elsewhere": bucket.handles.popitem()[1]}
    with pytest.raises(WeightSyncError, match=r"wrote shared memory on \['elsewhere'\].*transport=collective"):
        WeightReceiver(SPEC, 0, "engine 0").received(bucket).__enter__()


def test_engine_failures_reach_the_controller(engine, sender):
    sender.begin(WholeWeights(weights(1).items))
    bucket = sender.next_buckets()[0]
    engine.call("begin", 1)
    bucket.slots[0] = type(bucket.slots[0])("embed", "float99", (1,), 0, 4)
    with pytest.raises(RemoteFailure, match="float99"):
        engine.call("receive", bucket)


def test_an_empty_stream_is_refused(sender):
    with pytest.raises(WeightSyncError, match="not open"):
        sender.next_buckets()[0]
    sender.begin(WholeWeights(list))
    with pytest.raises(WeightSyncError, match="holds no tensors"):
        sender.next_buckets()[0]


def test_a_stream_of_only_empty_tensors_is_sent(sender, engine):
    sent = {"nothing": torch.empty(0, 3)}
    buckets = sync(sender, engine, sent, 1)
    check_receipts([engine.call("finish")], buckets, 1)
    assert equal_to_sent(engine.call("weights"), sent)


def test_only_the_node_leader_packs_and_reports():
    leader, other = (WeightSender([Lane(SPEC)], rank, is_node_leader=rank == 0) for rank in range(2))
    for each in (leader, other):
        each.begin(WholeWeights(weights(1).items))
    packed, walked = leader.next_buckets()[0], other.next_buckets()[0]
    assert walked.handles == {}
    for order in ([packed, walked], [walked, packed]):
        merged = merge_buckets(order)
        assert merged.slots == packed.slots
        assert merged.handles == packed.handles
    leader.close()


@pytest.mark.parametrize("change", [{"name": "x"}, {"dtype": "float16"}, {"shape": (1,)}])
def test_ranks_that_disagree_are_refused(change):
    slots = {"name": "w", "dtype": "float32", "shape": (2, 2), "offset": 0, "num_bytes": 16}
    ours, theirs = TensorSlot(**slots), TensorSlot(**slots | change)
    with pytest.raises(WeightSyncError, match="disagree on the tensors of bucket 4"):
        merge_buckets([Bucket(4, [ours], 16), Bucket(4, [theirs], 16)])
