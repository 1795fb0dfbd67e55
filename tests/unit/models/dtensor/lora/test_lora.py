"""LoRA: the adapted layer, which parameters train, which weights are sent, and any number of ranks."""

import json

import pytest
import torch
from policy_helpers import (
    WeightedNLL,
    hf_logprobs,
    policy_config,
    process_group,
    random_batch,
    run_ranks,
    save_tiny_model,
    tiny_model,
)
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from nemo_rl.config import LoraConfig
from nemo_rl.models.adapters.lora_linear import SECTION, LoraLinear, adapted_modules, apply_lora
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.policy.batching import count_valid, logprob_strategy, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.models.training.low_rank import adapters_off, select_modules
from nemo_rl.utils.errors import CheckpointError, ConfigError, WeightSyncError
from nemo_rl.weight_sync.exchange import everywhere

CPU = torch.device("cpu")
LORA = {"enabled": True, "dim": 4, "alpha": 8}
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 50, "logprob_mb_tokens": 64}}


def _config(name: str, lora: dict | None = None, **values):
    return policy_config(name, dtensor_cfg={"lora_cfg": LORA if lora is None else lora}, **values)


def _worker(name: str, lora: dict | None = None, seed: int = 0, **values) -> tuple[PolicyWorker, object]:
    config = _config(name, lora, **values)
    return PolicyWorker(DTensorBackend(config, CPU, seed=seed), config), config


