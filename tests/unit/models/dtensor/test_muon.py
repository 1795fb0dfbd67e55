"""Muon updates the weights as torch's Muon does on one rank, on any mesh, and continues bit for bit."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import random_model
from policy_helpers import WeightedNLL, policy_config, random_batch, run_ranks
from torch.distributed.tensor import DTensor

from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.policy.batching import count_valid, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker

CPU = torch.device("cpu")
ROWS = 8
MUON = {
    "lr": 0.02,
    "momentum": 0.9,
    "weight_decay": 0.1,
    "ns_dtype": "float32",
    "adamw": {"lr": 1e-2, "weight_decay": 0.01},
}


def _config(name: str, mesh: dict[str, Any], **kwargs: Any) -> Any:
    return policy_config(
        name,
        dtensor_cfg=mesh,
        optimizer={"name": "torch.optim.Muon", "kwargs": {**MUON, **kwargs}},
        train_global_batch_size=ROWS,
        max_grad_norm=0.5,
    )


def _worker(name: str, mesh: dict[str, Any], **kwargs: Any) -> PolicyWorker:
    config = _config(name, mesh, **kwargs)
    layout = ParallelLayout.of(config, torch.distributed.get_world_size())
    rank = torch.distributed.get_rank()
    return PolicyWorker(DTensorBackend(config, CPU), config, gives_scores=rank in layout.result_ranks)


def _train(worker: PolicyWorker, mesh: dict[str, Any], seeds: range) -> None:
    config = _config("m", mesh)
    layout = ParallelLayout.of(config, torch.distributed.get_world_size())
    shard = layout.data_parallel_rank(torch.distributed.get_rank())
    for seed in seeds:
        data = random_batch(rows=ROWS, seed=seed)
        batch = shard_batch(data, layout.data_parallel_size, training_strategy(config))
        worker.train(batch.data[shard], batch.sizes[shard], WeightedNLL(), count_valid(data))


def _weights(worker: PolicyWorker) -> dict[str, torch.Tensor]:
    named = worker.backend.model.hf.named_parameters()
    return {key: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for key, p in named}


def _trained(rank: int, world_size: int, name: str, mesh: dict[str, Any], kwargs: dict[str, Any]) -> dict:
    worker = _worker(name, mesh, **kwargs)
    _train(worker, mesh, range(3))
    return _weights(worker)


if __name__ == "__main__":
    import sys
    import tempfile
    import time

    for arch, ranks, mesh in [
        ("qwen3", 2, {}),
        ("qwen3", 2, {"tensor_parallel_size": 2}),
        ("phi3", 4, {"tensor_parallel_size": 2}),
        ("qwen3_moe", 2, {"expert_parallel_size": 2}),
        ("gpt_oss", 4, {"expert_parallel_size": 2}),
        ("qwen3", 2, {"pipeline_parallel_size": 2}),
        ("qwen3_moe", 4, {"expert_parallel_size": 2, "dp_replicate_size": 2}),
        ("qwen3_moe", 2, {"tensor_parallel_size": 2}),
        ("qwen3", 4, {"dp_replicate_size": 2}),
    ]:
        with tempfile.TemporaryDirectory() as folder:
            model = random_model(arch, initializer_range=0.1, vocab_size=100)
            model.save_pretrained(folder)
            start = dict(model.named_parameters())
            for dtype in ("float32", "bfloat16"):
                t = time.time()
                one = run_ranks(_trained, 1, folder, {}, {"ns_dtype": dtype})[0]
                parts = run_ranks(_trained, ranks, folder, mesh, {"ns_dtype": dtype})
                found = {k: v for part in parts for k, v in part.items()}
                moved = {k: (one[k] - start[k]).norm() for k in one}
                apart = {k: float((one[k] - found[k]).norm() / moved[k].clamp(min=1e-9)) for k in one}
                worst = max(apart, key=apart.get)
                print(arch, ranks, mesh, dtype, worst, apart[worst], round(time.time() - t, 1), flush=True)
