"""Check the weight sync from the policy to an engine in another process, and through a group of one member."""

import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from gpu_checks.bench import Bench, Rows, free_port, packed, policy_config, random_rows, scores, update
from gpu_checks.engine_process import EngineProcess
from gpu_checks.report import Figures, Finding
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.interfaces import GenerationRequest, SamplingParams
from nemo_rl.models.policy.workers.rank import PolicyRank
from nemo_rl.utils.errors import WeightSyncError
from nemo_rl.weight_sync.buckets import Bucket, TensorSlot
from nemo_rl.weight_sync.endpoints import WeightSender
from nemo_rl.weight_sync.lanes import Lane
from nemo_rl.weight_sync.parts import WholeWeights
from nemo_rl.weight_sync.transport import GroupMember, TransportSpec
from nemo_rl.weight_sync.verify import SyncReceipt, check_receipts, fingerprint

NUM_SYNCS = 6
PROMPT = [5, 9, 101, 44, 7, 23]
GIGABYTE = 1e9
LATE_S = 5.0
"""Limit of a broadcast that comes too late."""
MOST_CYCLES_PER_S = 2e9
"""Highest clock of a GPU, with which a wait for cycles is long enough."""
_STAYING: list[GroupMember] = []
KEYS: dict[str, Any] = {"precision": "float32", **packed(64)}


def between_processes(bench: Bench) -> Iterator[Finding]:
    """Train and sync repeatedly; check every tensor's fingerprint, then the log-probs of the engine's output."""
    config, rows = policy_config(bench.folder("qwen2"), **KEYS), random_rows([24, 9, 17, 3, 24, 12])
    spec = _spec(bench, bucket_size_bytes=1 << 18)
    rank = bench.policy("qwen2", **KEYS)
    engine = bench.engine("qwen2", "float32")
    for version in range(1, NUM_SYNCS + 1):
        update(rank, config, rows)
        buckets = _sync(rank, engine, spec, version, "float32")
    figures: Figures = {"syncs": NUM_SYNCS, "buckets": len(buckets), "tensors": sum(len(b.slots) for b in buckets)}
    yield Finding(f"{spec.name}: fingerprints", figures, "" if len(buckets) > 2 else "too few buckets to reuse one")
    engine.call("submit", [("request", GenerationRequest(PROMPT, SamplingParams(max_new_tokens=12), seed=3))])
    [(_, written)] = engine.call("collect").results
    ids = [*PROMPT, *written.token_ids]
    one_row: Rows = BatchedDataDict({"input_ids": torch.tensor([ids]), "input_lengths": torch.tensor([len(ids)])})
    error = float((scores(rank, config, one_row)[0, len(PROMPT) :] - torch.tensor(written.logprobs)).abs().max())
    problem = "" if error <= 1e-3 else "the engine does not generate with the policy's weights"
    yield Finding("engine's log-probs", {"tokens": len(written.token_ids), "error": error, "allowed": 1e-3}, problem)


def group_of_one(bench: Bench) -> Iterator[Finding]:
    """Check the collective transport's group with trainer rank 0 alone: NCCL on a GPU, gloo on a CPU."""
    member = GroupMember(_alone(bench), rank=0)
    flat = torch.arange(1000, device=bench.device).to(torch.uint8)
    want = flat.clone()
    member.broadcast(flat)
    member.leave()
    library = "nccl" if bench.on_gpu else "gloo"
    yield Finding(f"{library}: broadcast", {"bytes": 1000}, "" if torch.equal(flat, want) else "bytes changed")
    weights = {"w": torch.randn(700, 64, device=bench.device), "b": torch.randn(333, device=bench.device).half()}
    sender = WeightSender([Lane(_alone(bench))], rank=0, is_node_leader=True)
    sender.begin(WholeWeights(weights.items))
    bucket = sender.next_buckets()[0]
    sender.send(bucket)
    sender.close()
    yield Finding(f"{library}: a bucket is sent", {"bytes": bucket.num_bytes})


