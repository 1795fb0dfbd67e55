"""No rank holds the whole model while it loads, saves, resumes or sends its weights."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from memory_helpers import anonymous_mib, measured, return_freed_memory, write_random_llama
from policy_helpers import policy_config, run_ranks

from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.training.interfaces import CheckpointPaths

RANKS = 4
SHARE = 0.45
"""Share of the model that a rank may hold in addition to one layer; its own part is 0.25."""
SMALL = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "vocab_size": 4096}
LARGE = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18, "vocab_size": 8192}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
PHASES = ("load", "export", "save", "resume")

logger = logging.getLogger(__name__)


def _backend(name: str) -> DTensorBackend:
    return DTensorBackend(policy_config(name), torch.device("cpu"), init_optimizer=False, init_reference_model=False)


def _peaks(rank: int, world_size: int, name: str, warm_up: str, folder: str) -> dict[str, float]:
    """Return MiB above the earlier memory in each phase; a tiny model goes first, for one-time allocations."""
    return_freed_memory()
    _phases(warm_up, f"{folder}/warm_up")
    return _phases(name, f"{folder}/checkpoint")


def _phases(name: str, folder: str) -> dict[str, float]:
    start, paths, peaks = anonymous_mib(), CheckpointPaths(Path(folder)), {}
    with measured(start) as peak:
        backend = _backend(name)
    peaks["load"] = peak.mib
    with measured(start) as peak:
        total = sum(tensor.sum().item() for _, tensor in backend.iterate_weights())
    peaks["export"] = peak.mib
    with measured(start) as peak:
        backend.save(paths)
    peaks["save"] = peak.mib
    with torch.no_grad():
        for parameter in backend.model.parameters():
            parameter.zero_()
    with measured(start) as peak:
        backend.load(paths)
    peaks["resume"] = peak.mib
    assert sum(tensor.sum().item() for _, tensor in backend.iterate_weights()) == total
    return peaks


@pytest.mark.parametrize("sizes", [SMALL, pytest.param(LARGE, marks=pytest.mark.long)], ids=["100_mb", "1_gb"])
def test_no_rank_holds_the_whole_model(sizes, tmp_path) -> None:
    model, layer = write_random_llama(tmp_path / "model", **sizes, **HEADS)
    write_random_llama(tmp_path / "tiny", **{**sizes, "hidden_size": 64, "num_hidden_layers": 2}, **HEADS)
    # Fork from a separate process: this one's heap holds free memory that would hide allocations.
    command = [sys.executable, __file__, str(tmp_path / "model"), str(tmp_path / "tiny"), str(tmp_path)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    ranks = json.loads(done.stdout.splitlines()[-1])
    peaks = {phase: max(rank[phase] for rank in ranks) for phase in PHASES}
    logger.warning(
        "%.0f MiB on %d ranks, one layer %.1f MiB: %s",
        model,
        RANKS,
        layer,
        ", ".join(f"{phase} {peak:.0f} MiB ({peak / model:.3f})" for phase, peak in peaks.items()),
    )
    for phase, peak in peaks.items():
        assert 0.6 * model / RANKS < peak < SHARE * model + layer, phase


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(run_ranks(_peaks, RANKS, *sys.argv[1:])))
