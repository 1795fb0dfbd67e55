"""Trainer ranks of every mesh receive what they pack for engines and do not hold, each byte once, and nothing else."""

import logging
import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from architectures import random_model
from exchange_cases import ENGINES, exchanged
from policy_helpers import policy_config, run_ranks

from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.distributed.ranks.rendezvous import bind_free_port
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.utils.errors import WeightSyncError
from nemo_rl.weight_sync.lanes import Lane
from nemo_rl.weight_sync.transport import TransportSpec

CPU = torch.device("cpu")
MESHES: dict[str, dict[str, Any]] = {
    "dp2": {},
    "replicas": {"dp_replicate_size": 2},
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "ep2": {"expert_parallel_size": 2},
}

logger = logging.getLogger(__name__)


def _on_meshes(rank: int, world_size: int, name: str, meshes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found = {}
    for mesh, keys in meshes.items():
        config = policy_config(name, dtensor_cfg=keys, train_micro_batch_size=1)
        layout = ParallelLayout.of(config, world_size)
        backend = DTensorBackend(config, CPU, layout, init_optimizer=False, init_reference_model=False)
        found[mesh] = exchanged(partial(backend.held_weights, torch.bfloat16))
        dist.barrier()
    return found


@pytest.mark.parametrize("tied", [True, False])
def test_each_byte_travels_once_and_only_to_its_sender(tied: bool, tmp_path: Path) -> None:
    model = random_model("qwen3_moe", tie_word_embeddings=tied, vocab_size=96)
    model.save_pretrained(tmp_path)
    embedding = 2 * model.get_input_embeddings().weight.numel()
    ranks = run_ranks(_on_meshes, 2, str(tmp_path), MESHES)
    for mesh in MESHES:
        one, two = (rank[mesh] for rank in ranks)
        if mesh != "tp2":  # whose ranks hold the same norms
            copies = 2 if mesh == "replicas" else 1
            assert one["held"] + two["held"] == copies * one["whole"], "nothing is gathered to be converted"
        for engine in ENGINES:
            logger.info("%s to %s: %s, %s of %d", mesh, engine, one[engine], two[engine], one["whole"])
            assert [rank[mesh][engine]["trainer"] for rank in ranks] == [rank[mesh][engine]["least"] for rank in ranks]
            assert one[engine]["engine"] == two[engine]["engine"]
        assert one["tp1"]["engine"] == [one["whole"]], "an engine of one rank receives each weight once"
        assert sum(one["pp2"]["engine"]) - one["whole"] == (embedding if tied else 0), "both stages hold a tied one"
        assert two["tp1"]["trainer"] == 0, "rank 1 sends nothing to an engine of one rank"


def _after_engines_that_do_not_come(rank: int, world_size: int, name: str, port: int) -> tuple[str, list[str]]:
    """Open a stream to engines that are gone, on rank 0 alone, and then one to the memory of this machine."""
    config = policy_config(name)
    worker = PolicyWorker(DTensorBackend(config, CPU), config)
    gone = TransportSpec("collective", run_id="test", master_port=port, receivers=(0,), timeout_s=1.0)
    with mock.patch.dict(os.environ, {"RANK": str(rank), "LOCAL_RANK": str(rank)}):
        with pytest.raises(WeightSyncError) as failure:
            worker.begin_weight_stream([Lane(gone)], "float32")
        worker.begin_weight_stream([Lane(TransportSpec("shared_memory", run_id="test"))], "float32")
    names: list[str] = []
    is_last = False
    while not is_last:
        (bucket,) = worker.next_weight_buckets()
        names += [slot.name for slot in bucket.slots]
        is_last = bucket.is_last
    worker._close_sender()
    return str(failure.value), names


def test_ranks_stay_in_step_when_one_of_them_does_not_meet_the_engines(tmp_path: Path) -> None:
    model = random_model("qwen3_moe", vocab_size=96)
    model.save_pretrained(tmp_path)
    with bind_free_port("127.0.0.1", None, None) as listener:
        port = listener.getsockname()[1]
    (first, names), (second, same) = run_ranks(_after_engines_that_do_not_come, 2, str(tmp_path), port)
    assert first == second and "rank 0: DistStoreError: Timed out" in first
    assert names == same and "model.embed_tokens.weight" in names
