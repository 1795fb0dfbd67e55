"""Experts divided over ranks equal plain Hugging Face in one process: log-probs, loss, every gradient, norm."""

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import random_model
from policy_helpers import WeightedNLL, policy_config, random_batch, run_ranks
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.distributed.ranks import collectives
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.expert_parallel import (
    dispatch_over_expert_ranks,
    divide_over_tensor_ranks,
    divide_tokens,
    require_experts,
)
from nemo_rl.models.dtensor.mesh import Meshes
from nemo_rl.models.dtensor.routers import ExpertBalance
from nemo_rl.models.policy.batching import count_valid, logprob_strategy, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.utils.errors import ConfigError

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
    """Send no token to the second half of gpt_oss's experts in the last layer, and none to expert 1 in the first."""
    if model.config.model_type == "gpt_oss":
        for layer, experts in ((0, [1]), (1, [2, 3])):
            model.model.layers[layer].mlp.router.bias.data[experts] = -1e4


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _train_once(
    rank: int, world_size: int, name: str, values: dict[str, Any], data: BatchedDataDict[Any] | None = None
) -> dict[str, Any]:
    config = policy_config(name, **values)
    layout = ParallelLayout.of(config, world_size)
    worker = PolicyWorker(DTensorBackend(config, CPU), config, gives_scores=rank in layout.result_ranks)
    out: dict[str, Any] = {}
    data = random_batch(rows=ROWS) if data is None else data
    shards, shard = layout.data_parallel_size, layout.data_parallel_rank(rank)
    scored = shard_batch(data, shards, logprob_strategy(config))
    scores = worker.get_logprobs(scored.data[shard], scored.sizes[shard])
    order = [row for mb in scored.plan.shards[shard] for row in mb]
    out["scores"] = dict(zip(order, scores, strict=True)) if len(scores) else {}
    step = worker.backend.clip_and_step

    def step_and_keep() -> tuple[float, bool]:
        out["grads"] = {key: _full(p.grad) for key, p in worker.backend.model.hf.named_parameters()}
        return step()

    worker.backend.clip_and_step = step_and_keep  # type: ignore[method-assign]
    batch = shard_batch(data, shards, training_strategy(config))
    result = worker.train(batch.data[shard], batch.sizes[shard], WeightedNLL(), count_valid(data))
    out["loss"], out["norm"], out["metrics"] = result.loss, result.grad_norm, result.model_metrics
    named = worker.backend.model.hf.named_parameters()
    out["empty"] = [key for key, p in named if isinstance(p, DTensor) and not p.to_local().numel()]
    return out


def _by_hugging_face(name: str, arch: str) -> tuple[torch.Tensor, float, dict[str, torch.Tensor]]:
    """Return scores `[B, T]`, loss and gradients, one row at a time, in float32."""
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
        ("gpt_oss", 4, 2, {"packed": False, "activation_checkpointing": True}),
        ("qwen3_moe", 4, 2, {"packed": False, "dp_replicate_size": 2}),
        ("deepseek_v3", 4, 4, {"packed": True}),
        ("mixtral", 4, 2, {"packed": True, "experts": {"num_local_experts": 2}}),
    ],
)
def test_experts_divided_over_ranks_equal_one_process(arch, world_size, ep, values, tmp_path) -> None:
    """Ranks and experts without tokens (gpt_oss), and fewer experts of a rank than ranks that shard them (mixtral)."""
    values = dict(values)
    name = _save(tmp_path / "m", arch, **values.pop("experts", {}))
    parts = run_ranks(_train_once, world_size, name, _values(ep, **values))
    want_scores, want_loss, want_grads = _by_hugging_face(name, arch)
    scores = {row: part for rank in parts for row, part in rank["scores"].items()}
    assert _difference(torch.stack([scores[row] for row in range(ROWS)]), want_scores) < TOLERANCE
    assert sum(part["loss"] for part in parts) == pytest.approx(want_loss, rel=TOLERANCE)
    assert set(parts[0]["grads"]) == set(want_grads)
    norm = torch.cat([grad.flatten() for grad in want_grads.values()]).norm().item()
    for part in parts:
        worst = {key: _difference(grad, want_grads[key]) for key, grad in part["grads"].items()}
        assert max(worst.values()) < TOLERANCE, worst
        assert part["norm"] == pytest.approx(norm, rel=TOLERANCE)
        assert not [key for key in part["empty"] if "experts" in key]


def _as_tensor_parallel_block(rank: int, world_size: int, arch: str, dispatched: bool) -> dict[str, float]:
    """Return differences of one divided block from the whole one, for tokens that both tensor-parallel ranks have."""
    whole, shared = random_model(arch), random_model(arch)
    if arch == "gpt_oss" and dispatched:  # the second rank gets no token, and its experts are not even called
        for model in (whole, shared):
            model.model.layers[0].mlp.router.bias.data[2:] = -1e4
            model.set_experts_implementation("eager")
    layout = ParallelLayout(tp=world_size, ep=world_size if dispatched else 1)
    meshes = Meshes.build(layout, "cpu")
    balances = [ExpertBalance(whole, 0.0, CPU), ExpertBalance(shared, 0.0, CPU, meshes.tp)]
    block, group = shared.model.layers[0].mlp, meshes.tp_group
    if dispatched:
        dispatch_over_expert_ranks(block.experts, meshes.ep)
        divide_tokens(block, group)
    else:
        divide_over_tensor_ranks(block.experts, meshes.tp)
    torch.manual_seed(0)
    hidden, ahead = torch.randn(2, 2, 7, 64)
    real = torch.arange(7)[None] < torch.tensor([[7], [3]])
    results = []
    for module, balance in zip((whole.model.layers[0].mlp, block), balances, strict=True):
        x = hidden.clone().requires_grad_()
        divided = module is block and not dispatched
        with balance.watching(real):
            out = module(collectives.reduce_gradient(x, group) if divided else x)
        out = out[0] if isinstance(out, tuple) else out
        out = collectives.all_reduce(out, group) if divided else out
        (out * ahead).sum().backward()
        grads = {f"d{key}": _full(parameter.grad) for key, parameter in module.named_parameters()}
        if module is block:
            for key, grad in grads.items():
                if "experts.down" not in key and "experts.gate_up" not in key:
                    torch.distributed.all_reduce(grad)
        results.append({"out": out.detach(), "dx": x.grad} | grads)
    assert balances[1].end_update() == balances[0].end_update()
    want, got = results
    return {key: _difference(got[key], want[key]) for key in want}


