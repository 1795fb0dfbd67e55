"""Values of tokens and their gradients on every kind of mesh, against Hugging Face prefix by prefix in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import random_model
from critic_cases import SquaredError, critic, critic_batch, hf_values, kept_gradients, reference, relative, save_critic
from policy_helpers import policy_config, run_ranks, save_tiny_model
from torch import Tensor

from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.distributed.parallel_logprobs import initial_head
from nemo_rl.distributed.ranks.placements import whole
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.huggingface.load import load_scoring_model
from nemo_rl.models.policy.batching import count_valid, logprob_strategy, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.models.training.interfaces import CheckpointPaths

CPU = torch.device("cpu")
ALLOWED = 1e-5
EVEN = 98
"""Size of a vocabulary that two ranks can divide."""
DATA = critic_batch()
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 80, "logprob_mb_tokens": 64}}
TP, SP = {"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "sequence_parallel": True}
CP, ULYSSES = {"context_parallel_size": 2}, {"context_parallel_size": 2, "context_parallel_method": "ulysses"}
PP, EP = {"pipeline_parallel_size": 2}, {"expert_parallel_size": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {"num_hidden_layers": 4}),
    "mixture": ("qwen3_moe", {}),
}
CASES: dict[str, tuple[int, str, dict[str, Any], bool]] = {
    "data parallel, shared prompts": (2, "dense", {}, True),
    "tensor": (2, "dense", TP, True),
    "tensor and sequence": (2, "dense", SP, False),
    "context": (2, "dense", CP, True),
    "context, padded": (2, "dense", CP, False),
    "context by heads": (2, "dense", ULYSSES, True),
    "stages": (2, "dense", PP, True),
    "interleaved stages": (2, "dense", PP | {"virtual_pipeline_size": 2}, False),
    "experts": (2, "mixture", EP, True),
    "context, tensor and sequence": (4, "dense", CP | SP, True),
    "stages and tensor": (4, "dense", PP | SP, True),
}
SHARING = ("data parallel, shared prompts", "tensor")
"""Cases whose packed rows share prompts."""
QUICK = ["tensor and sequence", "context", "stages"]
"""Cases of two ranks that every run of the tests takes; the others take minutes on a busy machine."""


def cases_on(ranks: int) -> list[str]:
    return [name for name, case in CASES.items() if case[0] == ranks]


def made(kind: str) -> Any:
    name, fields = MODELS[kind]
    return random_model(name, initializer_range=0.1, vocab_size=EVEN, **fields)


def _worker(name: str, world: int, section: dict[str, Any], packed: bool, **options: Any) -> tuple[PolicyWorker, Any]:
    values: dict[str, Any] = PACKED if packed else {"train_micro_batch_size": 2, "logprob_batch_size": 3}
    config = policy_config(name, dtensor_cfg=section, reward_model_cfg={"enabled": True}, **values)
    layout = ParallelLayout.of(config, world)
    backend = DTensorBackend(config, CPU, layout, init_reference_model=False, **options)
    return PolicyWorker(backend, config, gives_scores=dist.get_rank() in layout.result_ranks), (config, layout)


def _values(worker: PolicyWorker, config: Any, layout: ParallelLayout) -> tuple[Any, Tensor]:
    """Return the plan of the rows, and this rank's values."""
    shares = worker.shares_prompts()
    scored = shard_batch(DATA, layout.data_parallel_size, logprob_strategy(config), shares_prompts=shares)
    place = layout.data_parallel_rank(dist.get_rank())
    return scored, worker.get_values(scored.data[place], scored.sizes[place])


def _update(worker: PolicyWorker, config: Any, layout: ParallelLayout) -> Any:
    shares = worker.shares_prompts()
    batch = shard_batch(DATA, layout.data_parallel_size, training_strategy(config), shares_prompts=shares)
    place = layout.data_parallel_rank(dist.get_rank())
    return worker.train(batch.data[place], batch.sizes[place], SquaredError(), count_valid(DATA))


def _on_ranks(rank: int, world: int, folders: dict[str, str], names: list[str]) -> dict[str, Any]:
    return {name: _one_case(world, folders, name) for name in names}


