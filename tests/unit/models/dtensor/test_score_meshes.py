"""Scores of attributes and steps, packed and padded, on every kind of mesh, against transformers in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import random_model
from critic_cases import kept_gradients
from policy_helpers import policy_config, run_ranks
from reward_cases import NAMES, PROCESS, REGRESSION, answers, classifier, hf_scores, loss_of, reference
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.policy.batching import count_valid, logprob_strategy, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.models.training.interfaces import CheckpointPaths

CPU = torch.device("cpu")
ALLOWED = 1e-5
DATA = answers()
HEADS: dict[str, Any] = {"regression": REGRESSION, "process": PROCESS}
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 80, "logprob_mb_tokens": 64}}
APART = {"sequence_packing": {"enabled": True, "train_mb_tokens": 80, "logprob_mb_tokens": 64, "share_prompts": False}}
PADDED = {"train_micro_batch_size": 2, "logprob_batch_size": 3}
BUDGET = {"dynamic_batching": {"enabled": True, "train_mb_tokens": 80, "logprob_mb_tokens": 64}}
TP, SP = {"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "sequence_parallel": True}
CP, PP = {"context_parallel_size": 2}, {"pipeline_parallel_size": 2}
ALONE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "padded": ({}, PADDED),
    "budget": ({}, BUDGET),
    "packed": ({}, APART),
    "packed, shared prompts": ({}, PACKED),
}
TWO: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "data parallel, shared prompts": ({}, PACKED),
    "tensor, shared prompts": (TP, PACKED),
    "tensor and sequence": (SP, PADDED),
    "context": (CP, PACKED),
    "context, padded": (CP, PADDED),
    "stages": (PP, PACKED),
}
CASES = ALONE | TWO


def made() -> Any:
    return random_model("qwen3", initializer_range=0.1, vocab_size=98, num_hidden_layers=4)


def _worker(folder: str, kind: str, world: int, name: str, **options: Any) -> tuple[PolicyWorker, Any, ParallelLayout]:
    section, rows = CASES[name]
    config = policy_config(folder, dtensor_cfg=section, reward_model_cfg=HEADS[kind], **rows)
    layout = ParallelLayout.of(config, world)
    backend = DTensorBackend(config, CPU, layout, init_reference_model=False, **options)
    return PolicyWorker(backend, config, gives_scores=dist.get_rank() in layout.result_ranks), config, layout


def _on_ranks(rank: int, world: int, folders: dict[str, str], cases: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [_one_case(folders[kind], kind, world, name) for kind, name in cases]


def _one_case(folder: str, kind: str, world: int, name: str) -> dict[str, Any]:
    worker, config, layout = _worker(folder, kind, world, name)
    place, shares = layout.data_parallel_rank(dist.get_rank()), worker.shares_prompts()
    scored = shard_batch(DATA, layout.data_parallel_size, logprob_strategy(config), shares_prompts=shares)
    method = worker.score if kind == "regression" else worker.get_values
    outputs = method(scored.data[place], scored.sizes[place])
    gradients = kept_gradients(worker)
    batch = shard_batch(DATA, layout.data_parallel_size, training_strategy(config), shares_prompts=shares)
    result = worker.train(batch.data[place], batch.sizes[place], loss_of(kind), count_valid(DATA))
    return {
        "outputs": outputs,
        "plan": scored,
        "ranks": layout.result_ranks,
        "loss": result.loss,
        "gradients": gradients,
        "shared": scored.num_shared_tokens,
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("heads")
    for kind in HEADS:
        classifier(made(), NAMES if kind == "regression" else None).save_pretrained(folder / kind)
    return {kind: str(folder / kind) for kind in HEADS}


@pytest.fixture(scope="module")
def wanted() -> dict[str, dict[str, Any]]:
    kinds = {"regression": NAMES, "process": None}
    return {kind: reference(classifier(made(), names), DATA, kind) for kind, names in kinds.items()}


def _differences(parts: list[dict[str, Any]], want: dict[str, Any], kind: str) -> dict[str, float]:
    results = [parts[rank] for rank in parts[0]["ranks"]]
    outputs = parts[0]["plan"].restore([result["outputs"] for result in results]).double()
    if kind == "process":
        outputs = outputs * (DATA["token_mask"] > 0)
    found = {
        "outputs": (outputs - want["outputs"]).abs().max().item(),
        "loss": abs(sum(result["loss"] for result in results) / want["loss"] - 1),
    }
    of_all = {key for part in parts for key in part["gradients"]}
    assert of_all == want["gradients"].keys()
    scale = max(gradient.abs().max() for gradient in want["gradients"].values())
    found["gradients"] = max(
        ((tensor.double() - want["gradients"][key]).abs().max() / scale).item()
        for part in parts
        for key, tensor in part["gradients"].items()
    )
    return found


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(
    ("world", "names"),
    [
        pytest.param(1, list(ALONE), id="one rank"),
        pytest.param(2, ["tensor and sequence", "context", "stages"], id="two ranks"),
        pytest.param(2, list(TWO), id="all meshes", marks=pytest.mark.long),
    ],
)
def test_outputs_and_gradients_do_not_depend_on_layout_and_mesh(
    world: int, names: list[str], kind: str, folders: dict[str, str], wanted: dict[str, dict[str, Any]]
) -> None:
    assert wanted[kind]["outputs"].abs().max() > 0.5
    parts = run_ranks(_on_ranks, world, folders, [(kind, name) for name in names])
    found = {}
    for number, name in enumerate(names):
        of_case = [part[number] for part in parts]
        assert (of_case[0]["shared"] > 0) == ("shared" in name), name
        for what, difference in _differences(of_case, wanted[kind], kind).items():
            found[name, what] = difference
    assert {case: difference for case, difference in found.items() if not difference < ALLOWED} == {}


def _saved(rank: int, world: int, folder: str, kind: str, target: Path) -> None:
    worker, config, _ = _worker(folder, kind, world, "padded", seed=5)
    batch = shard_batch(DATA, 1, training_strategy(config))
    worker.train(batch.data[0], batch.sizes[0], loss_of(kind), count_valid(DATA))
    worker.backend.save(CheckpointPaths(target))
    scored = shard_batch(DATA, 1, logprob_strategy(config))
    method = worker.score if kind == "regression" else worker.get_values
    torch.save(scored.restore([method(scored.data[0], scored.sizes[0])]), target / "outputs.pt")


def test_a_checkpoint_of_several_scores_is_a_classifier_with_their_names(tmp_path: Path) -> None:
    made().save_pretrained(tmp_path / "base")
    run_ranks(_saved, 1, str(tmp_path / "base"), "regression", tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    assert [model.config.id2label[index] for index in range(3)] == NAMES
    assert model.config.label2id == {name: index for index, name in enumerate(NAMES)}
    with torch.no_grad():
        scores = hf_scores(model, DATA)
    torch.testing.assert_close(scores, torch.load(tmp_path / "outputs.pt"), rtol=0, atol=ALLOWED)


def test_a_checkpoint_of_step_scores_is_a_token_classifier(tmp_path: Path) -> None:
    """`AutoModelForTokenClassification` adds a bias of 0, and gives the score after every token."""
    made().save_pretrained(tmp_path / "base")
    run_ranks(_saved, 1, str(tmp_path / "base"), "process", tmp_path)
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "model").eval()
    values = torch.load(tmp_path / "outputs.pt")
    with torch.no_grad():
        logits = model(input_ids=DATA["input_ids"], use_cache=False).logits[:, :-1, 0]
    real = torch.arange(1, DATA["input_ids"].shape[1])[None] < DATA["input_lengths"][:, None]
    assert model.config.num_labels == 1 and not model.score.bias.any()
    torch.testing.assert_close(values[:, 1:][real], logits[real], rtol=0, atol=ALLOWED)
