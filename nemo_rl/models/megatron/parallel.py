"""Start Megatron Core's process groups and random states on this rank, from the parallel layout.

Invariant: ranks are numbered as in `parallel_layout` (pp outermost, tp innermost), which is Megatron Core's order
`tp-cp-ep-dp-pp`; every group has the timeout of the default group.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from nemo_rl.config.schema.model.megatron import MegatronConfig
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.distributed.ranks.collectives import Group
from nemo_rl.distributed.ranks.process_group import collective_timeout
from nemo_rl.models.megatron import cpu_shim
from nemo_rl.models.megatron.inputs import Division
from nemo_rl.utils.errors import ConfigError


@dataclass(frozen=True)
class Groups:
    """Groups that divide this rank's layers and tokens; None for an axis with one rank."""

    tp: Group = None
    """Ranks that divide each layer and the vocabulary."""
    cp: Group = None
    """Ranks that divide the tokens of a row."""
    sequence_parallel: bool = False
    """Whether tensor-parallel ranks divide the tokens between layers."""


def start_model_parallel(
    layout: ParallelLayout, section: MegatronConfig, device: torch.device, seed: int = 0
) -> Groups:
    """Make the groups; the default process group must exist. Collective.

    Args:
        layout: sizes of the mesh axes.
        section: `policy.megatron_cfg`.
        device: device on which this rank computes; on a CPU the process is prepared by `cpu_shim`.
        seed: seed of the random states that Megatron Core keeps for dropout.

    Raises:
        ConfigError: the process group and the layout have different numbers of ranks.
    """
    if layout.num_ranks != dist.get_world_size():
        raise ConfigError(f"the parallel layout has {layout.num_ranks} ranks, the group {dist.get_world_size()}.")
    if device.type == "cpu":
        cpu_shim.install()
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
    return Groups(
        tp=parallel_state.get_tensor_model_parallel_group() if layout.tp > 1 else None,
        cp=parallel_state.get_context_parallel_group() if layout.cp > 1 else None,
        sequence_parallel=bool(section.sequence_parallel) and layout.tp > 1,
    )


def division_of(groups: Groups) -> Division:
    """Return the division of a row's tokens, with this rank's part."""
    cp, sp = groups.cp, groups.tp if groups.sequence_parallel else None
    return Division(
        cp=cp.size() if cp else 1,
        cp_rank=cp.rank() if cp else 0,
        sp=sp.size() if sp else 1,
        sp_rank=sp.rank() if sp else 0,
    )


def stop_model_parallel() -> None:
    """Destroy the groups, so that new ones can be made."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
