"""Two FSDP2 ranks over gloo equal one process: scores, loss, gradients (not only Adam's steps), norm."""

import pytest
import torch
from policy_helpers import (
    WeightedNLL,
    policy_config,
    process_group,
    random_batch,
    run_ranks,
    save_tiny_model,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.distributed.ranks.process_group import device_mesh
from nemo_rl.losses.loss_function import LossType
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.heads import build_causal_lm
from nemo_rl.models.dtensor.mesh import Meshes
from nemo_rl.models.dtensor.optimizer import clip_gradients, total_norm
from nemo_rl.models.dtensor.parallelize import ShardingSpec, shard
from nemo_rl.models.huggingface.load import load_causal_lm
from nemo_rl.models.policy.batching import count_valid, logprob_strategy, shard_batch, training_strategy
from nemo_rl.models.policy.workers.loss_calls import join_updates, reduce_metrics
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.utils.errors import ConfigError

CPU = torch.device("cpu")
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 50, "logprob_mb_tokens": 64}}


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _train_twice(rank: int, world_size: int, name: str, values: dict) -> dict:
    """Return scores, two updates with their gradients, and the weights afterwards, as rank `rank` sees them."""
    config = policy_config(name, **values)
    worker = PolicyWorker(DTensorBackend(config, CPU), config)
    out: dict = {"sharded": isinstance(worker.backend.model, FSDPModule), "updates": []}
    data = random_batch(rows=5)
    scored = shard_batch(data, world_size, logprob_strategy(config))
    out["scores"] = worker.get_logprobs(scored.data[rank], scored.sizes[rank])
    out["plan"] = scored.plan.shards
    step = worker.backend.clip_and_step

    def step_and_keep():
        named = worker.backend.model.hf.named_parameters()
        out["grads"] = {key: _full(p.grad) for key, p in named}
        return step()

    worker.backend.clip_and_step = step_and_keep
    for seed in (1, 2):
        data = random_batch(rows=6, seed=seed)
        batch = shard_batch(data, world_size, training_strategy(config))
        result = worker.train(batch.data[rank], batch.sizes[rank], WeightedNLL(), count_valid(data))
        out["updates"].append((result.loss, result.grad_norm, result.metrics["lp_min"]))
    reference = shard_batch(random_batch(rows=5), world_size, logprob_strategy(config))
    out["reference"] = worker.get_reference_policy_logprobs(reference.data[rank], reference.sizes[rank])
    out["scores_after"] = worker.get_logprobs(scored.data[rank], scored.sizes[rank])
    out["weights"] = {key: tensor.clone() for key, tensor in worker.iterate_weights()}
    return out


def _restore(parts: list[dict], key: str) -> torch.Tensor:
    shards = parts[0]["plan"]
    order = [row for rank in shards for mb in rank for row in mb]
    rows = torch.cat([part[key] for part in parts])
    return torch.stack([rows[order.index(row)] for row in range(5)])


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_two_ranks_equal_one(tie, layout, tmp_path) -> None:
    name = save_tiny_model(tmp_path / "m", "qwen3", tie=tie)
    values = (PACKED if layout == "packed" else {}) | {"max_grad_norm": 0.5}
    (one,) = run_ranks(_train_twice, 1, name, values)
    two = run_ranks(_train_twice, 2, name, values)

    assert not one["sharded"] and all(part["sharded"] for part in two)
    for key in ("scores", "reference", "scores_after"):
        torch.testing.assert_close(_restore(two, key), _restore([one], key), rtol=0, atol=2e-4)
    assert torch.equal(_restore([one], "reference"), _restore([one], "scores"))
    assert torch.equal(_restore(two, "reference"), _restore(two, "scores"))
    assert not torch.allclose(_restore(two, "scores_after"), _restore(two, "scores"), atol=1e-2)
    for update in range(2):
        (loss, norm, lp_min), parts = one["updates"][update], [part["updates"][update] for part in two]
        assert sum(part[0] for part in parts) == pytest.approx(loss, abs=2e-5)
        assert min(part[2] for part in parts) == pytest.approx(lp_min, abs=2e-4)
        for part in parts:
            assert part[1] == pytest.approx(norm, rel=1e-4)
    assert one["updates"][0][1] > 0.5, "clipping must be active"
    assert ("lm_head.weight" in one["weights"]) is not tie
    for key, grad in one["grads"].items():
        for part in two:
            torch.testing.assert_close(part["grads"][key], grad, rtol=1e-3, atol=1e-4 * grad.abs().max().item())
    for key, weight in one["weights"].items():
        torch.testing.assert_close(two[0]["weights"][key], weight, rtol=0, atol=3e-4)
        assert torch.equal(two[0]["weights"][key], two[1]["weights"][key])


