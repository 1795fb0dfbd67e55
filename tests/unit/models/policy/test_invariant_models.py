"""With `invariant_gradients`, experts, adapters, critics and resumed runs have the same bits in all layouts."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from critic_cases import SquaredError, critic_batch, save_critic
from parity.models import save_model
from policy_helpers import policy_config, random_batch, run_ranks, save_tiny_model, tiny_model

from nemo_rl.distributed.ranks.placements import whole
from nemo_rl.losses.supervised import NLLLossFn
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.policy.batching import count_valid, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
ROWS = 7
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"train_micro_batch_size": 3},
    {"sequence_packing": {"enabled": True, "train_mb_tokens": 70, "logprob_mb_tokens": 64}},
)
LORA = {"dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 4, "alpha": 8}}}


def digests_here(rank: int, num_ranks: int, name: str, values: dict[str, Any], folder: str | None) -> list[str]:
    """Train with each layout. With a folder, load its checkpoint after the first update, or write it on one rank."""
    return [_digest(rank, num_ranks, name, {"invariant_gradients": True} | values | each, folder) for each in LAYOUTS]


def _digest(rank: int, num_ranks: int, name: str, values: dict[str, Any], folder: str | None) -> str:
    config = policy_config(name, **values)
    worker = PolicyWorker(DTensorBackend(config, CPU), config)
    is_critic = config.reward_model_cfg.enabled
    loss_fn: Any = SquaredError() if is_critic else NLLLossFn()
    for seed in range(3):
        if folder is not None and seed == 1:
            paths = (f"{folder}/weights", f"{folder}/optimizer")
            if not Path(paths[0]).exists():
                worker.save_checkpoint(*paths)
            worker = PolicyWorker(DTensorBackend(config, CPU), config)
            worker.load_checkpoint(*paths)
        data = critic_batch(ROWS) if is_critic else random_batch(ROWS, seed=seed)
        batch = shard_batch(data, num_ranks, training_strategy(config, None, 1), 1)
        worker.train(batch.data[rank], batch.sizes[rank], loss_fn, count_valid(data))
    digest = hashlib.sha256()
    backend: Any = worker.backend
    for weight in backend.model.hf.parameters():
        digest.update(whole(weight.detach()).contiguous().numpy().tobytes())
    return digest.hexdigest()


def digests(name: str, values: dict[str, Any], folder: Path | None = None) -> set[str]:
    """Return the different weights after three updates, with each layout on one and on two ranks."""
    found = []
    for num_ranks in (1, 2):
        first, *others = run_ranks(digests_here, num_ranks, name, values, None if folder is None else str(folder))
        assert all(other == first for other in others)
        found += first
    assert len(found) == 2 * len(LAYOUTS)
    return set(found)


def test_experts_have_the_same_bits(tmp_path: Path) -> None:
    assert len(digests(save_model("qwen3-moe", tmp_path), {})) == 1


def test_adapters_have_the_same_bits(tmp_path: Path) -> None:
    name = save_tiny_model(tmp_path, "qwen2")
    trained = digests(name, LORA)
    assert len(trained) == 1
    assert trained != digests(name, {"dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 2, "alpha": 8}}})


def test_a_critic_has_the_same_bits(tmp_path: Path) -> None:
    name = save_critic(tmp_path, tiny_model("qwen3"))
    assert len(digests(name, {"reward_model_cfg": {"enabled": True}})) == 1


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    name = save_tiny_model(tmp_path / "model", "qwen2")
    (tmp_path / "checkpoint").mkdir()
    assert digests(name, {}, tmp_path / "checkpoint") == digests(name, {})
