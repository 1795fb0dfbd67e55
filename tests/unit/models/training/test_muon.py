"""Muon and AdamW in one optimizer update as torch's two optimizers do, bit for bit."""

import pytest
import torch
from policy_helpers import policy_config, tiny_model
from torch import nn

from nemo_rl.models.dtensor.optimizer import build_optimizer, build_scheduler, check_optimizer, hidden_matrices
from nemo_rl.models.training.muon import Muon
from nemo_rl.utils.errors import ConfigError

SHAPES = ((8, 24), (24, 8), (16, 16), (24, 8), (8,), (3, 8, 6))
ADAMW = {"lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.02}


def _parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def _groups(parameters: list[nn.Parameter]) -> list[dict]:
    return [
        {"params": [p for p in parameters if p.dim() > 1], "orthogonal": True},
        {"params": [p for p in parameters if p.dim() == 1], "orthogonal": False},
    ]


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"nesterov": False, "momentum": 0.5, "ns_steps": 3, "eps": 1e-3, "ns_coefficients": [2.0, -1.5, 0.5]},
        {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3},
    ],
)
def test_matrices_and_vectors_get_the_bits_of_torch(kwargs) -> None:
    """Each matrix of a stack is a matrix of its own."""
    ours, theirs = _parameters(), _parameters()
    *matrices, vector, stack = theirs
    views = [nn.Parameter(matrix) for matrix in stack.detach()]
    muon = Muon(_groups(ours), lr=0.02, adamw=ADAMW, ns_dtype="bfloat16", **kwargs)
    parts = [torch.optim.Muon([*matrices, *views], lr=0.02, **kwargs), torch.optim.AdamW([vector], **ADAMW)]
    for step in range(4):
        torch.manual_seed(step)
        for mine, its in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            its.grad = mine.grad.clone()
        for view, gradient in zip(views, stack.grad, strict=True):
            view.grad = gradient
        for optimizer in (muon, *parts):
            optimizer.step()
        assert all(torch.equal(mine, its) for mine, its in zip(ours, theirs, strict=True))


def test_float32_steps_approach_orthogonal_matrices() -> None:
    """With coefficients whose iteration converges, the update is U V^T of the gradient's decomposition."""
    parameters = _parameters()
    before = [p.detach().clone() for p in parameters]
    converging = {"ns_dtype": "float32", "ns_steps": 40, "ns_coefficients": (1.875, -1.25, 0.375)}
    muon = Muon(_groups(parameters), lr=1.0, weight_decay=0.0, momentum=0.0, adamw=ADAMW, **converging)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    muon.step()
    for parameter, start in zip(parameters, before, strict=True):
        if parameter.dim() > 1:
            u, _, v = torch.linalg.svd(parameter.grad, full_matrices=False)
            rows, columns = parameter.shape[-2:]
            assert torch.allclose(start - parameter, u @ v * max(1, rows / columns) ** 0.5, atol=1e-4)


@pytest.mark.parametrize(
    ("processor", "dtype"),
    [
        ({"avx2": True}, "float32"),
        ({"avx2": True, "avx512_f": True}, "bfloat16"),
        ({"neon": True, "bf16": True}, "bfloat16"),
    ],
)
def test_steps_are_in_float32_where_bfloat16_has_no_instructions(processor, dtype, monkeypatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: processor)
    chosen = [Muon(_groups(_parameters()), lr=0.02, adamw=ADAMW, **given) for given in ({}, {"ns_dtype": "bfloat16"})]
    assert [group["ns_dtype"] for muon in chosen for group in muon.param_groups if group["orthogonal"]] == [
        dtype,
        "bfloat16",
    ]


def test_a_rate_of_zero_changes_momentum_only() -> None:
    parameters = _parameters()
    before = [p.detach().clone() for p in parameters]
    muon = Muon(_groups(parameters), lr=0.0, adamw={"lr": 0.0})
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    muon.step()
    assert all(torch.equal(p, start) for p, start in zip(parameters, before, strict=True))
    assert all(muon.state[p] for p in parameters)


def _config(kwargs: dict, scheduler: dict | None = None):
    return policy_config("m", optimizer={"name": "torch.optim.Muon", "kwargs": kwargs}, scheduler=scheduler)


LINEAR = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.5, "total_iters": 10}}
ONE_CYCLE = {
    "name": "torch.optim.lr_scheduler.OneCycleLR",
    "kwargs": {"max_lr": 0.1, "total_steps": 10, "cycle_momentum": False},
}


def test_a_schedule_scales_both_rates() -> None:
    config = _config({"lr": 0.02, "adamw": {"lr": 1e-3}}, LINEAR)
    check_optimizer(config, "policy")
    matrix, vector = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
    optimizer = build_optimizer([vector, matrix], config.optimizer, matrices=[matrix])
    build_scheduler(optimizer, config.scheduler)
    assert [(group["lr"], group["params"]) for group in optimizer.param_groups] == [(0.01, [matrix]), (5e-4, [vector])]


@pytest.mark.parametrize(
    ("kwargs", "scheduler", "said"),
    [
        ({"lr": 0.02}, None, r"adamw has no lr.*adjust_lr_fn=match_rms_adamw"),
        (
            {"lr": 1e-3, "betas": [0.9, 0.99]},
            None,
            r"has no argument betas\. .*write policy.*kwargs\.adamw\.betas",
        ),
        ({"lr": 1e-3, "adamw": {"lr": 1e-3, "beta": [0.9, 0.99]}}, None, r"kwargs\.adamw.*Did you mean 'betas'"),
        ({"lr": 1e-3, "adamw": 1e-3}, None, r"adamw=0\.001 is not a mapping"),
        ({"adjust_lr_fn": "spectral", "adamw": {"lr": 1e-3}}, None, "spectral is not supported"),
        ({"ns_dtype": "float16", "adamw": {"lr": 1e-3}}, None, "bfloat16, float32"),
        ({"ns_steps": 0, "adamw": {"lr": 1e-3}}, None, "between 1 and 99"),
        ({"lr": 0.02, "adamw": {"lr": 1e-3}}, ONE_CYCLE, r"one learning rate to all.*LinearLR"),
    ],
)
def test_wrong_arguments_are_refused_before_ranks_start(kwargs, scheduler, said) -> None:
    with pytest.raises(ConfigError, match=said):
        check_optimizer(_config(kwargs, scheduler), "policy")


def test_one_rate_is_enough_if_it_fits_both() -> None:
    check_optimizer(_config({"lr": 1e-3, "adjust_lr_fn": "match_rms_adamw"}, ONE_CYCLE), "policy")


def test_a_model_without_hidden_matrices_is_refused() -> None:
    hf = tiny_model("llama")
    assert len(hidden_matrices(hf)) == 14
    hf.model.layers.requires_grad_(False)
    with pytest.raises(ConfigError, match="LlamaForCausalLM trains none"):
        hidden_matrices(hf)