def test_the_same_run_repeats_bit_for_bit(tmp_path) -> None:
    name = save_tiny_model(tmp_path / "m", "qwen2")
    first = run_ranks(_train_twice, 2, name, PACKED)
    again = run_ranks(_train_twice, 2, name, PACKED)
    for a, b in zip(first, again, strict=True):
        assert a["updates"] == b["updates"]
        assert all(torch.equal(a["weights"][key], b["weights"][key]) for key in a["weights"])


def _sharded_gradients(rank: int, world_size: int, name: str, dp_replicate: int, dtype, offload) -> dict:
    hf = load_causal_lm(name)
    mesh = Meshes.build(ParallelLayout(dp_replicate=dp_replicate, dp_shard=world_size // dp_replicate), "cpu")
    model = shard(build_causal_lm(hf), mesh, ShardingSpec(dtype, offload, CPU))
    gen = torch.Generator().manual_seed(rank)
    ids = torch.randint(3, 97, (2, 12), generator=gen)
    positions = torch.arange(11)
    logprobs, _ = model({"input_ids": ids}, positions, ids[0, 1:])
    assert logprobs.dtype == torch.float32
    logprobs.sum().backward()
    norm = total_norm([p.grad for p in model.parameters()]).item()
    return {"norm": norm, "grads": {key: _full(p.grad) for key, p in hf.named_parameters()}}


@pytest.mark.parametrize(
    ("world_size", "dp_replicate", "dtype", "offload", "tolerance"),
    [
        (4, 2, torch.float32, False, 1e-4),
        (2, 1, torch.float32, True, 1e-4),
        (2, 1, torch.bfloat16, False, 0.1),
        (1, 1, torch.bfloat16, False, 0.1),
        (3, 1, torch.float32, False, 1e-4),
    ],
)
def test_gradients_are_summed_over_ranks(world_size, dp_replicate, dtype, offload, tolerance, tmp_path) -> None:
    """HSDP, CPU offload, bfloat16 compute and odd numbers of ranks give the sum, not the mean."""
    name = save_tiny_model(tmp_path / "m", "llama", initializer_range=0.05)
    parts = run_ranks(_sharded_gradients, world_size, name, dp_replicate, dtype, offload)
    want: dict[str, torch.Tensor] = {}
    hf = load_causal_lm(name)
    for rank in range(world_size):
        ids = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(rank))
        logp = torch.log_softmax(hf(input_ids=ids).logits[0, :-1], dim=-1)
        logp.gather(-1, ids[0, 1:, None]).sum().backward()
    want = {key: p.grad for key, p in hf.named_parameters()}
    norm = torch.cat([g.flatten() for g in want.values()]).norm().item()
    for part in parts:
        assert part["norm"] == pytest.approx(norm, rel=tolerance)
        for key, grad in want.items():
            error = (part["grads"][key] - grad).norm() / grad.norm()
            assert error < tolerance, key


def test_the_norm_of_a_large_embedding_is_exact() -> None:
    torch.set_num_threads(1)
    gradient = torch.randn(49_152, 576, generator=torch.Generator().manual_seed(0))
    want = sum(rows.double().square().sum().item() for rows in gradient.split(4096)) ** 0.5
    assert total_norm([gradient]).item() == pytest.approx(want, rel=1e-5)


def _mixed_norms(rank: int, world_size: int) -> tuple[float, float, list[torch.Tensor]]:
    row = device_mesh(ParallelLayout(dp_shard=world_size), "cpu")["dp_shard"]
    square = device_mesh(ParallelLayout(dp_replicate=2, dp_shard=world_size // 2), "cpu")["dp_replicate", "dp_shard"]
    gen = torch.Generator().manual_seed(0)
    values = [torch.randn(8, 6, generator=gen) for _ in range(4)]
    placed = [
        distribute_tensor(values[0], row, [Shard(0)]),
        distribute_tensor(values[1], square, [Replicate(), Shard(1)]),
        distribute_tensor(values[2], square, [Shard(0), Shard(1)]),
        values[3].clone(),
    ]
    parameters = []
    for tensor in placed:
        parameter = torch.nn.Parameter(torch.zeros_like(tensor))
        parameter.grad = tensor
        parameters.append(parameter)
    measured = clip_gradients(parameters, None)
    clipped = clip_gradients(parameters, 1.0)
    assert measured == clipped
    return measured, total_norm([p.grad for p in parameters]).item(), [_full(p.grad) for p in parameters]


def test_clipping_combines_meshes() -> None:
    gen = torch.Generator().manual_seed(0)
    values = [torch.randn(8, 6, generator=gen) for _ in range(4)]
    want = torch.cat([v.flatten() for v in values]).norm().item()
    for measured, after, grads in run_ranks(_mixed_norms, 4):
        assert measured == pytest.approx(want, rel=1e-5)
        assert after == pytest.approx(1.0, rel=1e-5)
        for value, grad in zip(values, grads, strict=True):
            torch.testing.assert_close(grad, value / want, rtol=1e-4, atol=1e-6)


def test_replicas_must_divide_the_ranks() -> None:
    backend = {"name": "my.Backend", "dp_replicate_size": 4}
    with pytest.raises(ConfigError, match=r"6 ranks are no multiple of 4 \(dp_replicate_size=4\). .*: 4, 8\."):
        ParallelLayout.of(PolicyConfig.build(model_name="m", training_backend=backend), 6)


def test_an_update_with_a_gradient_that_is_not_finite_is_dropped(tmp_path) -> None:
    class Broken(WeightedNLL):
        def __call__(self, logprobs, **kwargs):
            loss, metrics = super().__call__(logprobs, **kwargs)
            return loss * float("nan"), metrics

    config = policy_config(save_tiny_model(tmp_path / "m"))
    data = random_batch()
    with process_group():
        worker = PolicyWorker(DTensorBackend(config, CPU), config)
        before = {k: t.clone() for k, t in worker.iterate_weights()}
        batch = shard_batch(data, 1, training_strategy(config))
        result = worker.train(batch.data[0], batch.sizes[0], Broken(), count_valid(data))
        assert result.skipped
        assert all(torch.equal(before[k], t) for k, t in worker.iterate_weights())


def test_a_fully_masked_microbatch_changes_nothing(tmp_path) -> None:
    name = save_tiny_model(tmp_path / "m")
    config = policy_config(name, train_micro_batch_size=1)
    data = random_batch(rows=6)
    kept = data.select_indices([0, 2, 3, 4, 5])  # row 1 has sample_mask 0
    assert data["sample_mask"][1] == 0
    weights = []
    for batch in (data, kept):
        with process_group():
            worker = PolicyWorker(DTensorBackend(config, CPU), config)
            sharded = shard_batch(batch, 1, training_strategy(config))
            worker.train(sharded.data[0], sharded.sizes[0], WeightedNLL(), count_valid(batch))
            weights.append({k: t.clone() for k, t in worker.iterate_weights()})
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_metrics_add_up_and_extremes_stay_extremes() -> None:
    parts = [
        {"loss": 1.0, "x_min": 2.0, "x_max": 5.0, "min_y": 3.0, "max_y": 3.0},
        {"loss": torch.tensor(3.0), "x_min": 1.0, "x_max": 4.0, "min_y": 2.0, "max_y": 4.0},
    ]
    assert reduce_metrics(parts) == {"loss": 4.0, "x_min": 1.0, "x_max": 5.0, "min_y": 2.0, "max_y": 4.0}


class SequenceLoss(WeightedNLL):
    loss_type = LossType.SEQUENCE_LEVEL


class SequenceLossWithTokenMetrics(SequenceLoss):
    sequence_means = frozenset({"loss"})


def test_metrics_of_several_updates_equal_those_of_one_batch() -> None:
    common = {"lr": 1e-3, "skipped_updates": 0.0}
    small = common | {"loss": 1.0, "ratio": 1.0, "ratio_min": 0.5, "grad_norm": 2.0, "num_valid_samples": 4.0}
    large = common | {"loss": 4.0, "ratio": 4.0, "ratio_min": 0.2, "grad_norm": 4.0, "num_valid_samples": 8.0}
    small |= {"global_valid_toks": 30.0, "global_valid_seqs": 4.0}
    large |= {"global_valid_toks": 10.0, "global_valid_seqs": 8.0}
    counts = {"global_valid_toks": 40.0, "global_valid_seqs": 12.0, "num_valid_samples": 12.0, "skipped_updates": 0.0}
    joined = join_updates([small, large], WeightedNLL())
    of_tokens, of_sequences = (1 * 30 + 4 * 10) / 40, (1 * 4 + 4 * 8) / 12
    assert joined == counts | {"lr": 1e-3, "ratio_min": 0.2, "grad_norm": 3.0, "loss": of_tokens, "ratio": of_tokens}
    joined = join_updates([small, large], SequenceLoss())
    assert (joined["loss"], joined["ratio"]) == (of_sequences, of_sequences)
    joined = join_updates([small, large], SequenceLossWithTokenMetrics())
    assert (joined["loss"], joined["ratio"]) == (of_sequences, of_tokens)
