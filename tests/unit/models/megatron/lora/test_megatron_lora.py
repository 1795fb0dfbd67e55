"""LoRA with Megatron Core: PEFT on the Hugging Face model is the reference, on every mesh."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_cases import STEPS, Policy, logits_in_peft, model, paths_in, run_case, train_reference
from rank_host import needs_megatron
from torch import Tensor

from nemo_rl.models.megatron.checkpoints import folder as checkpoint_folder
from nemo_rl.models.megatron.checkpoints.folder import SavedTensors
from nemo_rl.utils.errors import CheckpointError, ConfigError, WeightSyncError

pytestmark = [needs_megatron, pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")]

TP: dict[str, Any] = {"tp": 2}
SP: dict[str, Any] = {**TP, "sp": True}
PP: dict[str, Any] = {"pp": 2}
DISTRIBUTED: dict[str, Any] = {
    "optimizer": {"use_distributed_optimizer": True},
    "distributed_data_parallel_config": {"overlap_grad_reduce": True, "overlap_param_gather": True},
}
MESHES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp": ("llama", TP),
    "tp sp": ("llama", SP),
    "pp": ("llama", PP),
    "pp tied": ("qwen2", PP),
    "pp vpp": ("llama", {**PP, "vpp": 2}),
    "cp": ("llama", {"cp": 2}),
    "dp overlap": ("qwen2", DISTRIBUTED),
    "latent tp sp": ("deepseek_v3", SP),
    "delta net tp sp": ("qwen3_next", SP),
    "delta net cp": ("qwen3_next", {"cp": 2}),
    "mamba tp sp": ("nemotron_h", SP),
    "norm after tp sp": ("gemma3_text", SP),
    "recomputed tp sp": ("llama", {**SP, "activation_checkpointing": True}),
}
WITH_STATES = ("qwen3_next", "nemotron_h")
KINDS = ("llama", "qwen2", "gemma3_text", "deepseek_v3", "qwen3_next", "nemotron_h")


def references(rank: int, world: int) -> dict[str, Any]:
    return {kind: train_reference(kind) for kind in KINDS}


def in_peft(rank: int, world: int, folder: Path) -> dict[str, Tensor]:
    """Return the logits of the saved adapters, loaded by PEFT."""
    return {kind: logits_in_peft(folder / kind, folder / f"saved {kind}" / "policy/weights/adapter") for kind in KINDS}


def on_one_rank(rank: int, world: int, folder: Path, trained: dict[str, Any]) -> dict[str, Any]:
    found = {kind: run_case(kind, folder / kind, {}, trained[kind], folder / f"saved {kind}") for kind in KINDS}
    return {**found, "initial": initial(folder, {}), "refusals": refusals(folder), "half": half_precision(folder)}


def on_two_ranks(rank: int, world: int, folder: Path, trained: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: run_case(kind, folder / kind, values, trained[kind]) for name, (kind, values) in MESHES.items()
    }
    found["unsummed"] = unsummed(folder, trained["llama"])
    found["initial tp"], found["initial pp"] = initial(folder, SP), initial(folder, PP)
    found["resumed"] = resumed(folder)
    found["resharded"] = {kind: resharded(folder, kind) for kind in WITH_STATES}
    found["some stages"] = [some_stages(folder, f"*.layers.{layer}.*") for layer in (0, 3)]
    found["dropout"] = [dropout(folder, values, position) for values in (TP, SP) for position in ("pre", "post")]
    return found


def initial(folder: Path, values: dict[str, Any]) -> dict[str, Tensor]:
    """Return the initial values, whole, under the hub's names."""
    from nemo_rl.models.megatron.conversion.rules import rules_for
    from nemo_rl.models.megatron.lora import _hub_adapters

    policy = Policy("llama", folder / "llama", values)
    found = _hub_adapters(policy.backend.chunks, rules_for(policy.hf_config), policy.backend._adapted)
    return {name: tensor.clone() for name, tensor in found.items()}


