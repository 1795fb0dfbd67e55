"""LoRA of reward models: the head is trained as a whole, and files load in transformers and PEFT with equal scores."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from policy_helpers import policy_config, run_ranks, save_tiny_model
from reward_cases import NAMES, REGRESSION, answers, hf_scores, loss_of
from safetensors.torch import load_file
from tiny_models import make_char_tokenizer
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.distributed.parallel_logprobs import initial_head
from nemo_rl.distributed.ranks.placements import whole
from nemo_rl.models.adapters.lora_linear import adapted_modules
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.checkpoints.lora_export import adapter_source, export_merged, verify_merged
from nemo_rl.models.huggingface.load import load_scoring_model
from nemo_rl.models.policy.batching import count_valid, logprob_strategy, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.models.training.interfaces import CheckpointPaths
from nemo_rl.utils.errors import CheckpointError

CPU = torch.device("cpu")
VOCAB = len(make_char_tokenizer())
DATA = answers(vocab=VOCAB)
LORA = {"enabled": True, "dim": 4, "alpha": 8}
MESHES: dict[str, dict[str, Any]] = {
    "data parallel": {},
    "tensor and sequence": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "stages": {"pipeline_parallel_size": 2},
}


def _worker(name: str, world: int, **section: Any) -> tuple[PolicyWorker, Any, ParallelLayout]:
    config = policy_config(name, dtensor_cfg={"lora_cfg": LORA, **section}, reward_model_cfg=REGRESSION)
    layout = ParallelLayout.of(config, world)
    backend = DTensorBackend(config, CPU, layout, init_reference_model=False, seed=6)
    return PolicyWorker(backend, config, gives_scores=dist.get_rank() in layout.result_ranks), config, layout


def _update(worker: PolicyWorker, config: Any, layout: ParallelLayout) -> Any:
    batch = shard_batch(DATA, layout.data_parallel_size, training_strategy(config))
    place = layout.data_parallel_rank(dist.get_rank())
    return worker.train(batch.data[place], batch.sizes[place], loss_of("regression"), count_valid(DATA))


def _scores(worker: PolicyWorker, config: Any, layout: ParallelLayout) -> tuple[Any, Tensor]:
    scored = shard_batch(DATA, layout.data_parallel_size, logprob_strategy(config))
    place = layout.data_parallel_rank(dist.get_rank())
    return scored, worker.score(scored.data[place], scored.sizes[place])


def _state(worker: PolicyWorker) -> dict[str, Tensor]:
    named = dict(worker.backend.model.hf.named_parameters())
    found = {key: whole(parameter.detach()).clone() for key, parameter in named.items()}
    for key, parameter in named.items():
        for field, value in worker.backend.optimizer.state.get(parameter, {}).items():
            found[f"optim.{field}.{key}"] = whole(value).clone()
    return found


def _trained(rank: int, world: int, name: str, step: Path, section: dict[str, Any]) -> dict[str, Any]:
    """Make two updates, save, and make a third one."""
    parts = worker, config, layout = _worker(name, world, **section)
    hf = worker.backend.model.hf
    first = {key: whole(p.detach()).clone() for key, p in hf.named_parameters()}
    trained = {key for key, p in hf.named_parameters() if p.requires_grad}
    norms = [_update(*parts).grad_norm for _ in range(2)]
    worker.backend.save(CheckpointPaths(step / "weights", step / "optimizer"))
    plan, scores = _scores(*parts)
    saved = _state(worker)
    moved = {key for key, tensor in first.items() if not torch.equal(saved[key], tensor)}
    _update(*parts)
    return {
        "first": first,
        "trained": trained,
        "moved": moved,
        "norms": norms,
        "plan": plan,
        "ranks": layout.result_ranks,
        "scores": scores,
        "saved": saved,
        "then": _state(worker),
    }


def _resumed(rank: int, world: int, name: str, step: Path, section: dict[str, Any]) -> dict[str, Any]:
    parts = worker, _, _ = _worker(name, world, **section)
    _update(*parts)
    worker.load_checkpoint(str(step / "weights"), str(step / "optimizer"))
    loaded = _state(worker)
    _update(*parts)
    return {"saved": loaded, "then": _state(worker)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    name = save_tiny_model(tmp_path_factory.mktemp("base") / "m", "qwen2", tie=True, vocab_size=VOCAB)
    make_char_tokenizer().save_pretrained(name)
    return name


@pytest.fixture(scope="module")
def one(base: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    step = tmp_path_factory.mktemp("one") / "step_2"
    return run_ranks(_trained, 1, base, step, {})[0], step


def _in_order(parts: list[dict[str, Any]]) -> Tensor:
    return parts[0]["plan"].restore([parts[rank]["scores"] for rank in parts[0]["ranks"]])


def test_adapters_and_the_whole_head_are_trained(one: tuple[dict[str, Any], Path]) -> None:
    found, _ = one
    adapters = {key for key in found["trained"] if key.endswith(("lora_A", "lora_B"))}
    assert len(adapters) == 2 * 2 * 7 and found["trained"] == adapters | {"score.weight"}
    assert found["moved"] == found["trained"]
    assert torch.equal(found["first"]["score.weight"], initial_head(64, 6, 3))
    assert {key.split(".", 2)[2] for key in found["saved"] if key.startswith("optim.exp_avg.")} == found["trained"]


def test_the_first_gradient_of_the_head_is_that_of_transformers(base: str, one: tuple[dict[str, Any], Path]) -> None:
    """B is zero at first, so the adapted model is the base with the new head. AdamW then moves by its sign."""
    model = load_scoring_model(base, attributes=NAMES, seed=6).double()
    loss, _ = loss_of("regression")(hf_scores(model, DATA), data=DATA, global_valid_seqs=1.0)
    model.zero_grad()
    loss.backward()
    gradient = model.score.weight.grad
    before, lr, decay = one[0]["first"]["score.weight"].double(), 1e-2, 0.01
    after = _after_one_update(base)
    want = before * (1 - lr * decay) - lr * gradient / (gradient.abs() + 1e-8)
    torch.testing.assert_close(after.double(), want, rtol=0, atol=1e-6)


def _after_one_update(base: str) -> Tensor:
    return run_ranks(_head_after_one, 1, base)[0]


def _head_after_one(rank: int, world: int, name: str) -> Tensor:
    parts = worker, _, _ = _worker(name, world)
    _update(*parts)
    return whole(worker.backend.model.hf.score.weight.detach()).clone()


def test_the_merged_folder_is_a_classifier_with_equal_scores(one: tuple[dict[str, Any], Path]) -> None:
    found, step = one
    model = AutoModelForSequenceClassification.from_pretrained(step / "weights/model").eval()
    assert list(model.config.id2label.values()) == NAMES
    assert not any("lora" in name for name, _ in model.named_parameters())
    with torch.no_grad():
        torch.testing.assert_close(hf_scores(model, DATA), _in_order([found]), rtol=0, atol=1e-5)


def test_peft_loads_adapter_and_head_with_equal_scores(base: str, one: tuple[dict[str, Any], Path]) -> None:
    peft = pytest.importorskip("peft")
    found, step = one
    described = json.loads((step / "weights/adapter/adapter_config.json").read_text())
    assert (described["task_type"], described["modules_to_save"]) == ("SEQ_CLS", ["score"])
    assert "base_model.model.score.weight" in load_file(step / "weights/adapter/adapter_model.safetensors")
    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    adapted = peft.PeftModel.from_pretrained(plain, str(step / "weights/adapter")).eval()
    with torch.no_grad():
        torch.testing.assert_close(hf_scores(adapted, DATA), _in_order([found]), rtol=0, atol=1e-5)


def test_the_adapter_is_exported_with_its_head(base: str, one: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    found, step = one
    source = adapter_source(step)
    export_merged(source, tmp_path / "hf")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        torch.testing.assert_close(hf_scores(model, DATA), _in_order([found]), rtol=0, atol=1e-5)
    assert verify_merged(source, tmp_path / "hf").holds_for(None)
    with torch.no_grad():
        model.score.weight.mul_(1.1)
    model.save_pretrained(tmp_path / "hf")
    assert not verify_merged(source, tmp_path / "hf").holds_for(None)


def test_an_adapter_of_peft_is_merged_with_its_head(base: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=["q_proj", "up_proj"], init_lora_weights=False, task_type="SEQ_CLS"
    )
    adapted = peft.get_peft_model(plain, config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    export_merged(adapter_source(tmp_path / "adapter", base), tmp_path / "hf")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        torch.testing.assert_close(hf_scores(merged, DATA), hf_scores(adapted, DATA), rtol=0, atol=1e-4)


def test_a_run_resumes_bit_for_bit(base: str, one: tuple[dict[str, Any], Path]) -> None:
    found, step = one
    (again,) = run_ranks(_resumed, 1, base, step, {})
    for moment in ("saved", "then"):
        assert again[moment].keys() == found[moment].keys()
        assert [key for key, value in found[moment].items() if not torch.equal(again[moment][key], value)] == []


@pytest.mark.parametrize("mesh", MESHES)
def test_two_ranks_train_and_save_as_one(
    mesh: str, base: str, one: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    found, _ = one
    parts = run_ranks(_trained, 2, base, tmp_path / "step", MESHES[mesh])
    assert parts[0]["norms"] == pytest.approx(found["norms"], rel=1e-4)
    torch.testing.assert_close(_in_order(parts), _in_order([found]), rtol=0, atol=2e-4)
    ours, theirs = (
        load_file(folder / "weights/adapter/adapter_model.safetensors") for folder in (one[1], tmp_path / "step")
    )
    assert ours.keys() == theirs.keys()
    (resumed,) = run_ranks(_resumed, 1, base, tmp_path / "step", {})
    for key, tensor in found["saved"].items():
        if not key.startswith("optim."):
            torch.testing.assert_close(resumed["saved"][key], tensor, rtol=0, atol=2e-4)


def _refused(rank: int, world: int, name: str, step: Path) -> str:
    config = policy_config(
        name, dtensor_cfg={"lora_cfg": LORA}, reward_model_cfg={"enabled": True, "attributes": NAMES[:2]}
    )
    backend = DTensorBackend(config, CPU, init_reference_model=False)
    assert len(adapted_modules(backend.model.hf)) == 14
    with pytest.raises(CheckpointError) as refused:
        backend.load(CheckpointPaths(step / "weights"))
    return str(refused.value)


def test_a_head_of_another_size_is_refused(base: str, one: tuple[dict[str, Any], Path]) -> None:
    (message,) = run_ranks(_refused, 1, base, one[1])
    assert "1 tensors differ" in message and "score.weight: (3, 64) in the checkpoint, (2, 64)" in message