def late_broadcast(bench: Bench) -> Iterator[Finding]:
    """Check that a process with a default group lives on after a broadcast of a weight sync has timed out.

    Its environment has a short `TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC`, after which torch would end the process.
    """
    bench.policy("qwen2", **KEYS)
    spec = dataclasses.replace(_alone(bench), timeout_s=LATE_S)
    flat = torch.zeros(1000, dtype=torch.uint8, device=bench.device)
    began = time.monotonic()
    try:
        if bench.on_gpu:
            member = GroupMember(spec, rank=0)
            torch.cuda._sleep(int(4 * LATE_S * MOST_CYCLES_PER_S))  # the broadcast is queued after it
        else:
            member = _second_of_two(dataclasses.replace(spec, receivers=(0,)))  # rank 0 never sends
        member.broadcast(flat)
        problem = "the broadcast did not time out"
    except WeightSyncError:
        problem = ""
    seconds = time.monotonic() - began
    yield Finding("a late broadcast is an error", {"seconds": seconds, "allowed": LATE_S}, problem)
    time.sleep(4 * LATE_S if bench.on_gpu else 0.0)
    bench.synchronize()
    yield Finding("the process lives on", {"seconds": time.monotonic() - began - seconds})
    bench.end_policy()


def _second_of_two(spec: TransportSpec) -> GroupMember:
    """Return member 1 of a group whose member 0 stays until this process ends."""
    with ThreadPoolExecutor() as pool:
        first, second = (pool.submit(GroupMember, spec, rank) for rank in (0, 1))
        _STAYING.append(first.result())
        return second.result()


def bandwidth(bench: Bench) -> Iterator[Finding]:
    """Measure bytes per second of whole syncs, verified and not, and of fingerprints alone."""
    precision = "bfloat16" if bench.on_gpu else "float32"
    rank = bench.large_policy()
    engine = bench.engine(bench.large, precision)
    for verify in (True, False):
        spec = _spec(bench, verify=verify, bucket_size_bytes=256 << 20 if bench.on_gpu else 1 << 18)
        seconds = []
        for version in range(1, 4):
            began = time.perf_counter()
            buckets = _sync(rank, engine, spec, version, precision)
            seconds.append(time.perf_counter() - began)
        gigabytes = sum(bucket.num_bytes for bucket in buckets) / GIGABYTE
        name = f"{spec.name}, {'verified' if verify else 'not verified'}"
        yield Finding(name, {"gb": gigabytes, "gb_per_s": gigabytes / min(seconds), "first_s": seconds[0]})
    bench.end_engine()
    size = 1 << 30 if bench.on_gpu else 1 << 24
    flat, slot = torch.zeros(size, dtype=torch.uint8, device=bench.device), TensorSlot("w", "uint8", (size,), 0, size)
    fingerprint(flat, slot)
    began = time.perf_counter()
    fingerprint(flat, slot)
    yield Finding("fingerprint alone", {"gb_per_s": size / GIGABYTE / (time.perf_counter() - began)})


def _sync(rank: PolicyRank, engine: EngineProcess, spec: TransportSpec, version: int, dtype: str) -> list[Bucket]:
    """Run one sync like the controller: the next bucket is packed while the engine loads the previous one.

    Raises:
        WeightSyncError: the received weights differ from the sent ones.
    """
    engine.send("begin_weight_update", spec, version)
    rank.begin_weight_stream([Lane(spec)], dtype)
    buckets = [rank.next_weight_buckets()[0]]
    engine.answer()
    while True:
        engine.send("receive_bucket", buckets[-1])
        done = buckets[-1].is_last
        if not done:
            buckets.append(rank.next_weight_buckets()[0])
        engine.answer()
        if done:
            receipt: SyncReceipt = engine.call("finish_weight_update", version)
            check_receipts([receipt], buckets, version)
            return buckets


def _spec(bench: Bench, **values: Any) -> TransportSpec:
    device = bench.device.type
    return TransportSpec("cuda_ipc" if bench.on_gpu else "shared_memory", run_id="gpu_check", device=device, **values)


def _alone(bench: Bench) -> TransportSpec:
    spec = dataclasses.replace(_spec(bench), name="collective", master_port=free_port())
    return dataclasses.replace(spec, timeout_s=30.0, extra={"epoch": 0})
