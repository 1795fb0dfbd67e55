"""Meshes divide recurrent layers: results of one process, whole checkpoints, and refusals before any rank starts."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity.compare import difference
from parity.models import VOCABULARY
from parity.ranks import mesh_numbers, on_ranks, policy_config
from parity.reference import one_process
from recurrent_models import RECURRENT, recurrent_model
from safetensors.torch import load_file
from torch import Tensor, nn
from trained_states import assert_equal_states, update, whole_state
from transformers import PreTrainedModel

from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.adapters.lora_linear import apply_lora
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.context_parallel import Chunks, TokenExchange
from nemo_rl.models.dtensor.training_backend import DTensorTraining
from nemo_rl.models.huggingface.mixers import HeadPart, find_mixers
from nemo_rl.models.huggingface.recurrent import CORES, compute_unfused
from nemo_rl.models.huggingface.tensor_plans import plan_for
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.utils.errors import ConfigError

CPU = torch.device("cpu")
TP2, CP2, PP2, EP2 = ({f"{axis}_parallel_size": 2} for axis in ("tensor", "context", "pipeline", "expert"))
TP4 = {"tensor_parallel_size": 4}
SP2 = TP2 | {"sequence_parallel": True}
ULYSSES = CP2 | {"context_parallel_method": "ulysses"}
RECOMPUTED = {"activation_checkpointing": True}
FOUR_HEADS = {"num_key_value_heads": 4}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.set_num_threads(1)


def save_model(model_type: str, folder: Path, **fields: Any) -> str:
    recurrent_model(model_type, vocab_size=VOCABULARY, **fields).save_pretrained(folder)
    return str(folder)


def largest_difference(
    name: str, mesh: dict[str, Any], ranks: int, packed: bool, dtype: torch.dtype = torch.float64
) -> float:
    """Return the largest difference of the ranks in a dtype from transformers in float64 in one process."""
    ours = mesh_numbers(name, mesh, ranks, packed=packed, steps=1, dtype=dtype)
    theirs = one_process(name, 1)
    for mine, other in zip(ours.gradients, theirs.gradients, strict=True):
        missing = {each: zeros for each, zeros in other.items() if each not in mine and not bool(zeros.any())}
        mine.update(missing)  # experts without tokens, and weights that no forward pass uses
    return difference(ours, theirs).largest


@pytest.mark.parametrize(
    ("model_type", "mesh", "ranks", "packed", "fields"),
    [
        ("qwen3_next", SP2, 2, True, {}),
        ("qwen3_next", CP2 | TP2, 4, False, {}),
        ("qwen3_next", PP2 | TP2 | RECOMPUTED, 4, True, {}),
        ("qwen3_5_text", CP2 | RECOMPUTED, 2, True, {}),
        ("qwen3_5_text", TP4, 4, True, FOUR_HEADS),
        ("qwen3_5_moe_text", TP2 | EP2, 2, True, {}),
        ("olmo_hybrid", TP4, 4, True, FOUR_HEADS),
        ("olmo_hybrid", ULYSSES, 2, False, {}),
        ("kimi_linear", SP2, 2, True, {}),
        ("kimi_linear", CP2, 2, True, {}),
        ("nemotron_h", TP4 | RECOMPUTED, 4, True, FOUR_HEADS),
        ("nemotron_h", CP2 | EP2, 4, True, {}),
        ("nemotron_h", PP2 | RECOMPUTED, 2, True, {}),
        ("mamba2", TP4, 4, False, {}),
        ("mamba2", CP2 | SP2, 4, True, {}),
        ("bamba", SP2, 2, True, {"mamba_n_groups": 1}),
        ("bamba", PP2 | RECOMPUTED, 2, True, {}),
        ("granitemoehybrid", SP2, 2, True, {}),
        ("granitemoehybrid", CP2, 2, False, {}),
        (
            "falcon_h1",
            TP4,
            4,
            True,
            FOUR_HEADS | {"mamba_rms_norm": True, "ssm_multipliers": [0.5, 0.7, 1.2, 0.9, 1.4]},
        ),
        ("falcon_h1", PP2 | CP2, 4, True, {}),
        ("zamba2", TP4, 4, True, {"num_key_value_heads": 4}),
        ("zamba", TP2, 2, True, {}),
        ("zamba", CP2, 2, True, {}),
        ("mamba", SP2, 2, True, {}),
        ("falcon_mamba", CP2 | TP2, 4, False, {}),
        ("jamba", SP2, 2, True, {}),
        ("jamba", PP2 | RECOMPUTED, 2, True, {}),
        ("lfm2", SP2, 2, False, {}),
        ("lfm2", ULYSSES, 2, True, {}),
        ("lfm2_moe", PP2 | TP2, 4, True, {}),
    ],
)
def test_each_mesh_equals_one_process(model_type, mesh, ranks, packed, fields, tmp_path) -> None:
    # # Layers that are recomputed leave float64, and float64 unties the layers of Zamba (both only in this test).
    in_float32 = RECOMPUTED.keys() <= mesh.keys() or model_type.startswith("zamba")
    dtype, allowed = (torch.float32, 1e-3) if in_float32 else (torch.float64, 1e-10)
    assert largest_difference(save_model(model_type, tmp_path, **fields), mesh, ranks, packed, dtype) < allowed


def test_heads_of_a_recurrent_layer_divide_among_ranks(tmp_path) -> None:
    assert largest_difference(save_model("mamba2", tmp_path), SP2, 2, True) < 1e-10


def exchanged(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's part of the row, and what it has after `to_heads` and again after `to_tokens`."""
    chunks = Chunks.balanced([0, 3, 16], dist.get_world_size(), dist.get_rank())
    exchange = TokenExchange(chunks, dist.group.WORLD)
    own = chunks.take(x)
    heads = exchange.to_heads(own, tokens=1, heads=-1)
    return heads, exchange.to_tokens(heads, tokens=1, heads=-1), own


