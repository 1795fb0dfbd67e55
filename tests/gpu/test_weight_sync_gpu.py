"""Weight sync on GPUs: CUDA IPC between two processes, NCCL, fingerprints on the device.

These tests need an NVIDIA GPU (one test needs two) and are skipped without. They use the real transports
in real processes; the processes are spawned, because CUDA does not survive a fork.
"""

import dataclasses
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nemo_rl.utils.errors import WeightSyncError
from nemo_rl.weight_sync.buckets import Bucket, TensorSlot
from nemo_rl.weight_sync.endpoints import WeightReceiver, WeightSender
from nemo_rl.weight_sync.lanes import Lane
from nemo_rl.weight_sync.parts import WholeWeights
from nemo_rl.weight_sync.transport import GroupMember, TransportSpec
from nemo_rl.weight_sync.verify import check_receipts, fingerprint

sys.path.append(str(Path(__file__).resolve().parents[1] / "unit" / "weight_sync"))

from sync_processes import Child, ReceivingEngine, equal_to_sent  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

IPC_SPEC = TransportSpec("cuda_ipc", run_id="test", device="cuda", bucket_size_bytes=1 << 16)


def weights(seed: int, scale: int = 1) -> dict[str, torch.Tensor]:
    """Tensors on the GPU, together several buckets."""
    generator = torch.Generator().manual_seed(seed)
    host = {
        "embed": torch.randn(500 * scale, 64, generator=generator),
        "norm": torch.randn(64, generator=generator).bfloat16(),
        "up": torch.randn(64, 333 * scale, generator=generator).half(),
        "scalar": torch.tensor(float(seed)),
        "ids": torch.arange(70 * scale) + seed,
        "head": torch.randn(500 * scale, 64, generator=generator).bfloat16(),
    }
    return {name: tensor.cuda() for name, tensor in host.items()}


def sync(sender: WeightSender, engine: Child, tensors: dict[str, torch.Tensor], version: int) -> list[Bucket]:
    """One sync as the controller drives it; sending transports push while the engine receives."""
    engine.call("begin", version)
    sender.begin(WholeWeights(tensors.items))
    buckets: list[Bucket] = []
    while not buckets or not buckets[-1].is_last:
        bucket = sender.next_buckets()[0]
        engine.send("receive", bucket)
        sender.send(bucket)
        engine.answer()
        buckets.append(bucket)
    return buckets


@pytest.fixture
def engine() -> Iterator[Child]:
    with Child(ReceivingEngine, IPC_SPEC, 0, "cuda:0", start_method="spawn") as child:
        yield child


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    sender = WeightSender([Lane(IPC_SPEC)], rank=0, is_node_leader=True)
    yield sender
    sender.close()


def test_cuda_ipc_passes_weights_between_two_processes_over_growing_syncs(sender, engine):
    for version, scale in enumerate([1, 1, 4, 2], start=1):
        sent = weights(version, scale)
        buckets = sync(sender, engine, sent, version)
        assert len(buckets) > 2
        assert all(slot.fingerprint is not None for bucket in buckets for slot in bucket.slots)
        check_receipts([engine.call("finish")], buckets, version)
        assert equal_to_sent(engine.call("weights"), sent)


def test_cuda_ipc_copies_early_buckets_before_the_sender_continues(sender, engine):
    """Without waiting for the copies the sender would overwrite bytes that are still being read."""
    sent = weights(1, scale=40)
    last_names = {slot.name for slot in sync(sender, engine, sent, 1)[-1].slots}
    sender.begin(WholeWeights({name: torch.zeros_like(tensor) for name, tensor in sent.items()}.items))
    sender.next_buckets()[0], sender.next_buckets()[0]
    early = {name: tensor for name, tensor in sent.items() if name not in last_names}
    kept = engine.call("weights")
    assert early
    assert equal_to_sent({name: kept[name] for name in early}, early)


