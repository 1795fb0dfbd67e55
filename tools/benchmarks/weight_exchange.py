"""Measure how long trainer ranks take to pack the weights of a sync, and what they receive from each other for it.

    uv run --extra cpu python tools/benchmarks/weight_exchange.py --sizes 25m 500m --meshes dp2 tp2 pp2

Two DTensor ranks on this machine pack random Qwen3 weights in bfloat16 into the buckets that rank 0 sends (shared
memory, without checksums). `exchanged`: each rank receives what it packs and does not hold, as in a run. `gathered`:
every rank receives every tensor, as with a backend that yields whole tensors only. Both are timed in turns, after one
stream of each that does not count. 500 M parameters need 8 GB of memory.
"""

import argparse
import logging
import statistics
import sys
import tempfile
import time
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from side_by_side import ROOT
from transformers.utils.logging import disable_progress_bar
from workloads import SIZES

sys.path.insert(0, str(ROOT / "tools"))
from parity.ranks import on_ranks, policy_config
from tiny_models import TinyShape, make_tiny_model

from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.weight_sync.endpoints import WeightSender
from nemo_rl.weight_sync.lanes import Lane
from nemo_rl.weight_sync.parts import HeldWeights, WholeWeights
from nemo_rl.weight_sync.transport import TransportSpec

MESHES: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
}
LARGE = TinyShape(hidden_size=1536, intermediate_size=4608, num_heads=16, num_kv_heads=8, num_layers=17)
SHAPES = SIZES | {"500m": LARGE}
BUCKET_BYTES = 64 << 20


class Packed(NamedTuple):
    """Seconds of one stream on a rank, and the bytes that the rank received for it from the others."""

    seconds: float
    received: int


def main(argv: list[str] | None = None) -> None:
    """Measure the chosen models and meshes, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["25m"], choices=list(SHAPES), help="parameters of the model")
    parser.add_argument("--meshes", nargs="+", default=list(MESHES), choices=list(MESHES), help="ranks of the trainer")
    parser.add_argument("--repeats", type=int, default=3, help="streams of each kind")
    arguments = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    disable_progress_bar()
    sys.stdout.write(
        "| parameters | mesh | gathered, s | exchanged, s | gathered, MB of a rank | exchanged, MB of a rank |\n"
        "|---|---|---:|---:|---:|---:|\n"
    )
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as folder:
            model = make_tiny_model("qwen3", SHAPES[size], seed=0)
            count = sum(parameter.numel() for parameter in model.parameters())
            model.save_pretrained(folder)
            del model
            for mesh in arguments.meshes:
                ranks = on_ranks(_measure, 2, folder, mesh, arguments.repeats)
                sys.stdout.write(f"| {count / 1e6:.0f} M | {mesh} | {_row(ranks)} |\n")
                sys.stdout.flush()


def _row(ranks: list[dict[str, list[Packed]]]) -> str:
    """Format the medians of the slower rank, and the bytes of each rank."""
    seconds = {
        kind: statistics.median(max(rank[kind][turn].seconds for rank in ranks) for turn in range(len(ranks[0][kind])))
        for kind in ranks[0]
    }
    megabytes = {kind: ", ".join(f"{rank[kind][-1].received / 1e6:.1f}" for rank in ranks) for kind in ranks[0]}
    return " | ".join(
        [f"{seconds['gathered']:.3f}", f"{seconds['exchanged']:.3f}", megabytes["gathered"], megabytes["exchanged"]]
    )


def _measure(folder: str, mesh: str, repeats: int) -> dict[str, list[Packed]]:
    """Pack the weights of a rank's model in both ways, in turns."""
    config = policy_config(folder, MESHES[mesh], packed=False)
    layout, rank = ParallelLayout.of(config, dist.get_world_size()), dist.get_rank()
    backend = DTensorBackend(config, torch.device("cpu"), layout, init_optimizer=False, init_reference_model=False)
    held = partial(backend.held_weights, torch.bfloat16)
    whole = WholeWeights(partial(backend.iterate_weights, torch.bfloat16))
    spec = TransportSpec("shared_memory", run_id="benchmark", bucket_size_bytes=BUCKET_BYTES, verify=False)
    lanes = [Lane(spec)]
    exchanging = WeightSender(lanes, rank, is_node_leader=rank == 0, group=dist.group.WORLD)
    gathering = WeightSender(lanes, rank, is_node_leader=rank == 0)
    own = sum(_bytes_of(held()).values())
    found: dict[str, list[Packed]] = {"gathered": [], "exchanged": []}
    for _ in range(1 + repeats):
        seconds = _stream(gathering, whole)
        found["gathered"].append(Packed(seconds, sum(_bytes_of(whole).values()) - own))
        before = exchanging.received_bytes
        seconds = _stream(exchanging, held())
        found["exchanged"].append(Packed(seconds, exchanging.received_bytes - before))
    exchanging.close()
    gathering.close()
    return {kind: packed[1:] for kind, packed in found.items()}


def _stream(sender: WeightSender, weights: HeldWeights) -> float:
    """Pack all buckets; return the seconds from the moment when all ranks begin."""
    dist.barrier()
    began = time.perf_counter()
    sender.begin(weights)
    while not sender.next_buckets()[0].is_last:
        pass
    return time.perf_counter() - began


def _bytes_of(weights: HeldWeights) -> dict[str, int]:
    """Return the bytes of a rank's blocks of each weight in bfloat16."""
    return {each.name: 2 * sum(block.numel for block in each.blocks) for each in weights.described()}


if __name__ == "__main__":
    main()