def unsummed(folder: Path, trained: Any) -> dict[str, float]:
    """Return the errors of gradients if one kind of sum is left out."""
    from nemo_rl.models.megatron import lora

    found = {}
    policy = Policy("llama", folder / "llama", SP)
    policy.fill(trained.first)
    for parameter in policy.parameters().values():
        parameter.sequence_parallel = False  # type: ignore[attr-defined]
    policy.accumulate(0)
    found["sequence_parallel"] = policy.difference(policy.gradients(), trained.gradients)
    kept = lora.copy_to_tensor_model_parallel_region
    lora.copy_to_tensor_model_parallel_region = lambda thin, group: thin  # type: ignore[assignment]
    policy = Policy("llama", folder / "llama", TP)
    policy.fill(trained.first)
    policy.accumulate(0)
    found["copy_to_tensor_model_parallel_region"] = policy.difference(policy.gradients(), trained.gradients)
    lora.copy_to_tensor_model_parallel_region = kept
    return found


def resumed(folder: Path) -> dict[str, Any]:
    """Run two updates, save, run one more; run the last one again from the checkpoint, also on another mesh."""
    values = {**SP, **DISTRIBUTED}
    policy = Policy("llama", folder / "llama", values)
    for step in range(2):
        policy.update(step)
    policy.backend.stage_save(paths_in(folder / "resumed"))()
    norm, ended = policy.update(2), policy.weights()
    again = Policy("llama", folder / "llama", values)
    again.update(5)
    again.backend.load(paths_in(folder / "resumed"))
    norms, weights = [norm, again.update(2)], again.weights()
    other = Policy("llama", folder / "llama", PP)
    other.backend.load(paths_in(folder / "resumed"))
    other.backend.save(paths_in(folder / "copy"))
    norms.append(other.update(2))
    return {
        "norms": norms,
        "differ": [name for name in ended if not torch.equal(ended[name], weights[name])],
        "moved": sum(not torch.equal(ended[name], tensor) for name, tensor in model("llama").state_dict().items()),
    }


def resharded(folder: Path, kind: str) -> list[float]:
    """Return the norm of an update on tensor-parallel ranks, and that of the same update on two stages."""
    policy = Policy(kind, folder / kind, SP)
    policy.update(0)
    policy.backend.save(paths_in(folder / f"resharded {kind}"))
    other = Policy(kind, folder / kind, PP)
    other.backend.load(paths_in(folder / f"resharded {kind}"))
    return [each.update(1) for each in (policy, other)]


def some_stages(folder: Path, pattern: str) -> list[float]:
    """Return the norms of two updates where only one stage has adapters."""
    policy = Policy("llama", folder / "llama", {**PP, "peft": {"target_modules": [pattern]}})
    norms = [policy.update(step) for step in range(2)]
    return norms


def dropout(folder: Path, values: dict[str, Any], position: str) -> dict[str, Any]:
    """Return adapters after updates with dropout, those whole on every rank, and whether scores use dropout."""
    policy = Policy("llama", folder / "llama", {**values, "peft": {"dropout": 0.3, "dropout_position": position}})
    for step in range(2):
        policy.update(step)
    first, second = policy.scores(), policy.scores()
    assert first is not None and second is not None
    kept = {name: t.detach().clone() for name, t in policy.parameters().items() if not t.tensor_model_parallel}
    return {"whole": kept, "scores agree": torch.equal(first, second)}


def half_precision(folder: Path) -> dict[str, Any]:
    """Train float32 adapters on a bfloat16 base; return what resumes, and messages if no rank sends weights."""
    values = {"peft": {"lora_dtype": "float32"}, **DISTRIBUTED}
    policy = Policy("llama", folder / "llama", values, precision="bfloat16")
    dtypes = {str(tensor.dtype) for tensor in policy.parameters().values()}
    policy.update(0)
    policy.backend.save(paths_in(folder / "half"))
    policy.update(1)
    again = Policy("llama", folder / "llama", values, precision="bfloat16")
    again.backend.load(paths_in(folder / "half"))
    again.update(1)
    one, other = policy.weights(), again.weights()
    tiny = Policy("llama", folder / "llama", {"optimizer": {"lr": 1e-12, "weight_decay": 0.0}}, precision="bfloat16")
    tiny.update(0)
    return {
        "dtypes": dtypes,
        "differ": [name for name in one if not torch.equal(one[name], other[name])],
        "lost": _said(WeightSyncError, tiny.weights),
    }


