"""Layers for multi-token prediction: loss, gradients and weights against transformers' layers in float64."""

import logging
import re
from pathlib import Path
from typing import Any

import mesh_parity
import pytest
import torch
from mtp_cases import Losses, mtp_model, reference
from mtp_models import WithMTP
from rank_backend import exported, policy_of
from rank_host import Host, limit_waits, needs_megatron
from safetensors.torch import load_file, save_file
from small_models import hf_config, saved
from witness import largest_gradient_difference

from nemo_rl.models.huggingface.tensor_files import TensorFiles, weight_files
from nemo_rl.models.megatron.checkpoints.folder import hub_tensors_of, write_model
from nemo_rl.models.megatron.conversion.rules import rules_for
from nemo_rl.models.megatron.conversion.sources import sources
from nemo_rl.models.megatron.model.model_check import check_mtp
from nemo_rl.models.training.interfaces import CheckpointPaths
from nemo_rl.utils.errors import CheckpointError

pytestmark = needs_megatron

FACTOR = 0.5
TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CASES: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "one rank": (1, False, {"mtp_num_layers": 1}),
    "two depths, packed and recomputed": (1, True, {"mtp_num_layers": 2, "activation_checkpointing": True}),
    "one layer for two depths": (1, False, {"mtp_num_layers": 2, "mtp_use_repeated_layer": True}),
    "detached": (1, True, {"mtp_num_layers": 1, "mtp_detach_heads": True}),
    "two data-parallel ranks": (2, True, {"mtp_num_layers": 2}),
    "tp and sp": (2, False, TP | {"mtp_num_layers": 1}),
    "tp and sp, packed": (2, True, TP | {"mtp_num_layers": 2}),
    "experts divided": (2, False, {"mtp_num_layers": 1, "expert_model_parallel_size": 2}),
    "stages": (2, True, {"mtp_num_layers": 2, "pipeline_model_parallel_size": 2}),
    "interleaved stages": (
        2,
        False,
        {"mtp_num_layers": 1, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    ),
    "glm4_moe": (2, True, TP | {"mtp_num_layers": 2, "model": "glm4_moe"}),
    "glm4_moe_lite": (1, True, {"mtp_num_layers": 1, "model": "glm4_moe_lite"}),
    "qwen3_next": (1, True, {"mtp_num_layers": 1, "model": "qwen3_next"}),
    "qwen3_next, repeated, stages": (
        2,
        False,
        {
            "mtp_num_layers": 2,
            "mtp_use_repeated_layer": True,
            "pipeline_model_parallel_size": 2,
            "model": "qwen3_next",
        },
    ),
    "qwen3_5_text, tp and sp": (2, True, TP | {"mtp_num_layers": 1, "model": "qwen3_5_text"}),
    "qwen3_5_moe_text, cp": (2, True, {"mtp_num_layers": 1, "context_parallel_size": 2, "model": "qwen3_5_moe_text"}),
    "nemotron_h": (1, True, {"mtp_num_layers": 1, "model": "nemotron_h"}),
    "nemotron_h, tp and sp": (2, False, TP | {"mtp_num_layers": 1, "model": "nemotron_h"}),
    "nemotron_h, stages": (2, True, {"mtp_num_layers": 1, "pipeline_model_parallel_size": 2, "model": "nemotron_h"}),
    "cp": (2, False, {"mtp_num_layers": 2, "context_parallel_size": 2}),
    "cp, packed": (2, True, {"mtp_num_layers": 1, "context_parallel_size": 2}),
}


def kind_of(values: dict[str, Any]) -> tuple[int, bool, bool, str]:
    repeated, detached = "mtp_use_repeated_layer" in values, "mtp_detach_heads" in values
    return values["mtp_num_layers"], repeated, detached, values.get("model", "deepseek_v3")


def on_rank(rank: int, world: int, references: dict[Any, Losses]) -> dict[str, dict[str, float]]:
    limit_waits(60.0)
    return {
        name: differences(packed, values, references[kind_of(values)])
        for name, (ranks, packed, values) in CASES.items()
        if ranks == world
    }


def differences(packed: bool, values: dict[str, Any], want: Losses) -> dict[str, float]:
    num_depths, repeated, _, kind = kind_of(values)
    model = mtp_model(1 if repeated else num_depths, kind=kind)
    keys = {key: value for key, value in values.items() if key != "model"}
    trainer = mesh_parity.Trainer(model, keys | {"mtp_loss_scaling_factor": FACTOR})
    loss, _ = trainer.train(mesh_parity.batch(0), packed)
    metrics = trainer.backend.update_metrics()
    agreement = [value for name, value in metrics.items() if name.startswith("mtp_agreement")]
    gradients, _ = largest_gradient_difference(trainer.backend.chunks, want.gradients)
    return {
        "policy": abs(loss / want.policy - 1),
        "mtp": abs(metrics["mtp_loss"] / want.mtp - 1),
        "agreement": max(abs(a - b) for a, b in zip(agreement, want.agreement, strict=True)),
        "gradients": gradients,
    }


@pytest.fixture(scope="module")
def found(host: Host) -> dict[str, dict[str, float]]:
    kinds = {kind_of(values) for _, _, values in CASES.values()}
    references = {
        (depths, repeated, detached, kind): reference(depths, FACTOR, repeated=repeated, detached=detached, kind=kind)
        for depths, repeated, detached, kind in kinds
    }
    return mesh_parity.of_one_and_two_ranks(host, on_rank, references)


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_transformers_layers(case: str, found) -> None:
    got = found[case]
    assert got["policy"] < 1e-5 and got["mtp"] < 1e-5 and got["agreement"] < 1e-9 and got["gradients"] < 1e-4, got


