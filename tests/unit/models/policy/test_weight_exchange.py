"""Trainer ranks of every mesh receive what they pack for engines and do not hold, each byte once, and nothing else."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import random_model
from exchange_cases import ENGINES, exchanged
from policy_helpers import policy_config, run_ranks

from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.dtensor.backend import DTensorBackend

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