def refusals(folder: Path) -> dict[str, str]:
    from nemo_rl.models.megatron.lora import check_adapter, check_adapters_moved
    from nemo_rl.models.training.interfaces import CheckpointPaths

    def made(**peft: Any) -> Policy:
        return Policy("deepseek_v3", folder / "deepseek_v3", {"peft": peft})

    policy = made()
    said = {
        "unmoved": _said(ConfigError, lambda: check_adapters_moved(policy.backend.chunks)),
        "experts": _said(ConfigError, lambda: made(target_modules=["*.local_experts.*.linear_fc1"])),
        "unknown": _said(ConfigError, lambda: made(exclude_modules=["linear_q_proj"])),
        "nothing": _said(ConfigError, lambda: made(exclude_modules=["*"])),
    }
    saved = folder / "saved deepseek_v3" / "policy" / "weights"
    other = policy.backend._peft.model_copy(update={"alpha": 99})
    off = policy.backend._peft.model_copy(update={"enabled": False})
    said["alpha"] = _said(CheckpointError, lambda: check_adapter(saved, other))
    said["off"] = _said(CheckpointError, lambda: check_adapter(saved, off))
    said["without"] = _said(CheckpointError, lambda: policy.backend.load(CheckpointPaths(folder / "deepseek_v3")))
    return said


def _said(kind: type[Exception], act: Any) -> str:
    try:
        act()
    except kind as error:
        return str(error)
    return "nothing"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("lora")
    for kind in KINDS:
        model(kind).save_pretrained(made / kind)
    return made


@pytest.fixture(scope="module")
def trained(host: Any) -> dict[str, Any]:
    found: dict[str, Any] = host.run(references, 1)[0]
    return found


@pytest.fixture(scope="module")
def found(host: Any, folder: Path, trained: dict[str, Any]) -> dict[str, Any]:
    one = host.run(on_one_rank, 1, folder, trained)[0]
    two = host.run(on_two_ranks, 2, folder, trained)
    return {"one": one, "two": two, "peft": host.run(in_peft, 1, folder)[0]}


def _exact(differences: dict[str, float]) -> dict[str, float]:
    """Return the values further off than float32's rounding."""
    return {name: value for name, value in differences.items() if not value < 1e-5}


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_trains_like_peft(found: dict[str, Any], kind: str) -> None:
    assert "gradients" in found["one"][kind] and _exact(found["one"][kind]) == {}


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_trains_like_peft(found: dict[str, Any], mesh: str) -> None:
    for rank in found["two"]:
        assert _exact(rank[mesh]) == {}


@pytest.mark.parametrize("guard", ["sequence_parallel", "copy_to_tensor_model_parallel_region"])
def test_gradients_are_wrong_without_the_sum_over_ranks(found: dict[str, Any], guard: str) -> None:
    assert max(rank["unsummed"][guard] for rank in found["two"]) > 0.05


@pytest.mark.parametrize("mesh", ["initial tp", "initial pp"])
def test_first_values_do_not_depend_on_the_mesh(found: dict[str, Any], mesh: str) -> None:
    wanted = found["one"]["initial"]
    assert len(wanted) == 2 * 4 * 7 and all(t.any() == name.endswith("lora_A") for name, t in wanted.items())
    for rank in found["two"]:
        assert rank[mesh].keys() == wanted.keys()
        assert [name for name in wanted if not torch.equal(rank[mesh][name], wanted[name])] == []


