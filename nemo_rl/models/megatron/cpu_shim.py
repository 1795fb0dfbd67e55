"""Megatron Core on machines without CUDA: what of `torch.cuda` it takes for granted, answered for the CPU.

Only for the process of a rank, which does nothing else. Megatron Core asks `torch.cuda` for the current device, for
streams and for the state of the random generator, and names the device `cuda` in a few places. Invariant: the places
are those of one version; any other is refused by name, because a place that was missed may give wrong numbers.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nemo_rl.models.megatron.release import require_megatron_core

_CPU = torch.device("cpu")
_NAMES_CUDA = ("pipeline_parallel.schedules", "models.common.embeddings.rope_utils")
"""Modules on the way of every microbatch that make tensors on the device `cuda` or in page-locked memory."""
_installed = False


def install() -> None:
    """Prepare this process; does nothing where there is CUDA, or the second time.

    Raises:
        ConfigError: another release of megatron-core than the tested one is installed.
    """
    global _installed
    if _installed or torch.cuda.is_available():
        return
    require_megatron_core()
    _answer_for_cuda()
    # Fused kernels are compiled by torch.compile, for seconds each; on CPUs they run as they are written.
    torch.compiler.set_stance("force_eager")
    importlib.import_module("megatron.core.jit").disable_jit_fuser()
    _replace_random_state()
    _replace_split_sizes()
    for name in _NAMES_CUDA:
        module: Any = importlib.import_module(f"megatron.core.{name}")
        module.torch = _TorchOnCpu()
    _installed = True


def cuda_names() -> AbstractContextManager[None]:
    """While an optimizer is made, steps or is loaded: tensors say that they are CUDA's, and are made on the CPU.

    Megatron Core compares `tensor.type()` with the names of CUDA's types there. Nothing happens without `install`.
    """
    return _cuda_names() if _installed else nullcontext()


@contextlib.contextmanager
def _cuda_names() -> Iterator[None]:
    with _CudaNames():
        yield


class _CudaNames(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **_on_cpu(kwargs or {}))


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a factory, without a GPU and without page-locked memory."""
    if str(kwargs.get("device")).startswith("cuda"):
        kwargs = kwargs | {"device": _CPU}
    return kwargs | {"pin_memory": False} if kwargs.get("pin_memory") else kwargs


class _TorchOnCpu(ModuleType):
    """`torch` as a module of Megatron Core sees it, whose factories make tensors on the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in ("zeros", "empty", "tensor", "ones"):
            setattr(self, name, _made_on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        setattr(self, name, value)  # found without this function the next time
        return value


def _made_on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Tensor:
        return factory(*args, **_on_cpu(kwargs))

    return make


class _NoStream:
    """A stream, or an event, of a device whose work is done when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: _NoStream() if name == "record_event" else None

    def query(self) -> bool:
        return True

    def __enter__(self) -> "_NoStream":
        return self

    def __exit__(self, *args: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NoStream)

    __hash__ = object.__hash__


def _answer_for_cuda() -> None:
    answers: dict[str, Any] = {
        "current_device": lambda: _CPU,
        "synchronize": lambda *args, **kwargs: None,
        "Stream": _NoStream,
        "Event": _NoStream,
        "current_stream": lambda *args, **kwargs: _NoStream(),
        "stream": lambda stream: nullcontext(),
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "manual_seed": torch.manual_seed,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def _replace_random_state() -> None:
    """Recomputed layers draw the numbers that they drew before, from the CPU's generator."""
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _replace_split_sizes() -> None:
    """Sizes of an exchange between experts are lists of numbers; Megatron Core converts those on GPUs only."""
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor

    dispatcher.maybe_move_tensor_to_cpu = to_host