def _update(worker: PolicyWorker, config, seed: int, rank: int = 0, world_size: int = 1):
    data = random_batch(rows=6, seed=seed)
    batch = shard_batch(data, world_size, training_strategy(config))
    return worker.train(batch.data[rank], batch.sizes[rank], WeightedNLL(), count_valid(data))


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _layer(bias: bool = True, **values) -> tuple[nn.Linear, LoraLinear]:
    torch.manual_seed(3)
    base = nn.Linear(10, 7, bias=bias, dtype=torch.float64)
    config = LoraConfig.build(enabled=True, dim=3, alpha=12, **values)
    return base, LoraLinear(base, config, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bias", [False, True])
def test_layer_and_its_gradients_equal_the_formula(bias: bool) -> None:
    base, layer = _layer(bias)
    x = torch.randn(2, 5, 10, dtype=torch.float64, requires_grad=True)
    assert torch.equal(layer(x), base(x)), "a new adapter changes nothing"
    assert layer.lora_A.count_nonzero() == 30
    with torch.no_grad():
        layer.lora_B.normal_()
    upstream = torch.randn(2, 5, 7, dtype=torch.float64)
    layer(x).backward(upstream)

    flat_x, flat_up = x.detach().flatten(0, 1), upstream.flatten(0, 1)
    a, b, w = layer.lora_A.detach(), layer.lora_B.detach(), base.weight.detach()
    merged = w + 4.0 * b @ a
    want = flat_x @ merged.T + (base.bias.detach() if bias else 0.0)
    torch.testing.assert_close(layer(x).detach().flatten(0, 1), want)
    torch.testing.assert_close(layer.merged_weight(CPU), merged)
    torch.testing.assert_close(x.grad.flatten(0, 1), flat_up @ merged)
    torch.testing.assert_close(layer.lora_B.grad, 4.0 * flat_up.T @ flat_x @ a.T)
    torch.testing.assert_close(layer.lora_A.grad, 4.0 * b.T @ flat_up.T @ flat_x)
    assert layer.weight.grad is None and base.weight is layer.weight
    layer.active = False
    assert torch.equal(layer(x), base(x))


def test_dropout_acts_at_its_position_and_only_in_training() -> None:
    x = torch.randn(64, 10, dtype=torch.float64)
    for position in ("pre", "post"):
        base, layer = _layer(dropout=0.5, dropout_position=position)
        with torch.no_grad():
            layer.lora_B.normal_()
        full = 4.0 * x @ layer.lora_A.T @ layer.lora_B.T
        layer.eval()
        torch.testing.assert_close(layer(x) - base(x), full)
        layer.train()
        torch.manual_seed(0)
        update = (layer(x) - base(x)).detach()
        torch.manual_seed(0)
        if position == "pre":
            dropped = nn.functional.dropout(x, 0.5)
            torch.testing.assert_close(update, 4.0 * dropped @ layer.lora_A.T @ layer.lora_B.T)
        else:
            share = (update.abs() < 1e-12).double().mean()
            assert 0.35 < share < 0.65
            kept = update.abs() >= 1e-12
            torch.testing.assert_close(update[kept], 2.0 * full[kept])


def test_lora_a_is_initialized_with_the_configured_variance() -> None:
    """Glorot's variance 2 / (in + dim); uniform within 1 / sqrt(in), variance 1 / (3 in)."""
    base = nn.Linear(400, 8)
    draws = {}
    for init in ("xavier", "uniform"):
        config = LoraConfig.build(enabled=True, dim=100, lora_A_init=init)
        draws[init] = LoraLinear(base, config, torch.Generator().manual_seed(1)).lora_A.detach()
    assert draws["xavier"].var().item() == pytest.approx(2 / 500, rel=0.05)
    assert draws["uniform"].var().item() == pytest.approx(1 / 1200, rel=0.05)
    assert draws["uniform"].abs().max() <= 0.05


def test_adapted_layers_are_chosen_by_name() -> None:
    names = [f"model.layers.{i}.{m}" for i in (0, 1) for m in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")]

    def chosen(**values):
        return select_modules(names, LoraConfig.build(enabled=True, **values), SECTION)

    assert chosen() == names
    assert chosen(exclude_modules=["mlp.up_proj"]) == [n for n in names if "up_proj" not in n]
    some = {"match_all_linear": False}
    assert chosen(**some, target_modules=["q_proj"]) == [names[0], names[3]]
    assert chosen(**some, target_modules=["*.layers.1.*"]) == names[3:]
    assert chosen(**some, target_modules=[names[1]]) == [names[1]]
    assert chosen(**some, exclude_modules=["self_attn.q_proj", "*v_proj"]) == [names[2], names[5]]
    with pytest.raises(ConfigError, match=r"target_modules: 'proj' matches no layer.*q_proj, up_proj, v_proj"):
        chosen(**some, target_modules=["proj"])
    with pytest.raises(ConfigError, match="exclude_modules: 'lm_head' matches no layer"):
        chosen(exclude_modules=["lm_head"])
    with pytest.raises(ConfigError, match="adapts no layer"):
        chosen(exclude_modules=["*"])
    with pytest.raises(ConfigError, match="match_all_linear=false needs target_modules"):
        chosen(**some)
    with pytest.raises(ConfigError, match="set match_all_linear=false"):
        chosen(target_modules=["q_proj"])


def test_only_adapters_are_trained_and_initial_values_depend_on_the_seed() -> None:
    def adapted(seed: int):
        hf = tiny_model("qwen3", tie=True)
        names = apply_lora(hf, LoraConfig.build(**LORA), seed)
        return hf, names

    hf, names = adapted(0)
    assert len(names) == 2 * 7 and not any("lm_head" in name for name in names)
    trained = {name for name, p in hf.named_parameters() if p.requires_grad}
    assert trained == {f"{name}.{last}" for name in names for last in ("lora_A", "lora_B")}
    again, other = adapted(0)[0], adapted(1)[0]
    for name, layer in adapted_modules(hf).items():
        assert torch.equal(layer.lora_A, again.get_submodule(name).lora_A)
        assert not torch.equal(layer.lora_A, other.get_submodule(name).lora_A)
    values = [layer.lora_A.flatten()[:4] for layer in adapted_modules(hf).values()]
    assert len({tuple(v.tolist()) for v in values}) == len(values), "each layer draws its own"


def _run(rank: int, world_size: int, name: str, values: dict) -> dict:
    worker, config = _worker(name, **values)
    hf = worker.backend.model.hf
    frozen = {key: _full(p) for key, p in hf.named_parameters() if not p.requires_grad}
    out: dict = {"sharded": isinstance(worker.backend.model, FSDPModule), "updates": []}
    scored = shard_batch(random_batch(rows=6), world_size, logprob_strategy(config))
    rows = scored.data[rank], scored.sizes[rank]
    out["before"] = worker.get_logprobs(*rows)
    step = worker.backend.clip_and_step

    def step_and_keep():
        out["grads"] = {key: _full(p.grad) for key, p in hf.named_parameters() if p.grad is not None}
        return step()

    worker.backend.clip_and_step = step_and_keep
    for seed in (1, 2):
        result = _update(worker, config, seed, rank, world_size)
        out["updates"].append((result.loss, result.grad_norm))
    out["reference"] = worker.get_reference_policy_logprobs(*rows)
    out["after"] = worker.get_logprobs(*rows)
    out["exported"] = {key: _full(tensor) for key, tensor in worker.iterate_weights()}
    out["adapter"] = {key: _full(p) for key, p in hf.named_parameters() if p.requires_grad}
    out["frozen_same"] = all(torch.equal(_full(hf.get_parameter(key)), value) for key, value in frozen.items())
    out["has_state"] = {key for key, p in hf.named_parameters() if p in worker.backend.optimizer.state}
    out["plan"] = scored.plan.shards
    return out


def _in_order(parts: list[dict], key: str) -> torch.Tensor:
    order = [row for rank in parts[0]["plan"] for mb in rank for row in mb]
    rows = torch.cat([part[key] for part in parts])
    return torch.stack([rows[order.index(row)] for row in range(6)])


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_two_ranks_equal_one_and_export_merged_weights(layout, tmp_path) -> None:
    name = save_tiny_model(tmp_path / "m", "qwen2")
    values = (PACKED if layout == "packed" else {}) | {"max_grad_norm": 0.5}
    (one,) = run_ranks(_run, 1, name, values)
    two = run_ranks(_run, 2, name, values)
    base = AutoModelForCausalLM.from_pretrained(name)
    data = random_batch(rows=6)

    assert not one["sharded"] and all(part["sharded"] for part in two)
    for key in ("before", "reference", "after"):
        torch.testing.assert_close(_in_order(two, key), _in_order([one], key), rtol=0, atol=2e-4)
    torch.testing.assert_close(_in_order([one], "before").double(), hf_logprobs(base, data), rtol=0, atol=1e-4)
    assert torch.equal(_in_order([one], "reference"), _in_order([one], "before")), "the base is the reference"
    assert not torch.allclose(_in_order([one], "after"), _in_order([one], "before"), atol=1e-2)
    for update in range(2):
        assert sum(p["updates"][update][0] for p in two) == pytest.approx(one["updates"][update][0], abs=2e-5)
        assert two[0]["updates"][update][1] == pytest.approx(one["updates"][update][1], rel=1e-4)

    adapter = set(one["adapter"])
    assert adapter and all(key.endswith(("lora_A", "lora_B")) for key in adapter)
    for part in (one, *two):
        assert part["frozen_same"] and set(part["grads"]) == part["has_state"] == adapter
        assert part["exported"].keys() == dict(base.named_parameters()).keys()
    for key, grad in one["grads"].items():
        torch.testing.assert_close(two[0]["grads"][key], grad, rtol=1e-3, atol=1e-4 * grad.abs().max().item())

    for part in (one, *two):
        for key, weight in base.named_parameters():
            owner = key.removesuffix(".weight")
            want = weight.detach().clone()
            if f"{owner}.lora_A" in adapter:
                want += 2.0 * part["adapter"][f"{owner}.lora_B"] @ part["adapter"][f"{owner}.lora_A"]
                assert not torch.equal(want, weight), key
            torch.testing.assert_close(part["exported"][key], want, rtol=0, atol=1e-6)
    base.load_state_dict(one["exported"], strict=False)
    torch.testing.assert_close(_in_order([one], "after").double(), hf_logprobs(base, data), rtol=0, atol=1e-4)


def test_adapters_train_in_bfloat16_with_activation_checkpointing_under_fsdp(tmp_path) -> None:
    name = save_tiny_model(tmp_path / "m", "llama", initializer_range=0.05)
    full = policy_config(name, dtensor_cfg={"lora_cfg": LORA})
    half = policy_config(name, precision="bfloat16", dtensor_cfg={"lora_cfg": LORA, "activation_checkpointing": True})
    results = []
    with process_group():
        for config in (full, half):
            worker = PolicyWorker(DTensorBackend(config, CPU), config)
            results.append([_update(worker, config, seed) for seed in (1, 2)])
    for exact, rounded in zip(*results, strict=True):
        assert rounded.loss == pytest.approx(exact.loss, rel=0.03, abs=0.03)
        assert rounded.grad_norm == pytest.approx(exact.grad_norm, rel=0.1)


def test_an_adapter_that_is_bypassed_stops_the_run(tmp_path) -> None:
    with process_group():
        worker, config = _worker(save_tiny_model(tmp_path / "m"))
        layer = adapted_modules(worker.backend.model.hf)["model.layers.1.mlp.up_proj"]
        layer.active = False
        with pytest.raises(ConfigError, match=r"1 of 14 LoRA adapters received no gradient.*layers\.1\.mlp\.up_proj"):
            _update(worker, config, 1)


def _export_unmerged(rank: int, world_size: int, name: str, dtype: torch.dtype) -> str:
    worker, config = _worker(name)
    list(worker.iterate_weights(dtype))
    _update(worker, config, 1, rank, world_size)
    sent = {key for key, _ in worker.iterate_weights(dtype)}
    LoraLinear.merged_weight = lambda self, device: self.weight.detach()
    with pytest.raises(WeightSyncError, match="all weights sent are those of the base model"):
        for key, _ in worker.iterate_weights(dtype):
            sent.discard(key)
    return ", ".join(sent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_that_is_not_merged_stops_the_sync(dtype, tmp_path) -> None:
    name = save_tiny_model(tmp_path / "m")
    for ranks in (1, 2):
        assert run_ranks(_export_unmerged, ranks, name, dtype) == [""] * ranks


def _held_adapters(rank: int, world_size: int, name: str, dtype: torch.dtype) -> dict[str, bool]:
    worker, config = _worker(name)
    _update(worker, config, 1, rank, world_size)
    expected = {
        f"{layer}.{last}": _full(getattr(module, last)).to(dtype)
        for layer, module in adapted_modules(worker.backend.model.hf).items()
        for last in ("lora_A", "lora_B")
    }
    group = torch.distributed.group.WORLD
    sent = {key: tensor.clone() for key, tensor in everywhere(worker.backend.held_adapters(dtype), group)}
    assert sent.keys() == expected.keys()
    return {key: torch.equal(sent[key], tensor) and bool(tensor.count_nonzero()) for key, tensor in expected.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_send_the_whole_adapter_without_the_base(dtype, tmp_path) -> None:
    name = save_tiny_model(tmp_path / "m", "qwen2")
    for ranks in (1, 2):
        for same in run_ranks(_held_adapters, ranks, name, dtype):
            assert len(same) == 2 * 2 * 7 and all(same.values())


def test_a_layer_that_shares_its_weight_is_refused() -> None:
    hf = tiny_model("qwen2")
    first, second = (layer.mlp for layer in hf.model.layers)
    second.up_proj.weight = first.up_proj.weight
    with pytest.raises(ConfigError, match=r"shared with others: model\.layers\.0\.mlp\.up_proj, model\.layers\.1"):
        apply_lora(hf, LoraConfig.build(**LORA), 0)
    apply_lora(hf, LoraConfig.build(**LORA, exclude_modules=["up_proj"]), 0)


def test_an_update_without_gradient_does_not_stop_the_run(tmp_path) -> None:
    with process_group():
        worker, config = _worker(save_tiny_model(tmp_path / "m"))
        data = random_batch(rows=6)
        data["advantages"] = torch.zeros_like(data["advantages"])
        batch = shard_batch(data, 1, training_strategy(config))
        worker.train(batch.data[0], batch.sizes[0], WeightedNLL(), count_valid(data))
        assert worker.backend._adapters_unproven
        _update(worker, config, 1)
        assert not worker.backend._adapters_unproven


def _snapshot(worker: PolicyWorker) -> dict[str, torch.Tensor]:
    state = {key: _full(p) for key, p in worker.backend.model.hf.named_parameters()}
    for key, parameter in worker.backend.model.hf.named_parameters():
        for field, value in worker.backend.optimizer.state.get(parameter, {}).items():
            state[f"optim.{field}.{key}"] = _full(value)
    return state


def _save(rank: int, world_size: int, name: str, step: str) -> tuple[dict, dict]:
    worker, config = _worker(name)
    for seed in (1, 2):
        _update(worker, config, seed, rank, world_size)
    in_background = world_size == 2
    worker.save_checkpoint(f"{step}/weights", f"{step}/optimizer", background=in_background)
    saved = _snapshot(worker)
    exported = {f"export.{key}": _full(tensor) for key, tensor in worker.iterate_weights()}
    _update(worker, config, 3, rank, world_size)
    worker.finish_checkpoint()
    return saved | exported, _snapshot(worker)


def _resume(rank: int, world_size: int, name: str, step: str) -> tuple[dict, dict]:
    worker, config = _worker(name, seed=9)
    worker.load_checkpoint(f"{step}/weights", f"{step}/optimizer")
    loaded = _snapshot(worker)
    exported = {f"export.{key}": _full(tensor) for key, tensor in worker.iterate_weights()}
    _update(worker, config, 3, rank, world_size)
    return loaded | exported, _snapshot(worker)


@pytest.mark.parametrize(("saving", "resuming"), [(1, 1), (2, 2), (2, 1)])
def test_a_checkpoint_restores_every_bit(saving, resuming, tmp_path) -> None:
    name = save_tiny_model(tmp_path / "m", "qwen3", tie=True)
    step = tmp_path / "step"
    saved, went_on = run_ranks(_save, saving, name, str(step))[0]
    loaded, resumed = run_ranks(_resume, resuming, name, str(step))[0]
    assert saved.keys() == loaded.keys() and went_on.keys() == resumed.keys()
    for key, value in saved.items():
        if key.startswith("export.") and saving != resuming:
            torch.testing.assert_close(loaded[key], value, rtol=0, atol=1e-6)
        else:
            assert torch.equal(loaded[key], value), key
    if saving == resuming:
        assert all(torch.equal(resumed[key], value) for key, value in went_on.items())
    assert not any(key.startswith("optim.") and "lora_" not in key for key in saved)

    merged = AutoModelForCausalLM.from_pretrained(step / "weights/model")
    for key, parameter in merged.named_parameters():
        assert torch.equal(parameter, saved[f"export.{key}"]), key


def test_the_saved_adapter_has_the_peft_format(tmp_path) -> None:
    name = save_tiny_model(tmp_path / "m", "llama")
    lora = {**LORA, "match_all_linear": False, "target_modules": ["q_proj", "down_proj"]}
    with process_group():
        worker, config = _worker(name, lora)
        _update(worker, config, 1)
        worker.save_checkpoint(str(tmp_path / "w"))
    folder = tmp_path / "w/adapter"
    described = json.loads((folder / "adapter_config.json").read_text())
    assert (described["peft_type"], described["r"], described["lora_alpha"]) == ("LORA", 4, 8)
    assert described["base_model_name_or_path"] == name and len(described["target_modules"]) == 4
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == 8
    base = AutoModelForCausalLM.from_pretrained(name)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "w/model")
    for module in described["target_modules"]:
        a, b = (tensors[f"base_model.model.{module}.lora_{x}.weight"] for x in "AB")
        with torch.no_grad():
            base.get_submodule(module).weight += described["lora_alpha"] / described["r"] * b @ a
    for key, parameter in merged.named_parameters():
        torch.testing.assert_close(base.get_parameter(key), parameter, rtol=0, atol=1e-6)


def test_peft_loads_the_adapter_with_the_same_scores(tmp_path) -> None:
    peft = pytest.importorskip("peft")
    name = save_tiny_model(tmp_path / "m", "qwen2")
    data = random_batch(rows=6)
    with process_group():
        worker, config = _worker(name)
        _update(worker, config, 1)
        worker.save_checkpoint(str(tmp_path / "w"))
        scored = shard_batch(data, 1, logprob_strategy(config))
        ours = scored.restore([worker.get_logprobs(scored.data[0], scored.sizes[0])])
    base = AutoModelForCausalLM.from_pretrained(name)
    before = hf_logprobs(base, data)
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "w/adapter"))
    after = hf_logprobs(adapted, data)
    assert not torch.allclose(after, before, atol=1e-2)
    torch.testing.assert_close(ours.double(), after, rtol=0, atol=1e-4)


def test_checkpoints_of_another_kind_or_base_are_refused(tmp_path) -> None:
    name = save_tiny_model(tmp_path / "m")
    with process_group():
        worker, config = _worker(name)
        _update(worker, config, 1)
        worker.save_checkpoint(str(tmp_path / "lora"))
        plain_config = policy_config(name)
        plain = PolicyWorker(DTensorBackend(plain_config, CPU), plain_config)
        plain.save_checkpoint(str(tmp_path / "full"))

        with pytest.raises(CheckpointError, match="was written without LoRA"):
            worker.load_checkpoint(str(tmp_path / "full"))
        with pytest.raises(CheckpointError, match="was written with LoRA"):
            plain.load_checkpoint(str(tmp_path / "lora"))
        wider, _ = _worker(name, {**LORA, "dim": 5})
        with pytest.raises(CheckpointError, match=r"28 tensors differ, for example .*\(4, .*\(5, "):
            wider.load_checkpoint(str(tmp_path / "lora"))
        stronger, _ = _worker(name, {**LORA, "alpha": 64})
        with pytest.raises(CheckpointError, match="is not what .* holds"):
            stronger.load_checkpoint(str(tmp_path / "lora"))
        base = AutoModelForCausalLM.from_pretrained(name)
        with torch.no_grad():
            base.model.layers[0].self_attn.q_proj.weight[3, 4] += 0.5
        base.save_pretrained(tmp_path / "other")
        other, _ = _worker(str(tmp_path / "other"))
        with pytest.raises(CheckpointError, match=r"1 weights differ, the first model\.layers\.0\.self_attn\.q_proj"):
            other.load_checkpoint(str(tmp_path / "lora"))


def test_adapters_are_switched_on_again_after_an_error() -> None:
    hf = tiny_model("qwen2")
    apply_lora(hf, LoraConfig.build(**LORA), 0)
    with pytest.raises(RuntimeError, match="inside"), adapters_off(adapted_modules(hf).values()):
        assert not any(layer.active for layer in adapted_modules(hf).values())
        raise RuntimeError("inside")
    assert all(layer.active for layer in adapted_modules(hf).values())
