"""Build the Megatron backend of one rank, and the config sections that it needs."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_models import saved
from transformers import PretrainedConfig

from nemo_rl.config import MegatronConfig, PolicyConfig
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.weight_sync.exchange import everywhere
from nemo_rl.weight_sync.parts import ReadableWeights

CPU = torch.device("cpu")
_started: list[Any] = []
"""The mesh that `start_groups` has made in this process."""
_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "sp": "sequence_parallel",
}
_PARTS: dict[str, dict[str, Any]] = {
    "optimizer": {
        "lr": 1e-3,
        "min_lr": 0.0,
        "weight_decay": 0.1,
        "adam_eps": 1e-5,
        "clip_grad": 1.0,
        "use_distributed_optimizer": False,
    },
    "scheduler": {"lr_decay_style": "constant", "lr_decay_iters": None, "lr_warmup_iters": 0, "lr_warmup_init": 0.0},
    "distributed_data_parallel_config": {"overlap_grad_reduce": False, "overlap_param_gather": False},
}
_OF_POLICY = (
    "draft",
    "generation",
    "max_total_sequence_length",
    "reward_model_cfg",
    "router_replay",
    "sequence_packing",
)
_FLAT = {"enabled": True, "freeze_moe_router": False, "moe_router_dtype": "fp64"}


def policy_of(model_name: str = "m", precision: str = "float32", **megatron: Any) -> PolicyConfig:
    """Make the section `policy` for a small run on CPUs.

    Args:
        model_name: folder of the model.
        precision: of its weights.
        **megatron: keys of `megatron_cfg`, sizes as `tp`, `pp`, `vpp`, `cp`, `ep`, `etp` and `sp`; `optimizer`,
            `scheduler` and `distributed_data_parallel_config` in part. Of `policy`: `draft`, `generation`,
            `max_total_sequence_length`, `reward_model_cfg`, `router_replay`, `sequence_packing`.
    """
    own = {key: megatron.pop(key) for key in _OF_POLICY if key in megatron}
    parts = {name: part | megatron.pop(name, {}) for name, part in _PARTS.items()}
    section = _FLAT | {_SIZES.get(key, key): value for key, value in megatron.items()} | parts
    return PolicyConfig.build(
        model_name=model_name,
        precision=precision,
        max_grad_norm=None,
        dtensor_cfg={"enabled": False},
        megatron_cfg=section,
        **{"generation": None} | own,
    )


def section_of(**megatron: Any) -> MegatronConfig:
    """Return `policy.megatron_cfg`; see `policy_of`."""
    return policy_of(**megatron).megatron_cfg


def start_groups(**megatron: Any) -> MegatronConfig:
    """Start Megatron Core's parallel state if its sizes differ; return the section that has them."""
    from nemo_rl.models.megatron.parallel import start_model_parallel, stop_model_parallel

    policy = policy_of(**megatron)
    section, layout = policy.megatron_cfg, ParallelLayout.of(policy, dist.get_world_size())
    mesh = (layout, section.virtual_pipeline_model_parallel_size, section.expert_tensor_parallel_size)
    if _started != [mesh]:  # dozens of groups
        stop_model_parallel()
        start_model_parallel(layout, section, CPU)
        _started[:] = [mesh]
    return policy.megatron_cfg


@contextmanager
def without_groups() -> Iterator[None]:
    """Make this one rank a process that belongs to no group, for code that makes its own."""
    from nemo_rl.models.megatron.parallel import stop_model_parallel

    stop_model_parallel()
    _started.clear()
    dist.destroy_process_group()
    yield
    with tempfile.TemporaryDirectory() as folder:  # which `run_ranks` ends
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)


@contextmanager
def shared_files(model: Any) -> Iterator[Path]:
    """Make a folder with the model's files, written by rank 0: `save_pretrained` writes no weights on other ranks."""
    with ExitStack() as stack:
        folder = [stack.enter_context(saved(model)) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(folder)
        assert folder[0] is not None
        yield folder[0]
        dist.barrier()


def backend_of(model: Any, *, init_optimizer: bool = True, init_reference_model: bool = False, **policy: Any) -> Any:
    """Make `MegatronBackend` from the files of a Hugging Face model; its groups are made again."""
    with shared_files(model) as folder:
        parts = {"init_optimizer": init_optimizer, "init_reference_model": init_reference_model}
        return backend_from(policy_of(str(folder), **policy), **parts)


def backend_from(config: PolicyConfig, **parts: bool) -> Any:
    """Make `MegatronBackend` from the files that a section names; its groups are made again."""
    from nemo_rl.models.megatron.backend import MegatronBackend
    from nemo_rl.models.megatron.parallel import stop_model_parallel

    stop_model_parallel()
    _started.clear()
    return MegatronBackend(config, CPU, ParallelLayout.of(config, dist.get_world_size()), **parts)


def exported(
    chunks: list[Any], config: PretrainedConfig, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the whole hub tensors of a model on every rank."""
    from nemo_rl.models.megatron.conversion.holdings import held_hf_weights

    held = held_hf_weights(chunks, config, device=CPU, dtype=dtype)
    return everywhere(ReadableWeights(held, CPU), dist.group.WORLD)
