"""Scores of attributes and steps with Megatron Core, with and without adapters, against transformers and PEFT."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_backend import CPU, backend_from, backend_of, policy_of
from rank_host import Host, needs_megatron
from reward_cases import NAMES, PROCESS, REGRESSION, answers, classifier, hf_scores, loss_of, reference
from small_models import VOCAB, hf_model
from torch import Tensor
from transformers import AutoModelForSequenceClassification
from witness import global_tensors, largest_gradient_difference

from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.distributed.parallel_logprobs import initial_head
from nemo_rl.models.huggingface.load import load_scoring_model
from nemo_rl.models.policy.batching import count_valid
from nemo_rl.models.policy.workers.loss_calls import call_loss, input_builder
from nemo_rl.models.policy.workers.scoring import ScoringWorker
from nemo_rl.models.training.inputs import InputLayout, split_rows
from nemo_rl.models.training.interfaces import CheckpointPaths

pytestmark = needs_megatron

ALLOWED = 1e-5
DATA = answers(vocab=VOCAB)
HEADS: dict[str, Any] = {"regression": REGRESSION, "process": PROCESS}
TP, SP, CP, PP = {"tp": 2}, {"tp": 2, "sp": True}, {"cp": 2}, {"pp": 2}
CASES: dict[str, tuple[int, dict[str, Any], bool]] = {
    "padded": (1, {}, False),
    "packed": (1, {}, True),
    "data parallel": (2, {}, True),
    "tensor": (2, TP, True),
    "tensor and sequence": (2, SP, False),
    "context": (2, CP, True),
    "stages": (2, PP, True),
}


def _model(kind: str) -> Any:
    return classifier(hf_model("llama", num_hidden_layers=4), NAMES if kind == "regression" else None)


def _scores(backend: Any, kind: str, layout: ParallelLayout, *, packed: bool = True) -> tuple[Tensor, slice, bool]:
    """Return this rank's outputs, its rows, and whether it has outputs."""
    share = DATA.size // layout.data_parallel_size
    first = layout.data_parallel_rank(dist.get_rank()) * share
    mine, gives = DATA.slice(first, first + share), dist.get_rank() in layout.result_ranks
    worker = ScoringWorker(backend, InputLayout(packed), gives_scores=gives)
    method = worker.score if kind == "regression" else worker.get_values
    outputs = method(mine, [1, share - 1])
    return outputs, slice(first, first + share), gives