def test_ranks_exchange_tokens_for_heads_and_back() -> None:
    x = torch.arange(2 * 16 * 3 * 4.0).view(2, 16, 3, 4)
    for rank, (heads, again, own) in enumerate(on_ranks(exchanged, 2, x)):
        assert torch.equal(heads, x[..., 2 * rank : 2 * rank + 2])
        assert torch.equal(again, own)


def test_a_row_is_not_exchanged_among_ranks_that_do_not_divide_its_heads() -> None:
    exchange = TokenExchange(Chunks.balanced([0, 8], 4, 0), None)
    with pytest.raises(ConfigError, match="4 context-parallel ranks do not divide the 6 heads"):
        exchange.to_heads(torch.zeros(1, 2, 6), tokens=1, heads=2)


def backend_of(name: str, mesh: dict[str, Any], **values: Any) -> tuple[PolicyWorker, Any]:
    config = policy_config(name, mesh, packed=True, **values)
    layout = ParallelLayout.of(config, dist.get_world_size())
    return PolicyWorker(DTensorBackend(config, CPU, layout), config), config


ADAM = {"optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-3}}}


def trained(name: str, step: str, mesh: dict[str, Any]) -> tuple[dict, dict, dict]:
    """Export, train, save and train again; return the first export, the state at the save, and that at the end."""
    worker, config = backend_of(name, mesh, **ADAM)
    exported = {key: tensor.clone() for key, tensor in worker.iterate_weights()}
    update(worker, config, 1)
    worker.save_checkpoint(f"{step}/weights", f"{step}/optimizer")
    saved = whole_state(worker)
    update(worker, config, 2)
    return exported, saved, whole_state(worker)


def resumed(name: str, step: str, mesh: dict[str, Any], *, trains: bool) -> dict:
    worker, config = backend_of(name, mesh, **ADAM)
    worker.load_checkpoint(f"{step}/weights", f"{step}/optimizer")
    if trains:
        update(worker, config, 2)
    return whole_state(worker)


@pytest.mark.parametrize("model_type", ["nemotron_h", "qwen3_next"])
def test_divided_heads_are_saved_exported_and_resumed_as_whole_weights(model_type, tmp_path) -> None:
    name, step = save_model(model_type, tmp_path / "m"), str(tmp_path / "step")
    first, *_ = on_ranks(trained, 2, name, step, TP2)
    exported, saved, end = first
    files = load_file(f"{name}/model.safetensors")
    assert exported.keys() == files.keys()
    assert all(torch.equal(tensor, files[key]) for key, tensor in exported.items())
    again, _ = on_ranks(resumed_and_trained, 2, name, step, TP2)
    assert_equal_states(end, again)
    (alone,) = on_ranks(resumed_alone, 1, name, step, {})
    assert_equal_states(saved, alone)


def resumed_and_trained(name: str, step: str, mesh: dict[str, Any]) -> dict:
    return resumed(name, step, mesh, trains=True)


def resumed_alone(name: str, step: str, mesh: dict[str, Any]) -> dict:
    return resumed(name, step, mesh, trains=False)


@pytest.mark.parametrize(
    ("model_type", "mesh", "ranks"),
    [("nemotron_h", SP2, 2), ("qwen3_next", CP2, 2), ("jamba", TP2, 2), ("bamba", PP2 | TP2, 4)],
)
def test_adapters_of_recurrent_layers_are_proven(model_type, mesh, ranks, tmp_path) -> None:
    adapters = {"lora_cfg": {"enabled": True, "dim": 4, "alpha": 8}}
    policy = policy_config(save_model(model_type, tmp_path), mesh | adapters, packed=True)
    DTensorTraining().check(policy, ranks)


def test_only_layers_that_are_called_get_adapters() -> None:
    model = recurrent_model("mamba")
    config = policy_config("m", {"lora_cfg": {"enabled": True, "dim": 4, "alpha": 8}}, packed=False)
    names = apply_lora(model, config.dtensor_cfg.lora_cfg, seed=0)
    assert {name.rpartition(".")[2] for name in names} == {"in_proj", "x_proj", "out_proj"}


@pytest.mark.parametrize(
    ("mesh", "ranks", "message"),
    [
        (TP4, 4, r"tensor_parallel_size=4 does not divide the 2 heads .*in_proj_qkvz.*2 / 4 = 0.5.*does: 2"),
        (
            {"context_parallel_size": 8},
            8,
            r"context_parallel_size=8 does not divide the 4 heads .*linear_attn.*does: 4",
        ),
        (CP2 | TP2 | {"context_parallel_size": 4}, 8, r"context_parallel_size=4 does not divide the 2 heads .*does: 2"),
    ],
    ids=["tensor", "context", "both"],
)
def test_heads_that_do_not_divide_are_refused_before_any_rank_starts(mesh, ranks, message, tmp_path) -> None:
    name = save_model("qwen3_next", tmp_path, num_attention_heads=8, num_key_value_heads=4)
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        DTensorTraining().check(policy_config(name, mesh, packed=True, max_total_sequence_length=128), ranks)


@pytest.mark.parametrize("model_type", RECURRENT)
def test_every_weight_of_a_recurrent_layer_is_divided_or_of_one_head(model_type: str) -> None:
    """Weights that are not in a plan are norms within a head, and projections to numbers that all heads use."""
    model = recurrent_model(model_type)
    mixers, plan = find_mixers(model), plan_for(model)
    assert mixers
    for name, mixer in mixers.items():
        layer = model.get_submodule(name)
        described = {*mixer.columns, *mixer.norms, *mixer.sums, mixer.out}
        assert all(f"{name}.{each}" in names_of(model) for each in described)
        for key, parameter in layer.named_parameters():
            owner = key.rpartition(".")[0]
            whole = parameter.dim() == 1 or owner in ("g_a_proj", "forget_gate.f_a_proj")
            assert {key, owner} & described or whole, f"{name}.{key}"
        for column, parts in mixer.columns.items():
            weight = getattr(layer.get_submodule(column.rpartition(".")[0]), column.rpartition(".")[2])
            weight = weight.weight if isinstance(weight, nn.Module) else weight
            assert sum(part.size for part in parts) == weight.shape[mixer.axes.get(column, 0)], column
    assert any(style.how == "row" for style in plan.values())


def names_of(model: PreTrainedModel) -> set[str]:
    return {name for name, _ in (*model.named_modules(), *model.named_parameters())}


def test_ranks_have_whole_heads_or_share_a_group() -> None:
    heads, groups = HeadPart(32, 8), HeadPart(32, 2, shared=True)
    assert [heads.own(ranks) for ranks in (1, 2, 4, 8)] == [32, 16, 8, 4]
    assert [groups.own(ranks) for ranks in (1, 2, 4, 8)] == [32, 16, 16, 16]
    assert [heads.divides(ranks) for ranks in (2, 3, 8, 16)] == [True, False, True, False]
    assert [groups.divides(ranks) for ranks in (2, 3, 8, 16)] == [True, False, True, True]


def test_fused_functions_are_off_where_they_would_ignore_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    model = recurrent_model("mamba2").train()
    file = sys.modules[type(model).__module__]

    def fused(*args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("the fused function was called")

    name = next(name for name, core in CORES.items() if core.heads is None and hasattr(file, name))
    monkeypatch.setattr(file, name, fused)
    ids = torch.arange(3, 12)[None]
    with pytest.raises(AssertionError, match="fused function"):
        model(input_ids=ids, use_cache=False)
    compute_unfused(model)
    assert model(input_ids=ids, use_cache=False).logits.isfinite().all()