@pytest.mark.parametrize(
    ("arch", "dispatched"), [("qwen3_moe", False), ("gpt_oss", False), ("qwen2_moe", True), ("gpt_oss", True)]
)
def test_experts_of_tensor_parallel_ranks_equal_one_process(arch, dispatched) -> None:
    """Divided: partial gradients of hidden states and routers. Dispatched: 7 tokens are divided over 2 ranks."""
    for found in run_ranks(_as_tensor_parallel_block, 2, arch, dispatched):
        assert max(found.values()) < TOLERANCE, found
        assert any(key.startswith(("dgate", "drouter")) for key in found)


def test_wrong_numbers_of_ranks_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"expert_parallel_size=3 does not divide the 4 experts.*value: 2"):
        require_experts(random_model("qwen3_moe"), 3)
    for arch in ("qwen2", "llama4_text"):
        with pytest.raises(ConfigError, match="ForCausalLM has no experts that can be shared"):
            require_experts(random_model(arch), 2)


FOREACH = {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-2, "weight_decay": 0.01, "foreach": True}}
SCHEDULE = {"name": "torch.optim.lr_scheduler.CosineAnnealingWarmRestarts", "kwargs": {"T_0": 6}}


def _update(worker: PolicyWorker, config: Any, rank: int, world_size: int, seed: int) -> tuple[float, float]:
    data = random_batch(rows=ROWS, seed=seed)
    batch = shard_batch(data, world_size, training_strategy(config))
    result = worker.train(batch.data[rank], batch.sizes[rank], WeightedNLL(), count_valid(data))
    return result.loss, result.grad_norm


def _train_and_save(rank: int, world_size: int, name: str, values: dict[str, Any], folder: str) -> dict[str, Any]:
    config = policy_config(name, **values)
    worker = PolicyWorker(DTensorBackend(config, CPU), config)
    for seed in (1, 2):
        _update(worker, config, rank, world_size, seed)
    worker.save_checkpoint(f"{folder}/w", f"{folder}/o")
    return {"weights": {key: tensor.clone() for key, tensor in worker.iterate_weights()}} | _go_on(
        worker, config, rank, world_size
    )


def _load_and_go_on(rank: int, world_size: int, name: str, values: dict[str, Any], folder: str) -> dict[str, Any]:
    config = policy_config(name, **values)
    worker = PolicyWorker(DTensorBackend(config, CPU), config)
    worker.load_checkpoint(f"{folder}/w", f"{folder}/o")
    return {"weights": {key: tensor.clone() for key, tensor in worker.iterate_weights()}} | _go_on(
        worker, config, rank, world_size
    )


def _go_on(worker: PolicyWorker, config: Any, rank: int, world_size: int) -> dict[str, Any]:
    optimizer = worker.backend.optimizer
    moments = {
        key: _full(optimizer.state[parameter]["exp_avg_sq"])
        for key, parameter in worker.backend.model.hf.named_parameters()
    }
    rates, losses = [], []
    for seed in (3, 4):
        losses.append(_update(worker, config, rank, world_size, seed))
        rates.append([group["lr"] for group in optimizer.param_groups])
    return {"moments": moments, "rates": rates, "losses": losses}


@pytest.mark.parametrize(("arch", "before", "after"), [("qwen3_moe", 2, 1), ("gpt_oss", 1, 2)])
def test_a_run_resumes_with_experts_on_other_ranks(arch, before, after, tmp_path) -> None:
    """Weights and moments are equal bit for bit, then losses and rates; foreach runs on parameters of two meshes."""
    name = _save(tmp_path / "m", arch)
    values = {"optimizer": FOREACH, "scheduler": SCHEDULE, "max_grad_norm": 0.5}
    saved = run_ranks(_train_and_save, before, name, _values(before, packed=False) | values, str(tmp_path))
    loaded = run_ranks(_load_and_go_on, after, name, _values(after, packed=False) | values, str(tmp_path))
    assert [len(part["rates"][0]) for part in (saved[0], loaded[0])] == [before, after], "a group for each mesh"
    assert [set(rates) for rates in saved[0]["rates"]] == [set(rates) for rates in loaded[0]["rates"]]
    for kind in ("weights", "moments"):
        for part in (*saved, *loaded):
            assert part[kind].keys() == saved[0][kind].keys()
            assert all(torch.equal(tensor, saved[0][kind][key]) for key, tensor in part[kind].items())
    for step in (0, 1):
        losses, others = ([part["losses"][step] for part in parts] for parts in (saved, loaded))
        assert sum(loss for loss, _ in others) == pytest.approx(sum(loss for loss, _ in losses), rel=1e-4)
        assert others[0][1] == pytest.approx(losses[0][1], rel=1e-3)