def test_cuda_ipc_corruption_is_noticed(sender, engine):
    engine.call("begin", 1)
    sender.begin(WholeWeights(weights(1).items))
    buckets: list[Bucket] = []
    while not buckets or not buckets[-1].is_last:
        bucket = sender.next_buckets()[0]
        buckets.append(bucket)
        for slot in bucket.slots:
            if slot.name == "head":
                sender._transports[0].buffer(bucket.num_bytes, bucket.index)[slot.offset + 5] ^= 4
        torch.cuda.synchronize()
        engine.call("receive", bucket)
    with pytest.raises(WeightSyncError, match="content differs in head"):
        check_receipts([engine.call("finish")], buckets, 1)


def test_an_engine_on_another_gpu_is_refused_with_advice(sender):
    sender.begin(WholeWeights(weights(1).items))
    bucket = sender.next_buckets()[0]
    bucket.handles = {"GPU-elsewhere": bucket.handles.popitem()[1]}
    with pytest.raises(WeightSyncError, match="No trainer rank shares GPU .*transport=collective"):
        WeightReceiver(IPC_SPEC, 0, "engine 0").received(bucket).__enter__()


@pytest.mark.parametrize("num_bytes", [0, 1, 3, 4, 4096, (1 << 20) + 7, 5_000_003])
def test_a_fingerprint_is_the_same_on_gpu_and_cpu(num_bytes):
    flat = torch.randint(0, 256, (num_bytes + 64,), dtype=torch.uint8)
    slot = TensorSlot("w", "uint8", (num_bytes,), 16, num_bytes)
    assert fingerprint(flat.cuda(), slot) == fingerprint(flat, slot)


def test_fingerprint_notices_a_bit_on_the_gpu():
    flat = torch.randint(0, 256, (1 << 21,), dtype=torch.uint8, device="cuda")
    slot = TensorSlot("w", "uint8", (1 << 21,), 0, 1 << 21)
    before = fingerprint(flat, slot)
    flat[1_234_567] ^= 128
    assert fingerprint(flat, slot) != before


def nccl_spec(*receivers: int) -> TransportSpec:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return dataclasses.replace(
        IPC_SPEC, name="collective", master_port=port, receivers=receivers, timeout_s=60.0, extra={"epoch": 0}
    )


def test_nccl_group_of_one_broadcasts_to_itself():
    spec = nccl_spec()
    member = GroupMember(spec, rank=0)
    flat = torch.arange(100, dtype=torch.uint8, device="cuda")
    member.broadcast(flat)
    assert torch.equal(flat.cpu(), torch.arange(100, dtype=torch.uint8))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL takes one rank per device")
def test_nccl_passes_weights_between_two_processes():
    spec = nccl_spec(0)
    with Child(ReceivingEngine, spec, 0, "cuda:1", start_method="spawn") as engine:
        engine.send("ready")
        torch.cuda.set_device(0)
        sender = WeightSender([Lane(spec)], rank=0, is_node_leader=True)
        assert engine.answer()
        for version in (1, 2):
            sent = weights(version)
            buckets = sync(sender, engine, sent, version)
            check_receipts([engine.call("finish")], buckets, version)
            assert equal_to_sent(engine.call("weights"), sent)
        sender.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL takes one rank per device")
def test_an_engine_that_dies_in_an_nccl_sync_leaves_the_trainer_alive():
    """By default NCCL's watchdog would end this process at the same deadline."""
    spec = dataclasses.replace(nccl_spec(0), timeout_s=20.0)
    with Child(ReceivingEngine, spec, 0, "cuda:1", start_method="spawn") as engine:
        engine.send("ready")
        torch.cuda.set_device(0)
        sender = WeightSender([Lane(spec)], rank=0, is_node_leader=True)
        assert engine.answer()
        sync(sender, engine, weights(1), 1)
        engine.process.kill()
        engine.process.join()
        sender.begin(WholeWeights(weights(2).items))
        bucket = sender.next_buckets()[0]
        with pytest.raises(WeightSyncError, match="broadcast of weights failed"):
            sender.send(bucket)
        time.sleep(5.0)
        sender.close()
