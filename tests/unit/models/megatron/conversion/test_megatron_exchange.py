"""Ranks of Megatron Core receive what they pack for engines and do not hold, each byte once, and nothing else."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from exchange_cases import ENGINES, exchanged
from rank_backend import CPU, start_groups
from rank_host import needs_megatron
from small_models import hf_model
from transformers import AutoConfig

from nemo_rl.weight_sync.parts import HeldWeights, ReadableWeights

pytestmark = needs_megatron
MESHES: dict[str, dict[str, Any]] = {"dp2": {}, "tp2": {"tp": 2, "sp": True}, "pp2": {"pp": 2}, "ep2": {"ep": 2}}
FAMILIES = ("qwen3_moe", "qwen2", "deepseek_v3")
"""With experts, with tied weights and biases, with latent attention; the first and last with a dense layer."""

logger = logging.getLogger(__name__)


def _on_meshes(rank: int, world_size: int, folder: Path, family: str) -> dict[str, Any]:
    return {mesh: _on_mesh(folder, sizes) for mesh, sizes in MESHES.items() if family != "qwen2" or mesh != "ep2"}


def _on_mesh(folder: Path, sizes: dict[str, Any]) -> dict[str, Any]:
    from nemo_rl.models.megatron.conversion.holdings import held_hf_weights
    from nemo_rl.models.megatron.conversion.importer import load_huggingface
    from nemo_rl.models.megatron.model.build import build_chunks

    config = AutoConfig.from_pretrained(folder)
    chunks = list(build_chunks(config, start_groups(**sizes), precision=torch.float32, device=CPU))
    load_huggingface(chunks, config, folder)

    def weights() -> HeldWeights:
        return ReadableWeights(held_hf_weights(chunks, config, device=CPU, dtype=torch.bfloat16), CPU)

    return exchanged(weights)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_byte_travels_once_and_only_to_its_sender(host, family: str, tmp_path: Path) -> None:
    hf_model(family, num_hidden_layers=4).save_pretrained(tmp_path)
    ranks = host.run(_on_meshes, 2, tmp_path, family)
    for mesh in ranks[0]:
        one, two = (rank[mesh] for rank in ranks)
        assert one["held"] + two["held"] >= one["whole"]
        for engine in ENGINES:
            logger.info("%s to %s: %s, %s of %d", mesh, engine, one[engine], two[engine], one["whole"])
            assert [rank[mesh][engine]["trainer"] for rank in ranks] == [rank[mesh][engine]["least"] for rank in ranks]
        assert one["tp1"]["engine"] == [one["whole"]], "an engine of one rank receives each weight once"
        assert two["tp1"]["trainer"] == 0, "rank 1 sends nothing to an engine of one rank"
