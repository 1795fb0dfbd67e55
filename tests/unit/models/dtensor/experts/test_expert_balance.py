"""Statistics of routing against hand counts, the auxiliary loss against transformers, frozen routers."""

import math
from typing import Any

import pytest
import torch
from architectures import random_model
from policy_helpers import policy_config, process_group, random_batch, run_ranks
from test_expert_parallel import CPU, TOLERANCE, _difference, _save, _train_once, _values
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.routers import ExpertBalance, auxiliary_coefficient
from nemo_rl.utils.errors import ConfigError

ROUTED = [[0, 1], [0, 2], [0, 1], [3, 0], [2, 3]]  # experts of five tokens, of which the last one is padding


def _with_loss(values: dict[str, Any], coefficient: float) -> dict[str, Any]:
    return values | {"dtensor_cfg": {**values["dtensor_cfg"], "moe_aux_loss_coeff": coefficient}}


def test_statistics_equal_a_count_by_hand() -> None:
    hf = random_model("qwen3_moe", num_experts=5)
    with process_group():
        balance = ExpertBalance(hf, 0.0, CPU)
        index = torch.tensor(ROUTED)
        experts = [layer.mlp.experts for layer in hf.model.layers]
        real = torch.tensor([[True, True, True, True, False]])
        for part in (slice(0, 2), slice(2, 5)):  # two microbatches
            with balance.watching(real[:, part]):
                for layer in (0, 1):
                    experts[layer](torch.randn(len(index[part]), 64), index[part], torch.ones(len(index[part]), 2))
        experts[0](torch.randn(5, 64), index, torch.ones(5, 2))  # not watched: it is not counted
        metrics = balance.end_update()
        again = balance.end_update()
    # Experts 0 to 4 of each layer get 4, 2, 1, 1 and 0 of 8 pairs.
    entropy = -sum(share * math.log(share) for share in (4 / 8, 2 / 8, 1 / 8, 1 / 8)) / math.log(5)
    assert metrics == pytest.approx(
        {"moe/load_max": 4 / (8 / 5), "moe/unused_experts": 1 / 5, "moe/load_entropy": entropy}
    )
    assert again == {}, "an update starts with empty counts"


def _by_transformers(name: str, arch: str, coefficient: float) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the auxiliary loss of the whole batch and its gradients, by transformers' own function."""
    model: PreTrainedModel = type(random_model(arch)).from_pretrained(name).train()
    data = random_batch(rows=8)
    mask = (torch.arange(data["input_ids"].shape[1])[None] < data["input_lengths"][:, None]).long()
    logits = model(input_ids=data["input_ids"], output_router_logits=True, use_cache=False).router_logits
    loss = coefficient * load_balancing_loss_func(logits, 4, 2, mask)
    loss.backward()
    return loss.item(), {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("arch", "world_size", "ep", "packed", "checkpointed"),
    [("qwen3_moe", 1, 1, False, True), ("qwen3_moe", 2, 2, True, True), ("mixtral", 2, 1, False, False)],
)
def test_auxiliary_loss_is_that_of_transformers_on_the_whole_batch(
    arch, world_size, ep, packed, checkpointed, tmp_path
) -> None:
    """For any split into microbatches and ranks; its gradients are what it adds to those of the loss."""
    name = _save(tmp_path / "m", arch)
    values = _values(ep, packed=packed, activation_checkpointing=checkpointed) | {"max_grad_norm": None}
    coefficient = 50.0
    parts = run_ranks(_train_once, world_size, name, _with_loss(values, coefficient))
    plain = run_ranks(_train_once, world_size, name, values)
    want, want_grads = _by_transformers(name, arch, coefficient)
    for part, without in zip(parts, plain, strict=True):
        assert part["metrics"]["moe/aux_loss"] == pytest.approx(want, rel=TOLERANCE)
        assert part["loss"] == without["loss"], "it is no part of the reported loss"
        assert "moe/aux_loss" not in without["metrics"]
        assert part["metrics"].items() >= without["metrics"].items(), "surveys and recomputed passes do not count"
        for key, grad in want_grads.items():
            assert _difference(part["grads"][key] - without["grads"][key], grad) < 3e-5, key
    assert any(grad.abs().max() > 1e-2 for grad in want_grads.values())


def test_statistics_do_not_depend_on_the_batch_split(tmp_path) -> None:
    name = _save(tmp_path / "m", "gpt_oss")
    (one,) = run_ranks(_train_once, 1, name, _values(1, packed=False) | {"train_micro_batch_size": 8})
    for part in run_ranks(_train_once, 2, name, _values(2, packed=False)):
        assert part["metrics"] == pytest.approx(one["metrics"], rel=1e-12)
    assert one["metrics"]["moe/unused_experts"] == pytest.approx((1 / 4 + 2 / 4) / 2)


def test_the_coefficient_comes_from_the_key_or_from_the_model() -> None:
    qwen = random_model("qwen3_moe", router_aux_loss_coef=0.25)
    assert auxiliary_coefficient(qwen, None) == 0.0
    assert auxiliary_coefficient(qwen, 0.5) == 0.5
    qwen.config.output_router_logits = True
    assert auxiliary_coefficient(qwen, None) == 0.25
    assert auxiliary_coefficient(qwen, 0.0) == 0.0
    for arch in ("deepseek_v3", "qwen2"):
        with pytest.raises(ConfigError, match="transformers defines none for"):
            auxiliary_coefficient(random_model(arch), 0.5)


@pytest.mark.parametrize("arch", ["qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral", "qwen2_moe"])
def test_frozen_routers_do_not_train(arch, tmp_path) -> None:
    name = _save(tmp_path / "m", arch)
    with process_group():
        backend = DTensorBackend(policy_config(name, dtensor_cfg={"freeze_moe_router": True}), CPU)
    frozen = {key for key, parameter in backend.model.hf.named_parameters() if not parameter.requires_grad}
    routers = [key for key, module in backend.model.hf.named_modules() if type(module).__name__.endswith("Router")]
    assert routers and frozen == {
        f"{key}.{own}" for key in routers for own, _ in backend.model.hf.get_submodule(key).named_parameters()
    }
    assert isinstance(backend.optimizer, torch.optim.Optimizer)
    trained = {id(p) for group in backend.optimizer.param_groups for p in group["params"]}
    assert len(trained) == sum(p.requires_grad for p in backend.model.hf.parameters())


def test_freezing_routers_of_a_model_without_them_gives_a_notice(tmp_path, caplog) -> None:
    name = _save(tmp_path / "m", "qwen2")
    with process_group(), caplog.at_level("INFO"):
        DTensorBackend(policy_config(name, dtensor_cfg={"freeze_moe_router": True}), CPU)
    assert "freeze_moe_router has no effect: Qwen2ForCausalLM has no routers" in caplog.text