def _accumulate(backend: Any, kind: str, layout: ParallelLayout, *, packed: bool = True) -> float:
    """Run one training pass over this rank's rows, and return the loss of all ranks."""
    share = DATA.size // layout.data_parallel_size
    first = layout.data_parallel_rank(dist.get_rank()) * share
    rows, valid = list(split_rows(DATA.slice(first, first + share), [1, share - 1])), count_valid(DATA)
    loss_fn, losses = loss_of(kind), []
    inputs = [input_builder(loss_fn)(part, InputLayout(packed), CPU) for part in rows]

    def step(index: int, scores: Tensor, zeros: Tensor) -> Tensor:
        loss, _ = call_loss(loss_fn, inputs[index], scores, zeros, rows[index], tuple(map(torch.tensor, valid)))
        losses.append(loss.item())
        return loss + 0.0 * scores.sum()

    backend.run(inputs, step, backward=True)
    gives = dist.get_rank() in layout.result_ranks
    total = torch.tensor(sum(losses) if gives else 0.0, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def _on_ranks(rank: int, world: int, names: list[str], wanted: dict[str, Any]) -> dict[Any, float]:
    found: dict[Any, float] = {}
    for name in names:
        for kind in HEADS:
            found |= {(name, kind, what): value for what, value in _differences(name, kind, wanted[kind]).items()}
    return found


def _differences(name: str, kind: str, want: dict[str, Any]) -> dict[str, float]:
    _, values, packed = CASES[name]
    backend = backend_of(_model(kind), **values, reward_model_cfg=HEADS[kind])
    layout = ParallelLayout.of(policy_of(**values), dist.get_world_size())
    outputs, rows, gives = _scores(backend, kind, layout, packed=packed)
    found = {"outputs": 0.0}
    if gives:
        outputs = outputs if kind == "regression" else outputs * (DATA["token_mask"][rows] > 0)
        found["outputs"] = (outputs - want["outputs"][rows]).abs().max().item()
    found["loss"] = abs(_accumulate(backend, kind, layout, packed=packed) / want["loss"] - 1)
    gradients = global_tensors(_model(kind).config, dict(want["gradients"]))
    found["gradients"], _ = largest_gradient_difference(backend.chunks, gradients)
    return found


@pytest.fixture(scope="module")
def wanted() -> dict[str, dict[str, Any]]:
    return {kind: reference(_model(kind), DATA, kind) for kind in HEADS}


@pytest.mark.parametrize("world", [1, 2])
def test_outputs_and_gradients_do_not_depend_on_layout_and_mesh(
    host: Host, world: int, wanted: dict[str, dict[str, Any]]
) -> None:
    names = [name for name, case in CASES.items() if case[0] == world]
    found: dict[Any, float] = {}
    for rank, differences in enumerate(host.run(_on_ranks, world, names, wanted)):
        found |= {(rank, *case): value for case, value in differences.items()}
    assert {case: value for case, value in found.items() if not value < ALLOWED} == {}


PEFT = {"enabled": True, "dim": 4, "alpha": 8}
MESHES: dict[str, dict[str, Any]] = {"one": {}, "tp sp": SP, "pp": PP, "cp": CP}


def _adapted(folder: Path, values: dict[str, Any]) -> tuple[Any, ParallelLayout]:
    config = policy_of(str(folder), peft=PEFT, reward_model_cfg=REGRESSION, **values)
    return backend_from(config, init_reference_model=False), ParallelLayout.of(config, dist.get_world_size())


def _update(backend: Any, layout: ParallelLayout) -> float:
    _accumulate(backend, "regression", layout)
    norm, stepped = backend.clip_and_step()
    assert stepped
    return float(norm)


def _trained(rank: int, world: int, base: Path, target: Path, meshes: list[str]) -> dict[str, Any]:
    return {name: _on_mesh(base, target / name, MESHES[name]) for name in meshes}


def _on_mesh(base: Path, target: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Make two updates and save, make a third one, and make it again from the checkpoint."""
    paths = CheckpointPaths(target / "policy/weights", target / "policy/optimizer")
    backend, layout = _adapted(base, values)
    before = {name: tensor.clone() for name, tensor in backend.weights_here().items()}
    head = dict(backend.iterate_weights())["score.weight"].clone()
    norms = [_update(backend, layout) for _ in range(2)]
    backend.save(paths)
    outputs, rows, gives = _scores(backend, "regression", layout)
    after = backend.weights_here()
    moved = {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    norms.append(_update(backend, layout))
    ended = {name: tensor.clone() for name, tensor in backend.iterate_weights()}
    again, _ = _adapted(base, values)
    _update(again, layout)
    again.load(paths)
    norms.append(_update(again, layout))
    resumed = {name: tensor.clone() for name, tensor in again.iterate_weights()}
    return {
        "head": head,
        "norms": norms,
        "moved": moved,
        "scores": outputs if gives else None,
        "rows": rows,
        "differ": [name for name in ended if not torch.equal(ended[name], resumed[name])],
    }


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model, whose reward model gets a new head."""
    folder = tmp_path_factory.mktemp("base")
    hf_model("llama", num_hidden_layers=4).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained")


@pytest.fixture(scope="module")
def trained(host: Host, base: Path, target: Path) -> dict[str, list[dict[str, Any]]]:
    """Results of each mesh, by rank."""
    one = host.run(_trained, 1, base, target, ["one"])
    two = host.run(_trained, 2, base, target, [name for name in MESHES if name != "one"])
    return {name: [rank[name] for rank in (one if name == "one" else two)] for name in MESHES}


@pytest.mark.parametrize("mesh", MESHES)
def test_adapters_and_the_whole_head_are_trained_on_every_mesh(trained: dict[str, Any], mesh: str) -> None:
    moved = set().union(*(rank["moved"] for rank in trained[mesh]))
    assert moved and all(name.endswith(("lora_A", "lora_B", "output_layer.weight")) for name in moved)
    assert any(name.endswith("output_layer.weight") for name in moved)
    assert any("lora_B" in name for name in moved)
    for rank in trained[mesh]:
        assert torch.equal(rank["head"], initial_head(64, 0, 3))
        assert rank["differ"] == [] and rank["norms"][2] == rank["norms"][3], "a resumed update has the same bits"
        assert rank["norms"] == pytest.approx(trained["one"][0]["norms"], rel=1e-4)


def test_the_first_norm_is_that_of_head_and_adapters(base: Path, trained: dict[str, Any]) -> None:
    """Adapters start as 0, so the gradient of the head is that of the base; B's follows from the layer's gradient."""
    model = load_scoring_model(str(base), attributes=NAMES).double()
    loss, _ = loss_of("regression")(hf_scores(model, DATA), data=DATA, global_valid_seqs=1.0)
    model.zero_grad()
    loss.backward()
    head = model.score.weight.grad.norm().item()
    norm = trained["one"][0]["norms"][0]
    assert 0.05 * norm < head <= norm


def _whole(ranks: list[dict[str, Any]]) -> Tensor:
    found = torch.zeros(DATA.size, len(NAMES))
    for rank in ranks:
        if rank["scores"] is not None:
            found[rank["rows"]] = rank["scores"]
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_an_export_is_a_classifier_with_equal_scores(trained: dict[str, Any], target: Path, mesh: str) -> None:
    from nemo_rl.models.megatron.checkpoints.folder import write_model

    write_model(target / mesh / "policy/weights", target / mesh / "hf", None)
    model = AutoModelForSequenceClassification.from_pretrained(target / mesh / "hf").eval()
    assert list(model.config.id2label.values()) == NAMES
    with torch.no_grad():
        torch.testing.assert_close(hf_scores(model, DATA), _whole(trained[mesh]), rtol=0, atol=1e-5)


@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.parametrize("mesh", MESHES)
def test_peft_loads_adapter_and_head_with_equal_scores(
    trained: dict[str, Any], base: Path, target: Path, mesh: str
) -> None:
    import peft

    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    adapted = peft.PeftModel.from_pretrained(plain, str(target / mesh / "policy/weights/adapter")).eval()
    with torch.no_grad():
        torch.testing.assert_close(hf_scores(adapted, DATA), _whole(trained[mesh]), rtol=0, atol=1e-5)
