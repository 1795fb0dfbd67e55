"""CUDA IPC without a GPU: how often buffers are exported and mapped, and how they are allocated.

torch's two functions that need a device are replaced; what they do is shown in `tests/gpu`.
"""

import pytest
import torch

from nemo_rl.utils.errors import WeightSyncError
from nemo_rl.weight_sync import transport
from nemo_rl.weight_sync.buckets import Bucket
from nemo_rl.weight_sync.endpoints import WeightReceiver, WeightSender
from nemo_rl.weight_sync.lanes import Lane
from nemo_rl.weight_sync.parts import WholeWeights
from nemo_rl.weight_sync.transport import TransportSpec
from nemo_rl.weight_sync.verify import check_receipts

pytestmark = pytest.mark.fast

SPEC = TransportSpec("cuda_ipc", run_id="test", device="cpu", bucket_size_bytes=1024)
DEVICE = 6


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Record the calls to CUDA; exported buffers are found again by their number."""
    calls: list[str] = []
    exported: list[torch.Tensor] = []

    def export(flat):
        calls.append("export")
        exported.append(flat)
        return None, (*[None] * DEVICE, 0, len(exported) - 1)

    def open_exported(*arguments):
        assert arguments[DEVICE] == 3, "opened on the receiver's device"
        calls.append("map")
        return exported[arguments[-1]].view(-1)

    monkeypatch.setattr(transport, "reduce_tensor", export)
    monkeypatch.setattr(transport, "rebuild_cuda_tensor", open_exported)
    monkeypatch.setattr(transport, "device_uuid", lambda index: f"GPU-{index}")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    return calls


def sync(sender: WeightSender, receiver: WeightReceiver, tensors: dict[str, torch.Tensor], version: int) -> int:
    """Run one sync and compare; return the number of buckets."""
    receiver.begin(version)
    sender.begin(WholeWeights(tensors.items))
    buckets: list[Bucket] = []
    got = {}
    while not buckets or not buckets[-1].is_last:
        buckets.append(sender.next_buckets()[0])
        with receiver.received(buckets[-1]) as arrived:
            got |= {name: tensor.clone() for name, tensor in arrived}
    check_receipts([receiver.finish([])], buckets, version)
    assert got.keys() == tensors.keys() and all(torch.equal(got[name], tensors[name]) for name in got)
    return len(buckets)


def test_a_buffer_is_exported_and_mapped_once(calls):
    sender, receiver = WeightSender([Lane(SPEC)], 0, is_node_leader=True), WeightReceiver(SPEC, 0, "engine")
    for version in range(1, 6):
        num_buckets = sync(sender, receiver, {str(n): torch.randn(200) for n in range(5)}, version)
        assert num_buckets == 5
    assert (calls.count("export"), calls.count("map")) == (2, 2)
    assert calls.count("synchronize") == 5 * num_buckets, "every bucket is packed before it is announced"
    again = WeightReceiver(SPEC, 0, "engine that replaces it")
    sync(sender, again, {"w": torch.randn(200)}, 6)
    assert (calls.count("export"), calls.count("map")) == (2, 3)
    sync(sender, receiver, {"w": torch.randn(4000)}, 7)
    assert (calls.count("export"), calls.count("map")) == (3, 4), "a larger buffer is another one"
    sender.close()


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_buffers_are_not_expandable_segments(calls, monkeypatch, variable):
    applied = []
    empty = torch.empty
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", applied.append)
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: applied.append("allocate") or empty(*args, **kwargs))
    monkeypatch.setenv(variable, "max_split_size_mb:512,expandable_segments:True")
    sender = transport.CudaIpcSender(SPEC)
    sender.buffer(100, 0)
    assert applied == [
        "max_split_size_mb:512,expandable_segments:False",
        "allocate",
        "max_split_size_mb:512,expandable_segments:True",
    ]
    monkeypatch.setenv(variable, "max_split_size_mb:512")
    sender.buffer(100, 1)
    assert applied[3:] == ["allocate"], "settings that do no harm stay as they are"


def test_memory_that_cannot_be_opened_is_an_error_with_advice(calls, monkeypatch):
    def refuse(*arguments):
        raise RuntimeError("pidfd_getfd: Operation not permitted")

    monkeypatch.setattr(transport, "rebuild_cuda_tensor", refuse)
    sender, receiver = WeightSender([Lane(SPEC)], 0, is_node_leader=True), WeightReceiver(SPEC, 0, "engine")
    with pytest.raises(WeightSyncError, match=r"pidfd_getfd.*--ipc=host.*transport=collective"):
        sync(sender, receiver, {"w": torch.randn(9)}, 1)
