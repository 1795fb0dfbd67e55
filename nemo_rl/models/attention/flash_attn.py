"""Compute flash attention over many pieces in one call, with torch's kernel or that of the `flash-attn` package.

`use_flash_attention` can replace torch's version 2 by version 3. If a piece has more keys than queries, both kernels
align the causal mask at the bottom right, as plans do (flash-attn since 2.1, from which torch's varlen kernel is
built). With attention sinks, the softmax has one more column. The output is rescaled by a factor that follows from the
log-sum-exp of the other columns.
"""

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nemo_rl.models.attention.plan import Bounds, Scoring
from nemo_rl.utils.errors import ConfigError

_KEY = "policy.dtensor_cfg.flash_attention_version"
_PACKAGE_OF_3 = "flash_attn_interface"
_CAPABILITY_OF_3 = 9
"""Major compute capability that version 3 needs (Hopper)."""


@cache
def flash_attn_varlen() -> Callable[..., Any] | None:
    """Return `flash_attn_varlen_func`, or None if the package is not installed."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func


def why_not_3(device: torch.device) -> str:
    """Return why version 3 cannot run on a device, or an empty text if it can."""
    if device.type == "cpu":
        return "it runs on GPUs only, and this rank computes on a CPU"
    major, minor = torch.cuda.get_device_capability(device)
    if major != _CAPABILITY_OF_3:
        return f"it needs a GPU of compute capability {_CAPABILITY_OF_3}.x (Hopper), and this one has {major}.{minor}"
    if importlib.util.find_spec(_PACKAGE_OF_3) is None:
        return f"the package {_PACKAGE_OF_3} (flash-attn-3) is not installed"
    return ""


def use_flash_attention(version: int, device: torch.device) -> None:
    """Make this process use a version of flash attention. Version 2 is torch's default.

    Raises:
        ConfigError: version 3 cannot run here.
    """
    if version == 2:
        return
    refusal = why_not_3(device)
    if refusal:
        raise ConfigError(f"{_KEY}=3 cannot be used: {refusal}. Set {_KEY}=2.")
    from torch.nn.attention import activate_flash_attention_impl

    activate_flash_attention_impl("FA3")


@contextmanager
def flash_attention(version: int, device: torch.device) -> Iterator[None]:
    """Run a block with a version of flash attention, and restore torch's own version after it.

    Raises:
        ConfigError: version 3 cannot run here.
    """
    use_flash_attention(version, device)
    try:
        yield
    finally:
        if version != 2:
            from torch.nn.attention import restore_flash_attention_impl

            restore_flash_attention_impl()


type Kernel = Callable[[Tensor, Tensor, Tensor, Bounds, Scoring], Tensor]
"""Function from query `[T, H, D]`, key and value `[T_k, H_kv, D]` of all pieces to the output `[T, H, D]`."""

_MAX_HEAD_DIM = 256
_HEAD_DIM_MULTIPLE = 8
_CAPABILITY = (8, 0)


def find_kernel(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Kernel | None:
    """Return the first kernel that accepts these tensors `[b, H, T, D]` and supports the scoring, or None."""
    if not _can_run(query, key, value):
        return None
    if scoring.softcap is None and scoring.dropout == 0.0:
        return torch_varlen
    package = flash_attn_varlen()
    takes_softcap = package is not None and "softcap" in _parameters(package)
    if package is None or scoring.sinks is not None or (scoring.softcap is not None and not takes_softcap):
        return None
    return lambda q, k, v, bounds, scoring: _by_package(package, q, k, v, bounds, scoring)


def _can_run(query: Tensor, key: Tensor, value: Tensor) -> bool:
    head_dim = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype == key.dtype == value.dtype
        and value.shape[-1] <= head_dim <= _MAX_HEAD_DIM
        and head_dim % _HEAD_DIM_MULTIPLE == 0
        and torch.cuda.get_device_capability(query.device) >= _CAPABILITY
    )


def torch_varlen(query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scoring: Scoring) -> Tensor:
    """Run torch's varlen kernel (`Kernel`)."""
    if scoring.sinks is not None:
        return _WithSinks.apply(query, key, value, scoring.sinks, bounds, scoring)
    out = _forward(query, key, value, bounds, scoring)
    assert isinstance(out, Tensor)
    return out


def _forward(query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scoring: Scoring, **kwargs: Any) -> Any:
    # # Imported here, because the module imports torch's compiler, which takes two seconds. CPUs do not need it.
    from torch.nn.attention.varlen import varlen_attn

    # # torch 2.11 has no such argument. It shares key heads by default.
    if "enable_gqa" in _parameters(varlen_attn):
        kwargs["enable_gqa"] = query.shape[1] != key.shape[1]
    window_size = _window_size(bounds, scoring)
    return varlen_attn(query, key, value, *bounds, scale=scoring.scaling, window_size=window_size, **kwargs)


class _WithSinks(torch.autograd.Function):
    """Attention with one extra key per head, which has the score `sink` and no value.

    With `L = logsumexp(scores)` and `L' = logaddexp(L, sink)` the output is `out' = out * exp(L - L')`. Torch's
    backward kernel ignores a gradient of `L`, so autograd cannot differentiate the rescaling. It recomputes the weights
    `exp(score - L')` and the row sums `D = grad . out'` from the output and log-sum-exp that it is given, here `out'`
    and `L'`. The gradient of the sink is `-sum_t exp(sink - L'_t) D_t`.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bounds: Bounds, scoring: Scoring
    ) -> Tensor:
        from torch.nn.attention.varlen import AuxRequest

        out, lse_HT = _forward(query, key, value, bounds, scoring, return_aux=AuxRequest(lse=True))
        joint_HT = torch.logaddexp(lse_HT, sinks[:, None].to(lse_HT.dtype))
        out = (out * (lse_HT - joint_HT).exp().t()[..., None]).to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, joint_HT, bounds.queries, bounds.keys)
        ctx.longest, ctx.window, ctx.scaling = bounds[2:], _window_size(bounds, scoring), scoring.scaling
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, value, sinks, out, joint_HT, queries, keys = ctx.saved_tensors
        left, right = ctx.window
        grads = torch.ops.aten._flash_attention_backward(
            *(grad.contiguous(), query, key, value, out, joint_HT, queries, keys, *ctx.longest, 0.0, left < 0),
            rng_state=torch.zeros(2, dtype=torch.uint64, device=query.device),  # unused: no dropout
            unused=torch.empty(0, device=query.device),
            scale=ctx.scaling,
            window_size_left=left,
            window_size_right=right,
        )
        row_sums_HT = (grad.float() * out.float()).sum(-1).t()
        weight_HT = (sinks[:, None].to(joint_HT.dtype) - joint_HT).exp()
        return *grads, -(weight_HT * row_sums_HT).sum(1).to(sinks.dtype), None, None


def _by_package(
    package: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scoring: Scoring
) -> Tensor:
    softcap = {} if scoring.softcap is None else {"softcap": scoring.softcap}
    out: Tensor = package(
        *(query, key, value, *bounds),
        dropout_p=scoring.dropout,
        softmax_scale=scoring.scaling,
        causal=True,
        window_size=_window_size(bounds, scoring),
        **softcap,
    )
    return out


def _window_size(bounds: Bounds, scoring: Scoring) -> tuple[int, int]:
    """Return how many keys a query sees to the left and right of its own key. -1 means all keys, and is the fastest."""
    window = scoring.window
    return (-1 if window is None or window >= bounds.longest_keys else window - 1, 0)


@cache
def _parameters(kernel: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(kernel).parameters)
