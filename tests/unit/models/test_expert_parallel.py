"""Experts shared between ranks equal plain Hugging Face in one process: log-probs, loss, every gradient, norm."""

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import random_model
from policy_helpers import WeightedNLL, policy_config, random_batch, run_ranks
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.policy.batching import count_valid, logprob_strategy, shard_batch, training_strategy
from nemo_rl.models.policy.workers.base import PolicyWorker

CPU = torch.device("cpu")
ROWS = 8
TOLERANCE = 1e-5
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 48, "logprob_mb_tokens": 64}}


def _values(ep: int, *, packed: bool, **parallel: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"train_global_batch_size": ROWS, "train_micro_batch_size": 2, "max_grad_norm": 0.5}
    cfg = {"dtensor_cfg": {"expert_parallel_size": ep, **parallel}}
    return values | cfg | (PACKED if packed else {})


def _save(folder: Path, arch: str, **overrides: Any) -> str:
    model = random_model(arch, initializer_range=0.1, **overrides)
    _leave_experts_out(model)
    model.save_pretrained(folder)
    return str(folder)


def _leave_experts_out(model: PreTrainedModel) -> None:
    """In the last layer of gpt_oss no token goes to the second half of the experts, in the first none to expert 1."""
    if model.config.model_type == "gpt_oss":
        for layer, experts in ((0, [1]), (1, [2, 3])):
            model.model.layers[layer].mlp.router.bias.data[experts] = -1e4


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _train_once(rank: int, world_size: int, name: str, values: dict[str, Any]) -> dict[str, Any]:
    config = policy_config(name, **values)
    worker = PolicyWorker(DTensorBackend(config, CPU), config)
    out: dict[str, Any] = {}
    data = random_batch(rows=ROWS)
    scored = shard_batch(data, world_size, logprob_strategy(config))
    scores = worker.get_logprobs(scored.data[rank], scored.sizes[rank])
    order = [row for mb in scored.plan.shards[rank] for row in mb]
    out["scores"] = dict(zip(order, scores, strict=True))
    step = worker.backend.clip_and_step

    def step_and_keep() -> tuple[float, bool]:
        out["grads"] = {key: _full(p.grad) for key, p in worker.backend.model.hf.named_parameters()}
        return step()

    worker.backend.clip_and_step = step_and_keep  # type: ignore[method-assign]
    batch = shard_batch(data, world_size, training_strategy(config))
    result = worker.train(batch.data[rank], batch.sizes[rank], WeightedNLL(), count_valid(data))
    out["loss"], out["norm"], out["metrics"] = result.loss, result.grad_norm, result.model_metrics
    out["weights"] = {key: tensor.clone() for key, tensor in worker.iterate_weights()}
    return out


def _by_hugging_face(name: str, arch: str) -> tuple[torch.Tensor, float, dict[str, torch.Tensor]]:
    """Scores `[B, T]`, loss and gradients, one row at a time, in float32."""
    model = type(random_model(arch)).from_pretrained(name).train()
    data = random_batch(rows=ROWS)
    rows = []
    for row, length in enumerate(data["input_lengths"].tolist()):
        ids = data["input_ids"][row : row + 1, :length]
        logp = torch.log_softmax(model(input_ids=ids, use_cache=False).logits, dim=-1)
        scores = logp[0, :-1].gather(-1, ids[0, 1:, None]).squeeze(-1)
        rows.append(torch.nn.functional.pad(scores, (1, data["input_ids"].shape[1] - length)))
    scores = torch.stack(rows)
    mask = data["token_mask"] * data["sample_mask"][:, None]
    mask[:, 0] = 0
    loss = -(scores * mask * data["advantages"]).sum() / count_valid(data)[1]
    loss.backward()
    zeros = {key: torch.zeros_like(p) for key, p in model.named_parameters()}
    grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return scores.detach(), loss.item(), zeros | grads


def _difference(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).abs().max() / want.abs().max().clamp(min=1e-12)).item()


@pytest.mark.parametrize(
    ("arch", "world_size", "ep", "values"),
    [
        ("qwen3_moe", 2, 2, {"packed": True}),
        ("qwen2_moe", 2, 2, {"packed": False, "activation_checkpointing": True}),
        ("deepseek_v3", 2, 2, {"packed": False}),
        ("gpt_oss", 2, 2, {"packed": False}),
        ("gpt_oss", 4, 4, {"packed": False, "activation_checkpointing": True}),
        ("mixtral", 4, 2, {"packed": True}),
        ("qwen3_moe", 4, 2, {"packed": False, "dp_replicate_size": 2}),
    ],
)
def test_shared_experts_equal_one_process(arch, world_size, ep, values, tmp_path) -> None:
    name = _save(tmp_path / "m", arch)
    parts = run_ranks(_train_once, world_size, name, _values(ep, **values))
    want_scores, want_loss, want_grads = _by_hugging_face(name, arch)
    scores = {row: part for rank in parts for row, part in rank["scores"].items()}
    assert _difference(torch.stack([scores[row] for row in range(ROWS)]), want_scores) < TOLERANCE
    assert sum(part["loss"] for part in parts) == pytest.approx(want_loss, rel=TOLERANCE)
    assert set(parts[0]["grads"]) == set(want_grads)
    norm = torch.cat([grad.flatten() for grad in want_grads.values()]).norm().item()
    for part in parts:
        worst = {key: _difference(grad, want_grads[key]) for key, grad in part["grads"].items()}
        print(max(worst.values()), max(worst, key=worst.__getitem__))
        assert max(worst.values()) < TOLERANCE, worst
        assert part["norm"] == pytest.approx(norm, rel=TOLERANCE)