@pytest.mark.parametrize("kind", KINDS)
def test_peft_computes_the_trained_model_from_the_saved_adapter(found: Any, trained: Any, kind: str) -> None:
    wanted = trained[kind].logits
    assert (found["peft"][kind] - wanted).abs().max() / wanted.abs().max() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_without_a_base_model_is_merged(
    found: Any, folder: Path, trained: Any, tmp_path: Path, kind: str
) -> None:
    from safetensors.torch import load_file

    checkpoint_folder.write_model(folder / f"saved {kind}" / "policy/weights", tmp_path / "out", None)
    exported = {name: t for file in (tmp_path / "out").glob("*.safetensors") for name, t in load_file(file).items()}
    merged = {name: tensor for name, tensor in trained[kind].merged.items() if name in exported}
    assert len(merged) > 20
    assert max((exported[name] - tensor).abs().max() / tensor.abs().max() for name, tensor in merged.items()) < 1e-5


def test_a_resumed_run_equals_an_uninterrupted_one(found: dict[str, Any], folder: Path) -> None:
    for rank in found["two"]:
        norm, same_mesh, other_mesh = rank["resumed"]["norms"]
        assert same_mesh == norm and other_mesh == pytest.approx(norm, rel=1e-5)
        assert rank["resumed"]["differ"] == [] and rank["resumed"]["moved"] == 4 * 7
    for part in ("weights/iter_0000000", "optimizer/optim"):
        ours, theirs = (SavedTensors(folder / name / "policy" / part) for name in ("resumed", "copy"))
        assert sorted(ours.names) == sorted(theirs.names)
        assert [name for name in ours.names if not torch.equal(ours.read([name]), theirs.read([name]))] == []


@pytest.mark.parametrize("kind", WITH_STATES)
def test_adapters_of_layers_with_states_resume_on_another_mesh(found: dict[str, Any], kind: str) -> None:
    for rank in found["two"]:
        before, after = rank["resharded"][kind]
        assert after == pytest.approx(before, rel=1e-5)


def test_a_checkpoint_holds_the_state_of_adapters_only(found: dict[str, Any], folder: Path) -> None:
    names = SavedTensors(folder / "resumed/policy/optimizer/optim").names
    assert names and all(".lora_" in name for name in names)


def test_stages_without_adapters_take_part(found: dict[str, Any]) -> None:
    for first, last in zip(*(rank["some stages"] for rank in found["two"]), strict=True):
        assert first == last and min(first) > 0


def test_ranks_that_hold_the_same_activations_draw_the_same_dropout(found: dict[str, Any]) -> None:
    for ours, theirs in zip(*(rank["dropout"] for rank in found["two"]), strict=True):
        assert ours["scores agree"] and len(ours["whole"]) == 4 * 4
        assert [name for name, tensor in ours["whole"].items() if not torch.equal(tensor, theirs["whole"][name])] == []


def test_adapters_have_their_own_dtype(found: dict[str, Any]) -> None:
    assert found["one"]["half"]["dtypes"] == {"torch.float32"} and found["one"]["half"]["differ"] == []


def test_unsupported_adapters_are_refused(found: dict[str, Any]) -> None:
    said = found["one"]["refusals"]
    assert "adapters received no gradient" in said["unmoved"] and "linear_q_down_proj" in said["unmoved"]
    assert "target_modules: '*.local_experts.*.linear_fc1' matches no layer" in said["experts"]
    assert "exclude_modules: 'linear_q_proj' matches no layer" in said["unknown"]
    assert "adapts no layer" in said["nothing"]
    assert "alpha=8, and this run has dim=4 and alpha=99" in said["alpha"]
    assert "written with LoRA. Set policy.megatron_cfg.peft.enabled=true" in said["off"]
    assert "written without LoRA. Set policy.megatron_cfg.peft.enabled=false" in said["without"]
    assert "all weights sent are those of the base model" in found["one"]["half"]["lost"]
    assert STEPS == 3