def own_names(model: WithMTP) -> dict[str, torch.Tensor]:
    return model.hub_tensors(model.state_dict(), copies=False)


def sent_and_kept(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Load the layers, send them, train with and without them, and write them."""
    model, found = mtp_model(2), {}
    keys = {"mtp_num_layers": 2, "pipeline_model_parallel_size": world}
    want = own_names(model)

    def trained(**values: Any) -> dict[str, torch.Tensor]:
        trainer = mesh_parity.Trainer(model, values | {"pipeline_model_parallel_size": world})
        for step in range(2):
            trainer.train(mesh_parity.batch(step), packed=True)
            metrics = trainer.backend.update_metrics()
            found["has metrics"] = "mtp_loss" in metrics
            assert trainer.backend.clip_and_step()[1]
        backend = trainer.backend
        if values.get("mtp_loss_scaling_factor") == 1.0:
            paths = CheckpointPaths(folder / "weights", folder / "optimizer")
            backend.save(paths)
            found["written"] = {name: value for name, value, _ in hub_tensors_of(paths.weights, model.config)}
        return {name: value.clone() for name, value in exported(backend.chunks, model.config)}

    kept = trained(**keys)
    found["kept"] = all(torch.equal(kept[name], want[name]) for name in want) and not found["has metrics"]
    without = trained()
    found["policy kept"] = without.keys() == kept.keys() - want.keys() and equal(without, kept, without)
    detached = trained(**keys, mtp_loss_scaling_factor=5.0, mtp_detach_heads=True)
    found["policy detached"] = equal(without, detached, without)
    learned = trained(**keys, mtp_loss_scaling_factor=1.0)
    found["moved"] = not any(torch.equal(learned[name], want[name]) for name in want if not name.endswith("bias"))
    found["written"] = learned.keys() == found["written"].keys() and equal(learned, found["written"], learned)
    return found


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], names: Any) -> bool:
    return all(torch.equal(a[name], b[name]) for name in names)


@pytest.mark.parametrize("stages", [1, 2])
def test_layers_are_sent_and_written_and_change_the_policy_only_if_asked(host: Host, tmp_path: Path, stages) -> None:
    for found in host.run(sent_and_kept, stages, tmp_path):
        assert found.pop("has metrics")
        assert all(found.values()), found


def test_a_written_model_has_the_names_of_the_hub(host: Host, tmp_path: Path) -> None:
    host.run(sent_and_kept, 1, tmp_path)
    mtp_model(2).config.save_pretrained(tmp_path / "weights")
    write_model(tmp_path / "weights", tmp_path / "hub", None)
    names = {name for file in (tmp_path / "hub").glob("*.safetensors") for name in load_file(file)}
    with saved(mtp_model(2)) as folder:
        hub = {name for file in folder.glob("*.safetensors") for name in load_file(file)}
    copies = {name for name in hub if re.search(r"layers\.[45]\.(embed_tokens|shared_head\.head)", name)}
    assert len(copies) == 4 and names == hub - copies


def test_a_layer_with_a_head_of_its_own_is_refused(tmp_path: Path, caplog) -> None:
    model = mtp_model(1)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model-00002-of-00002.safetensors")
    rules = rules_for(model.config, num_mtp_layers=1)
    assert len(sources(rules, TensorFiles(weight_files(tmp_path)), tmp_path)) == len(rules.by_parameter)
    with caplog.at_level(logging.WARNING):
        sources(rules_for(model.config), TensorFiles(weight_files(tmp_path)), tmp_path)
    assert "layers for multi-token prediction are left out" in caplog.text and "mtp_num_layers" in caplog.text
    tensors["model.layers.4.shared_head.head.weight"] *= 2
    save_file(tensors, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="shared_head.head.weight is not equal to lm_head.weight"):
        sources(rules, TensorFiles(weight_files(tmp_path)), tmp_path)


@pytest.mark.parametrize(
    ("family", "fields", "keys", "message"),
    [
        ("deepseek_v3", {"num_nextn_predict_layers": 2}, {"mtp_num_layers": 2}, None),
        ("deepseek_v3", {"num_nextn_predict_layers": 1}, {"mtp_num_layers": 3, "mtp_use_repeated_layer": True}, None),
        ("deepseek_v3", {"num_nextn_predict_layers": 1}, {"mtp_num_layers": 2}, "has 1 such layers.*at most 1, or"),
        ("deepseek_v3", {"num_nextn_predict_layers": 0}, {"mtp_num_layers": 1}, "has 0 such layers.*at most 0[.]"),
        (
            "llama",
            {},
            {"mtp_num_layers": 1},
            "llama models have no such layers that can be trained .deepseek_v3, glm4_moe, ",
        ),
        (
            "deepseek_v3",
            {"num_nextn_predict_layers": 1, "first_k_dense_replace": 3},
            {"mtp_num_layers": 1},
            "no other layer has",
        ),
        (
            "deepseek_v3",
            {"num_nextn_predict_layers": 1},
            {"mtp_num_layers": 1, "peft": {"enabled": True}},
            "peft.enabled=true is not built",
        ),
    ],
)
def test_models_without_such_layers_are_refused(family, fields, keys, message) -> None:
    found = list(check_mtp("policy", policy_of(**keys), hf_config(family, **fields)))
    assert len(found) == (message is not None)
    assert message is None or re.search(message, found[0]), found