def _one_case(world: int, folders: dict[str, str], name: str) -> dict[str, Any]:
    _, kind, section, packed = CASES[name]
    worker, (config, layout) = _worker(folders[kind], world, section, packed)
    plan, values = _values(worker, config, layout)
    gradients = kept_gradients(worker)
    result = _update(worker, config, layout)
    shares = worker.shares_prompts()
    return {
        "values": values,
        "plan": plan,
        "layout": layout,
        "result": result,
        "gradients": gradients,
        "shares": shares,
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("critics")
    return {kind: save_critic(folder / kind, made(kind)) for kind in MODELS}


@pytest.mark.parametrize(
    ("world", "names"),
    [
        pytest.param(2, QUICK, id="quick"),
        pytest.param(2, cases_on(2), marks=pytest.mark.long, id="two ranks"),
        pytest.param(
            4, [name for name, case in CASES.items() if case[0] == 4], marks=pytest.mark.long, id="four ranks"
        ),
    ],
)
def test_values_and_gradients_do_not_depend_on_the_mesh(world: int, names: list[str], folders: dict[str, str]) -> None:
    wanted = {kind: reference(critic(made(kind)), DATA) for kind in {CASES[name][1] for name in names}}
    parts = run_ranks(_on_ranks, world, folders, names)
    found = {}
    for name in names:
        want, of_ranks = wanted[CASES[name][1]], [part[name] for part in parts]
        results = [of_ranks[rank] for rank in of_ranks[0]["layout"].result_ranks]
        values = of_ranks[0]["plan"].restore([result["values"] for result in results])
        loss = sum(result["result"].loss for result in results)
        found[name, "values"] = (values.double() - want["values"]).abs().max().item()
        found[name, "loss"] = abs(loss / want["loss"] - 1)
        of_all = {key: tensor for part in of_ranks for key, tensor in part["gradients"].items()}
        assert of_all.keys() == want["gradients"].keys(), name
        found[name, "gradients"] = max(
            relative(tensor, want["gradients"][key]) for part in of_ranks for key, tensor in part["gradients"].items()
        )
        assert of_ranks[0]["shares"] == (name in SHARING), name
    assert {case: difference for case, difference in found.items() if not difference < ALLOWED} == {}


def _new_heads(rank: int, world: int, name: str) -> list[Tensor]:
    heads = []
    for section in ({}, SP, CP):
        worker, _ = _worker(name, world, section, False, init_optimizer=False, seed=11)
        weight = worker.backend.model.hf.get_parameter("score.weight")
        heads.append(whole(weight.detach()).clone())
    return heads


def test_a_new_head_is_the_same_on_every_rank_and_mesh(tmp_path: Path) -> None:
    name = save_tiny_model(tmp_path / "m", "qwen3", tie=True, vocab_size=EVEN)
    for heads in run_ranks(_new_heads, 2, name):
        assert all(torch.equal(head, initial_head(64, 11)) for head in heads)


def _saves(rank: int, world: int, name: str, folder: Path) -> list[Any]:
    """Return the plan of the rows, and their values when the critic is saved and after one more update."""
    worker, (config, layout) = _worker(name, world, {}, True)
    _update(worker, config, layout)
    worker.backend.save(CheckpointPaths(folder / "weights", folder / "optimizer"))
    plan, saved = _values(worker, config, layout)
    _update(worker, config, layout)
    return [plan, saved, _values(worker, config, layout)[1]]


def _resumes(rank: int, world: int, name: str, folder: Path, sections: list[dict[str, Any]]) -> list[Any]:
    """Return for each mesh the plan of the rows, its ranks with values, and the values before and after an update."""
    found = []
    for section in sections:
        worker, (config, layout) = _worker(name, world, section, True, seed=4)
        worker.backend.load(CheckpointPaths(folder / "weights", folder / "optimizer"))
        plan, loaded = _values(worker, config, layout)
        _update(worker, config, layout)
        found.append((plan, layout.result_ranks, loaded, _values(worker, config, layout)[1]))
    return found


def test_a_critic_resumes_on_the_same_mesh_and_on_others(tmp_path: Path) -> None:
    name = save_tiny_model(tmp_path / "m", "qwen3", tie=True, vocab_size=EVEN)
    saved = run_ranks(_saves, 2, name, tmp_path)
    first, after = (saved[0][0].restore([part[place] for part in saved]) for place in (1, 2))
    of_ranks = run_ranks(_resumes, 2, name, tmp_path, [{}, SP, CP, PP])
    for number, (plan, ranks, *_) in enumerate(of_ranks[0]):
        loaded, trained = (plan.restore([of_ranks[rank][number][place] for rank in ranks]) for place in (2, 3))
        if number == 0:
            assert torch.equal(loaded, first) and torch.equal(trained, after)
        torch.testing.assert_close(loaded, first, rtol=0, atol=ALLOWED)
        assert (trained - first).abs().max() > 1e-3
    exported = load_scoring_model(str(tmp_path / "weights/model"))
    assert exported.config.num_labels == 1
    torch.testing.assert_close(hf_values(exported, DATA), first, rtol=0, atol=ALLOWED)
