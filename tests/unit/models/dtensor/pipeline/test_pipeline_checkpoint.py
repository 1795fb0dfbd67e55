"""Save and load pipelines: checkpoints on other meshes, adapters, layers, rewards."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_helpers import CPU, TOLERANCE, Case, difference, microbatches, save_model
from policy_helpers import WeightedNLL, random_batch, run_ranks
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.pipeline.stages import stage_of
from nemo_rl.models.huggingface.folders import peft_key
from nemo_rl.models.huggingface.load import load_scoring_model
from nemo_rl.models.policy.batching import count_valid, shard_batch, training_strategy
from nemo_rl.models.policy.rank_calls import join_layers
from nemo_rl.models.policy.workers.rank import PolicyWorker, UpdateResult
from nemo_rl.models.training.inputs import InputLayout, build_score_inputs
from nemo_rl.weight_sync.exchange import everywhere

ADAMW = ("optimizer", {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-3}})
LORA = ("dtensor_cfg", {"lora_cfg": {"enabled": True, "dim": 4}})
RISING = {"start_factor": 0.1, "end_factor": 1.0, "total_iters": 10}
TRAINED = (ADAMW, ("scheduler", {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": RISING}))
STAGES = Case(values=TRAINED)


def _worker(rank: int, world_size: int, name: str, case: Case) -> PolicyWorker:
    config = case.config(name)
    layout = ParallelLayout.of(config, world_size)
    backend = DTensorBackend(config, CPU, layout, init_reference_model=False)
    return PolicyWorker(backend, config, gives_scores=rank in layout.result_ranks)


def _update(worker: PolicyWorker, rank: int, world_size: int, case: Case, seed: int) -> UpdateResult:
    config = case.config("m")
    batch = random_batch(rows=6, seed=seed)
    sharded = shard_batch(batch, case.dp, training_strategy(config))
    dp_rank = ParallelLayout.of(config, world_size).data_parallel_rank(rank)
    return worker.train(sharded.data[dp_rank], sharded.sizes[dp_rank], WeightedNLL(), count_valid(batch))


def _state(backend: DTensorBackend) -> dict[str, torch.Tensor]:
    """Return the whole optimizer state of the parameters that this rank holds, by known names."""
    assert backend.optimizer is not None
    stage, found = stage_of(backend.model.hf), {}
    for name, parameter in backend.model.hf.named_parameters():
        for key, value in backend.optimizer.state[parameter].items():
            known = stage.known_as(name) if stage is not None else name
            found[f"{known}.{key}"] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    return found


def _saved(rank: int, world_size: int, name: str, case: Case, folder: Path) -> dict[str, Any]:
    worker = _worker(rank, world_size, name, case)
    for seed in (1, 2):
        _update(worker, rank, world_size, case, seed)
    worker.save_checkpoint(str(folder / "weights"), str(folder / "optimizer"))
    return _contents(worker, rank, world_size, case)


def _moved(rank: int, world_size: int, name: str, case: Case, source: Path, target: Path) -> dict[str, Any]:
    """Load, and save immediately on this mesh."""
    worker = _worker(rank, world_size, name, case)
    worker.load_checkpoint(str(source / "weights"), str(source / "optimizer"))
    worker.save_checkpoint(str(target / "weights"), str(target / "optimizer"))
    return _contents(worker, rank, world_size, case)


def _contents(worker: PolicyWorker, rank: int, world_size: int, case: Case) -> dict[str, Any]:
    backend = worker.backend
    assert isinstance(backend, DTensorBackend)
    out: dict[str, Any] = {"weights": {name: tensor.clone() for name, tensor in backend.iterate_weights()}}
    out["state"] = _state(backend)
    out["next"] = _update(worker, rank, world_size, case, seed=3)
    return out


def _joined(ranks: list[dict[str, Any]], key: str) -> dict[str, torch.Tensor]:
    """Join the states of ranks; parameters on several ranks are equal."""
    found: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for name, tensor in rank[key].items():
            assert torch.equal(found.setdefault(name, tensor), tensor), name
    return found


def _require_same(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
    for key in ("weights", "state"):
        one, other = _joined(before, key), _joined(after, key)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert {rank["next"].lr for rank in (*before, *after)} == {before[0]["next"].lr}, "not that of the first step"
    losses = [sum(rank["next"].loss for rank in ranks) for ranks in (before, after)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert after[0]["next"].grad_norm == pytest.approx(before[0]["next"].grad_norm, rel=1e-4)


def test_a_checkpoint_loads_on_other_meshes(tmp_path) -> None:
    """Weights and optimizer state bit for bit, and an equal next update; two stages hold one weight."""
    name = save_model(tmp_path / "m", "qwen3", num_layers=5, tie_word_embeddings=True)
    saved = run_ranks(_saved, 2, name, STAGES, tmp_path / "0")
    written = load_file(tmp_path / "0/weights/model/model-00001-of-00001.safetensors")
    assert written.keys() == saved[0]["weights"].keys()
    assert all(torch.equal(written[key], tensor) for key, tensor in saved[0]["weights"].items())
    meshes = [
        STAGES,
        Case(pp=1, dp=2, values=TRAINED),
        Case(dp=2, virtual=2, values=TRAINED),
        Case(pp=1, values=TRAINED),
    ]
    for number, case in enumerate(meshes):
        source, target = tmp_path / str(number), tmp_path / str(number + 1)
        _require_same(saved, run_ranks(_moved, case.pp * case.dp, name, case, source, target))


def _adapted(rank: int, world_size: int, name: str, case: Case, source: Path | None, target: Path) -> dict[str, Any]:
    worker = _worker(rank, world_size, name, case)
    if source is not None:
        worker.load_checkpoint(str(source / "weights"), str(source / "optimizer"))
    result = _update(worker, rank, world_size, case, seed=1)
    weights = {name: tensor.clone() for name, tensor in worker.iterate_weights()}
    held = worker.backend.held_adapters(torch.float32)
    sent = {name: tensor.clone() for name, tensor in everywhere(held, torch.distributed.group.WORLD)}
    worker.save_checkpoint(str(target / "weights"), str(target / "optimizer"))
    return {"weights": weights, "norm": result.grad_norm, "sent": sent}


def test_adapters_of_all_stages_are_trained_saved_and_sent(tmp_path) -> None:
    name = save_model(tmp_path / "m", "qwen2", num_layers=3)
    sgd = ("optimizer", {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1}})
    whole, stages = (Case(pp=pp, values=(LORA, sgd)) for pp in (1, 2))
    (one,) = run_ranks(_adapted, 1, name, whole, None, tmp_path / "one")
    two = run_ranks(_adapted, 2, name, stages, None, tmp_path / "two")
    for rank in two:
        assert rank["norm"] == pytest.approx(one["norm"], rel=1e-5)
        assert rank["weights"].keys() == one["weights"].keys()
        for key, tensor in one["weights"].items():
            torch.testing.assert_close(rank["weights"][key], tensor, rtol=0, atol=1e-6)
    files = [tmp_path / run / "weights/adapter" for run in ("one", "two")]
    described = [json.loads((folder / "adapter_config.json").read_text()) for folder in files]
    assert described[0] == described[1]
    tensors = [load_file(folder / "adapter_model.safetensors") for folder in files]
    assert tensors[0].keys() == tensors[1].keys()
    for key, tensor in tensors[0].items():
        torch.testing.assert_close(tensors[1][key], tensor, rtol=0, atol=1e-6)
    for written, ranks in zip(tensors, ([one], two), strict=True):
        for rank in ranks:
            assert {peft_key(name) for name in rank["sent"]} == written.keys()
            assert all(torch.equal(written[peft_key(name)], tensor) for name, tensor in rank["sent"].items())
    (one,) = run_ranks(_adapted, 1, name, whole, tmp_path / "two", tmp_path / "one again")
    two = run_ranks(_adapted, 2, name, stages, tmp_path / "one", tmp_path / "two again")
    for key, tensor in one["weights"].items():
        torch.testing.assert_close(two[1]["weights"][key], tensor, rtol=0, atol=1e-6)


def _answers(rank: int, world_size: int, name: str, case: Case) -> dict[str, Any]:
    config = case.config(name)
    layout = ParallelLayout.of(config, world_size)
    worker = PolicyWorker(DTensorBackend(config, CPU, layout), config, gives_scores=rank in layout.result_ranks)
    rows = random_batch(rows=5)
    scored = worker.get_logprobs(rows, [2, 3])
    top = worker.get_topk_logits(rows, [1, 4], k=3)
    layers = worker.layer_outputs([5, 6, 7, 8])
    eval_loss = worker.train(rows, [2, 2, 1], WeightedNLL(), count_valid(rows), eval_mode=True)
    trained = worker.train(rows, [2, 2, 1], WeightedNLL(), count_valid(rows))
    referenced = worker.get_reference_policy_logprobs(rows, [2, 3])
    changed = worker.get_logprobs(rows, [2, 3])
    return {
        "tensors": [scored, *top, referenced, changed],
        "layers": layers,
        "updates": [eval_loss, trained],
        "result_rank": layout.result_ranks,
    }


def test_workers_of_stages_answer_like_a_single_worker(tmp_path) -> None:
    name = save_model(tmp_path / "m", "qwen3", num_layers=5)
    (one,) = run_ranks(_answers, 1, name, Case(pp=1))
    ranks = run_ranks(_answers, 2, name, Case(virtual=2))
    first, last = ranks
    assert last["result_rank"] == [1]
    for ours, want in zip(last["tensors"], one["tensors"], strict=True):
        torch.testing.assert_close(ours, want, rtol=0, atol=1e-4)
    assert all(tensor.numel() == 0 for tensor in first["tensors"]), "only the last stage gives scores"
    assert torch.equal(last["tensors"][0], last["tensors"][3]), "the reference weights came back, stage by stage"
    assert not torch.equal(last["tensors"][3], last["tensors"][4])
    for ours, want, idle in zip(last["updates"], one["updates"], first["updates"], strict=True):
        assert ours.loss == pytest.approx(want.loss, rel=1e-5)
        assert ours.metrics == pytest.approx(want.metrics, rel=1e-5)
        assert idle.loss == 0 and not idle.metrics
        assert ours.grad_norm == idle.grad_norm == pytest.approx(want.grad_norm, rel=1e-5)
        assert ours.lr == idle.lr == want.lr
    names, outputs = join_layers([rank["layers"] for rank in ranks])
    assert names == one["layers"][0] == [f"model.layers.{number}" for number in range(5)]
    for ours, want in zip(outputs, one["layers"][1], strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-5)


def _rewards(rank: int, world_size: int, name: str, case: Case) -> dict[str, Any]:
    config = case.config(name)
    backend = DTensorBackend(config, CPU, ParallelLayout.of(config, world_size), init_reference_model=False)
    rows = microbatches(0, 3)
    inputs = [build_score_inputs(each, InputLayout(packed=case.packed), CPU) for each in rows]
    scores: list[torch.Tensor] = []

    def step(index: int, scores_K: torch.Tensor, zeros_K: torch.Tensor) -> torch.Tensor:
        scores.append(scores_K.detach())
        return scores_K.square().sum()

    backend.run(inputs, step, backward=True)
    grads = {key: p.grad for key, p in backend.model.hf.named_parameters() if p.grad is not None}
    return {"scores": scores, "grads": grads}


@pytest.mark.parametrize("packed", [False, True])
def test_reward_models_are_divided_into_stages_too(packed, tmp_path) -> None:
    name = save_model(tmp_path / "m", "qwen3", num_layers=3)
    case = Case(packed=packed, values=(("reward_model_cfg", {"enabled": True}),))
    first, last = run_ranks(_rewards, 2, name, case)
    hf = load_scoring_model(name)
    for rows, ours in zip(microbatches(0, 3), last["scores"], strict=True):
        for row, length in enumerate(rows["input_lengths"].tolist()):
            score = hf(input_ids=rows["input_ids"][row : row + 1, :length], use_cache=False).logits[0, 0]
            assert ours[row].item() == pytest.approx(score.item(), rel=1e-5, abs=1e-6)
            score.square().backward()
    grads = first["grads"] | last["grads"]
    for key, parameter in hf.named_parameters():
        assert parameter.grad is not None
        assert difference(grads[key], parameter.grad) < TOLERANCE, key
