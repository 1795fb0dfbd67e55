"""Start Megatron Core on this rank: process groups, random states, and a replacement of CUDA on CPUs.

Invariant: ranks are numbered as in `parallel_layout` (pp outermost, tp innermost), which is Megatron Core's order
`tp-cp-ep-dp-pp`. Every group has the timeout of the default group.

On a machine without CUDA, `replace_cuda` replaces the functions of `torch.cuda` that Megatron Core calls
unconditionally (for the current device, streams, and random state) and the device name `cuda` in a few modules. This
changes the whole process, so only processes of ranks may call it. Invariant: the replaced functions are those of one
release of Megatron Core. Other releases are refused, because a missed function may lead to wrong numbers.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nemo_rl.config.schema.model.megatron import MegatronConfig
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.distributed.ranks.collectives import Group
from nemo_rl.distributed.ranks.process_group import collective_timeout
from nemo_rl.models.megatron.inputs import TokenDivision
from nemo_rl.models.megatron.release import require_megatron_core
from nemo_rl.models.training.tensor_checks import parts_to_sum
from nemo_rl.utils.errors import ConfigError

_CPU = torch.device("cpu")
_NAMES_CUDA = ("pipeline_parallel.schedules", "models.common.embeddings.rope_utils")
"""Modules that make tensors on the device `cuda` or in page-locked memory in every microbatch."""
_installed = False


def replace_cuda() -> None:
    """Replace CUDA in this process. Do nothing if the machine has CUDA or this was done before.

    Raises:
        ConfigError: the installed release of megatron-core is not the tested one.
    """
    global _installed
    if _installed or torch.cuda.is_available():
        return
    require_megatron_core()
    _answer_for_cuda()
    # # torch.compile would need seconds for each fused kernel, so these kernels run uncompiled on CPUs.
    torch.compiler.set_stance("force_eager")
    importlib.import_module("megatron.core.jit").disable_jit_fuser()
    _replace_random_state()
    _replace_split_sizes()
    _replace_norm()
    for name in _NAMES_CUDA:
        module: Any = importlib.import_module(f"megatron.core.{name}")
        module.torch = _TorchOnCpu()
    _installed = True


def cuda_names() -> AbstractContextManager[None]:
    """Run a block in which CPU tensors report CUDA types.

    Megatron Core's optimizers compare `tensor.type()` with the names of CUDA types when they are made, updated or
    loaded. This has no effect if `replace_cuda` has not replaced CUDA.
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
    """Change the arguments of a function that makes tensors to the CPU and to memory without page lock."""
    if str(kwargs.get("device")).startswith("cuda"):
        kwargs = kwargs | {"device": _CPU}
    return kwargs | {"pin_memory": False} if kwargs.get("pin_memory") else kwargs


class _TorchOnCpu(ModuleType):
    """Replacement for `torch` in a module of Megatron Core. Functions such as `zeros` make tensors on the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in ("zeros", "empty", "tensor", "ones"):
            setattr(self, name, _made_on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        setattr(self, name, value)  # later look-ups find the attribute
        return value


def _made_on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Tensor:
        return factory(*args, **_on_cpu(kwargs))

    return make


class _NoStream:
    """Stream or event for the CPU, where every call finishes its work before it returns."""

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
    """Make Megatron Core save and restore the CPU's generator, so that recomputed layers draw the same numbers."""
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _replace_split_sizes() -> None:
    """Convert the sizes of exchanges between experts to NumPy arrays, as Megatron Core does only on GPUs."""
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor

    dispatcher.maybe_move_tensor_to_cpu = to_host


def _replace_norm() -> None:
    """Compute the gradient norm from parts of tensors, because CPUs round long sums (`parts_to_sum`)."""
    clipping: Any = importlib.import_module("megatron.core.optimizer.clip_grads")
    whole = clipping.l2_norm_impl

    def norm_of_parts(chunk_size: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], *more: Any) -> Any:
        parts = [[part for tensor in tensors for part in parts_to_sum(tensor)] for tensors in lists]
        return whole(chunk_size, overflow, parts, *more)

    clipping.l2_norm_impl = norm_of_parts


@dataclass(frozen=True)
class ParallelGroups:
    """Groups of ranks that divide this rank's layers and tokens. A group is None if the axis has one rank."""

    tp: Group = None
    """Ranks that divide each layer and the vocabulary."""
    cp: Group = None
    """Ranks that divide the tokens of a row."""
    sequence_parallel: bool = False
    """Whether tensor-parallel ranks divide the tokens between layers."""


def start_model_parallel(
    layout: ParallelLayout, section: MegatronConfig, device: torch.device, seed: int = 0
) -> ParallelGroups:
    """Make the process groups of Megatron Core. The call is collective, and the default process group must exist.

    Args:
        layout: sizes of the mesh axes.
        section: `policy.megatron_cfg`.
        device: device on which this rank computes; for a CPU, `replace_cuda` is called.
        seed: seed of the random states that Megatron Core keeps for dropout.

    Raises:
        ConfigError: the process group and the layout have different numbers of ranks.
    """
    if layout.num_ranks != dist.get_world_size():
        raise ConfigError(f"the parallel layout has {layout.num_ranks} ranks, the group {dist.get_world_size()}.")
    if device.type == "cpu":
        replace_cuda()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    stages = section.virtual_pipeline_model_parallel_size
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=stages if stages and stages > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=section.expert_tensor_parallel_size,
        distributed_timeout_minutes=collective_timeout(device).total_seconds() / 60,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(seed % 2**32, force_reset_rng=True)
    return ParallelGroups(
        tp=parallel_state.get_tensor_model_parallel_group() if layout.tp > 1 else None,
        cp=parallel_state.get_context_parallel_group() if layout.cp > 1 else None,
        sequence_parallel=bool(section.sequence_parallel) and layout.tp > 1,
    )


def division_of(groups: ParallelGroups) -> TokenDivision:
    """Return how ranks divide a row's tokens, with this rank's position among them."""
    cp, sp = groups.cp, groups.tp if groups.sequence_parallel else None
    return TokenDivision(
        cp=cp.size() if cp else 1,
        cp_rank=cp.rank() if cp else 0,
        sp=sp.size() if sp else 1,
        sp_rank=sp.rank() if sp else 0,
    )


def stop_model_parallel() -> None:
    """Destroy the groups, so that new ones can be made."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
