"""Float8 values in place of weights: what arrives, and that its checksums are those of the float8 bytes."""

import pytest
import torch
from sync_processes import Child, ReceivingEngine

from nemo_rl.models.quantization import (
    FP8_WEIGHTS,
    BlockFormat,
    Quantized,
    WeightQuantization,
    dequantize,
    quantize,
    rounded,
)
from nemo_rl.utils.errors import WeightSyncError
from nemo_rl.weight_sync.buckets import Bucket, unpack
from nemo_rl.weight_sync.endpoints import WeightReceiver, WeightSender, merge_buckets
from nemo_rl.weight_sync.lanes import Lane
from nemo_rl.weight_sync.parts import WholeWeights
from nemo_rl.weight_sync.transport import SharedMemoryReceiver, TransportSpec
from nemo_rl.weight_sync.verify import check_receipts

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

SPEC = TransportSpec("shared_memory", run_id="test", bucket_size_bytes=64 << 10)
FLOAT8, SIMULATED = WeightQuantization(FP8_WEIGHTS, 2), WeightQuantization(FP8_WEIGHTS, 2, simulated=True)


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {"model.embed_tokens.weight": torch.randn(50, 8, generator=generator)}
    for layer in range(2):
        found[f"model.layers.{layer}.mlp.up_proj.weight"] = torch.randn(200, 130, generator=generator).bfloat16()
        found[f"model.layers.{layer}.self_attn.q_proj.bias"] = torch.randn(7, generator=generator).bfloat16()
    return found | {"empty": torch.empty(0, 8)}


def stream(sender: WeightSender, tensors: dict[str, torch.Tensor]) -> list[Bucket]:
    sender.begin(WholeWeights(tensors.items))
    buckets = [merge_buckets(sender.next_buckets())]
    while not buckets[-1].is_last:
        buckets.append(merge_buckets(sender.next_buckets()))
    return buckets


@pytest.mark.parametrize("encoding", [FLOAT8, SIMULATED], ids=["float8", "simulated"])
def test_engines_get_quantized_weights_and_verify_them(encoding: WeightQuantization) -> None:
    sender = WeightSender([Lane(SPEC)], 0, is_node_leader=True, encoding=encoding)
    transport = SharedMemoryReceiver(SPEC)
    for version in (1, 2):
        sent, receiver = weights(version), WeightReceiver(SPEC, 0, "engine")
        receiver.begin(version)
        arrived: dict[str, torch.Tensor] = {}
        sender.begin(WholeWeights(sent.items))
        buckets: list[Bucket] = []
        while not (buckets and buckets[-1].is_last):
            buckets += sender.next_buckets()
            with receiver.received(buckets[-1]) as tensors:
                arrived |= {name: tensor.clone() for name, tensor in tensors}
        receipt = receiver.finish([])
        check_receipts([receipt], buckets, version)
        for name, tensor in sent.items():
            if not encoding.takes(name, tuple(tensor.shape)):
                assert torch.equal(arrived.pop(name), tensor)
            elif encoding.simulated:
                assert torch.equal(arrived.pop(name), rounded(tensor, FP8_WEIGHTS))
            else:
                got, want = (
                    Quantized(arrived.pop(name), arrived.pop(name + "_scale_inv")),
                    quantize(tensor, FP8_WEIGHTS),
                )
                assert got.values.view(torch.uint8).equal(want.values.view(torch.uint8))
                assert got.scales.equal(want.scales)
                assert (dequantize(got, FP8_WEIGHTS) - tensor).abs().max() < 0.07 * tensor.abs().max()
        assert not arrived
        if not encoding.simulated:
            flat = transport.receive(buckets[0])
            index = next(place for place, slot in enumerate(buckets[0].slots) if slot.dtype == "float8_e4m3fn")
            flat[buckets[0].slots[index].offset + 5] ^= 1
            receiver.begin(version)
            with receiver.received(buckets[0]):
                pass
            assert receiver.finish([]).mismatched == [buckets[0].slots[index].name]
            flat[buckets[0].slots[index].offset + 5] ^= 1
        receiver.close()
    sender.close()


def test_float8_halves_what_is_sent_and_keeps_scales_next_to_values() -> None:
    plain, quantized = (WeightSender([Lane(SPEC)], 0, True, encoding=encoding) for encoding in (None, FLOAT8))
    sizes = {}
    for name, sender in (("plain", plain), ("quantized", quantized)):
        buckets = stream(sender, weights(3))
        sizes[name] = sum(slot.num_bytes for bucket in buckets for slot in bucket.slots if "up_proj" in slot.name)
        sender.close()
    assert sizes["quantized"] == sizes["plain"] // 2 + 2 * 2 * 2 * 4  # four scales of each of two matrices
    for bucket in buckets:
        names = [slot.name for slot in bucket.slots]
        assert all(name + "_scale_inv" in names for name in names if name.endswith("up_proj.weight"))


def test_ranks_that_do_not_pack_report_the_same_buckets() -> None:
    ranks = [WeightSender([Lane(SPEC)], 0, leads, encoding=FLOAT8) for leads in (True, False)]
    tensors = weights(4)
    for rank in ranks:
        rank.begin(WholeWeights(tensors.items))
    first, second = (rank.next_buckets()[0] for rank in ranks)
    assert merge_buckets([second, first]).slots == first.slots
    assert unpack(torch.zeros(first.num_bytes, dtype=torch.uint8), first)
    for rank in ranks:
        rank.close()


def test_an_encoding_that_takes_no_weight_is_refused() -> None:
    sender = WeightSender([Lane(SPEC)], 0, True, encoding=WeightQuantization(BlockFormat(2, 2), 2, first_layers=2))
    with pytest.raises(WeightSyncError, match=r"no weight of the model would be in float8: it has model\.embed_tokens"):
        sender.begin(WholeWeights(weights(5).items))


def test_another_process_reads_float8_tensors() -> None:
    sender = WeightSender([Lane(SPEC)], 0, True, encoding=FLOAT8)
    with Child(ReceivingEngine, SPEC, 0) as engine:
        engine.call("begin", 1)
        sender.begin(WholeWeights(weights(6).items))
        buckets: list[Bucket] = []
        while not (buckets and buckets[-1].is_last):
            buckets += sender.next_buckets()
            engine.call("receive", buckets[-1])
        check_receipts([engine.call("finish")], buckets, 1)
    sender.close()
