"""Compare each implementation of AdamW on the device with its definition in float64.

    m = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g^2
    p = p (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

(Loshchilov and Hutter, arXiv:1711.05101).
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gpu_checks.bench import Bench
from gpu_checks.report import Figures, Finding
from nemo_rl.config import OptimizerConfig
from nemo_rl.models.dtensor.optimizer import build_optimizer

STEPS = 5
TOLERANCE = 1e-5
LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1


def adamw(bench: Bench) -> Iterator[Finding]:
    """Check the default, fused and foreach implementations on the parameters of a sharded rank."""
    rank = bench.policy("qwen2", precision="bfloat16")
    parameters = list(rank.backend.model.parameters())  # type: ignore[attr-defined]
    start = [_plain(parameter) for parameter in parameters]
    want = [_by_definition(value.double()) for value in start]
    for name, choice in {"default": {}, "fused": {"fused": True}, "foreach": {"foreach": True}}.items():
        _put_back(parameters, start)
        kwargs = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, **choice}
        optimizer = build_optimizer(parameters, OptimizerConfig.build(name="torch.optim.AdamW", kwargs=kwargs))
        for step in range(STEPS):
            for parameter in parameters:
                parameter.grad = _gradient(parameter.detach(), step)
            optimizer.step()
        error = max(float((_plain(p).double() - w).abs().max()) for p, w in zip(parameters, want, strict=True))
        figures: Figures = {"error": error, "allowed": TOLERANCE, "fused": str(optimizer.defaults.get("fused"))}
        yield Finding(name, figures, "" if error <= TOLERANCE else "differs from the definition")
    bench.end_policy()


def _gradient(value: Tensor, step: int) -> Tensor:
    """Return a gradient of 0.1 to 0.9 computed from value and step; near 0, rounding could change its sign."""
    return (value * 37.0 + step).sin() * 0.4 + 0.5


def _by_definition(value: Tensor) -> Tensor:
    mean, square = torch.zeros_like(value), torch.zeros_like(value)
    for step in range(STEPS):
        gradient = _gradient(value, step)
        mean = BETAS[0] * mean + (1 - BETAS[0]) * gradient
        square = BETAS[1] * square + (1 - BETAS[1]) * gradient**2
        unbiased = mean / (1 - BETAS[0] ** (step + 1))
        scale = (square / (1 - BETAS[1] ** (step + 1))).sqrt() + EPS
        value = value * (1 - LR * DECAY) - LR * unbiased / scale
    return value


def _plain(parameter: nn.Parameter) -> Tensor:
    full = getattr(parameter, "full_tensor", None)
    return (full() if full is not None else parameter).detach().to("cpu", copy=True)


@torch.no_grad()
def _put_back(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        local.copy_(value)
