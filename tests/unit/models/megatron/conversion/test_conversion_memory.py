"""No rank holds more than its part of the model and a few tensors while weights are loaded and sent."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from memory_helpers import MIB, anonymous_mib, measured, return_freed_memory, write_random_llama
from policy_helpers import run_ranks
from rank_backend import CPU, exported, start_groups, without_groups
from rank_host import needs_megatron
from transformers import AutoConfig

from nemo_rl.config import MegatronConfig
from nemo_rl.models.huggingface.tensor_files import TensorFiles, weight_files

pytestmark = needs_megatron
SMALL = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "vocab_size": 4096}
LARGE = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18, "vocab_size": 8192}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
LIMIT_MIB = 1.2e9 / MIB
"""What a model of 1 GB may add to a process, all of it included."""
SLACK_MIB = 8

logger = logging.getLogger(__name__)


def _peaks(rank: int, world_size: int, folder: str, warm_up: str) -> dict[str, float]:
    """Return MiB above the earlier memory, and in all; a tiny model goes first, for one-time allocations."""
    return_freed_memory()
    section = start_groups(tp=world_size)
    _convert(Path(warm_up), section)
    start = anonymous_mib()
    found = _convert(Path(folder), section) | {"start": start}
    if world_size == 1:
        _import(Path(warm_up))
        found["import"] = _import(Path(folder))
    return found


def _import(folder: Path) -> float:
    """Return MiB that writing a checkpoint takes, above the earlier memory."""
    from nemo_rl.models.megatron.checkpoints.folder_import import import_huggingface

    with without_groups(), measured(anonymous_mib()) as peak:
        import_huggingface(str(folder), folder / "megatron", "float32")
    return peak.mib


def _convert(folder: Path, section: MegatronConfig) -> dict[str, float]:
    from nemo_rl.models.megatron.conversion.importer import load_huggingface
    from nemo_rl.models.megatron.model.build import build_chunks

    config, start = AutoConfig.from_pretrained(folder), anonymous_mib()
    with measured(start) as load:
        chunks = build_chunks(config, section, precision=torch.float32, device=CPU)
        load_huggingface(chunks, config, folder)
    files = TensorFiles(weight_files(folder))
    with measured(start) as export:
        for name, tensor in exported(chunks, config):
            assert torch.equal(tensor[:2].bfloat16(), files.read(name)[:2])
    return {"load": load.mib, "export": export.mib}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("sizes", [SMALL, pytest.param(LARGE, marks=pytest.mark.long)], ids=["100_mb", "1_gb"])
def test_a_conversion_holds_one_shard_and_few_tensors(sizes, num_ranks, tmp_path) -> None:
    model, _ = write_random_llama(tmp_path / "model", **sizes, **HEADS)
    write_random_llama(tmp_path / "tiny", **{**sizes, "hidden_size": 64, "num_hidden_layers": 2}, **HEADS)
    # Fork from a separate process: this one's heap holds free memory that would hide allocations.
    command = [sys.executable, __file__, str(num_ranks), str(tmp_path / "model"), str(tmp_path / "tiny")]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    ranks = json.loads(done.stdout.splitlines()[-1])
    largest = sizes["vocab_size"] * sizes["hidden_size"] * 4 / MIB
    logger.info("model %.0f MiB, largest tensor %.0f MiB, %d ranks: %s", model, largest, num_ranks, ranks)
    for rank in ranks:
        assert rank["load"] < model / num_ranks + SLACK_MIB
        assert rank["export"] < model / num_ranks + 2 * largest + SLACK_MIB  # gloo gathers into a buffer of its own
        assert max(rank["load"], rank["export"]) < LIMIT_MIB
        assert rank.get("import", 0.0) < 2 * largest + SLACK_MIB


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run_ranks(_peaks, int(sys.argv[1]), *sys.argv[2:])) + "\n")
