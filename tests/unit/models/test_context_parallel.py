"""Ranks that divide rows equal one process of plain transformers: scores, loss, every gradient."""

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import random_model
from policy_helpers import VOCAB, WeightedNLL, hf_logprobs, policy_config, random_batch, run_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.policy.batching import count_valid, logprob_strategy, shard_batch, training_strategy
from nemo_rl.models.policy.workers.base import PolicyWorker

CPU = torch.device("cpu")
ALLOWED = 1e-5
LAYOUTS: dict[str, dict[str, Any]] = {
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 96}},
    "padded": {},
}
ROWS = random_batch(rows=6, width=24)


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def save_model(folder: Path, model_type: str) -> str:
    random_model(model_type, initializer_range=0.1).save_pretrained(folder / model_type)
    return str(folder / model_type)


def reference(model_type: str) -> dict[str, Any]:
    """Loss, gradients and log-probs of transformers' eager attention, row by row, unpadded."""
    model = random_model(model_type, initializer_range=0.1)
    model.set_attn_implementation("eager")
    logprobs = hf_logprobs(model, ROWS)
    _, tokens = count_valid(ROWS)
    loss, _ = WeightedNLL()(logprobs[:, 1:], ROWS, None, tokens)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.item(), "gradients": gradients, "logprobs": logprobs.detach()}


def on_ranks(rank: int, world_size: int, cases: dict[Any, tuple[str, dict[str, Any]]]) -> dict[Any, dict[str, Any]]:
    """What one rank's worker gives for each case: a model's folder, and values of the policy section."""
    return {key: _one_case(rank, world_size, name, values) for key, (name, values) in cases.items()}


def _one_case(rank: int, world_size: int, name: str, values: dict[str, Any]) -> dict[str, Any]:
    config = policy_config(name, **values)
    layout = ParallelLayout.of(config, world_size)
    worker = PolicyWorker(DTensorBackend(config, CPU, layout), config)
    dp_rank = layout.data_parallel_rank(rank)
    out: dict[str, Any] = {}

    def keep_gradients() -> tuple[float, bool]:
        out["gradients"] = {key: full(p.grad) for key, p in worker.backend.model.hf.named_parameters()}
        worker.backend.model.zero_grad()
        return 0.0, True

    worker.backend.clip_and_step = keep_gradients
    batch = shard_batch(ROWS, layout.data_parallel_size, training_strategy(config))
    out["loss"] = worker.train(batch.data[dp_rank], batch.sizes[dp_rank], WeightedNLL(), count_valid(ROWS)).loss
    scored = shard_batch(ROWS, layout.data_parallel_size, logprob_strategy(config))
    out["logprobs"] = worker.get_logprobs(scored.data[dp_rank], scored.sizes[dp_rank])
    out["plan"], out["ranks"] = scored, layout.result_ranks
    return out


def differences(parts: list[dict[str, Any]], want: dict[str, Any]) -> dict[str, float]:
    """Largest relative difference of loss, gradients (the worst tensor) and log-probs on any rank."""
    answers = [parts[rank] for rank in parts[0]["ranks"]]
    logprobs = parts[0]["plan"].restore([part["logprobs"] for part in answers])
    gradients = [
        _relative(part["gradients"][name], gradient) for part in parts for name, gradient in want["gradients"].items()
    ]
    return {
        "loss": abs(sum(part["loss"] for part in answers) - want["loss"]) / abs(want["loss"]),
        "gradients": max(gradients),
        "logprobs": _relative(logprobs, want["logprobs"]),
    }


def _relative(got: Tensor, want: Tensor) -> float:
    return ((got - want).abs().max() / want.abs().max()).item()


def case(folder: Path, model_type: str, layout: str, method: str, cp: int, **parallel: Any) -> tuple[str, dict]:
    section = {"context_parallel_size": cp, "context_parallel_method": method, **parallel}
    return save_model(folder, model_type), {**LAYOUTS[layout], "dtensor_cfg": section}
