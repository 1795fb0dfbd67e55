"""Build the device meshes of one rank: groups of ranks that shard a parameter or reduce a gradient together.

The meshes are made once from the `ParallelLayout`. `tensor_parallel`, `context_parallel`, `expert_parallel`, `pipeline`
and `parallelize` use one axis each. Invariant: all meshes cover the same ranks, and axes of size 1 exist too, so that
code needs no special case for them.
"""

from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.distributed.ranks.process_group import device_mesh


@dataclass(frozen=True)
class Meshes:
    """The meshes that this rank uses, one per kind of parallelism."""

    layout: ParallelLayout
    """Sizes of the axes."""
    world: DeviceMesh
    """All ranks, with the axes of `parallel_layout.AXES`."""
    experts: DeviceMesh | None
    """All ranks, with the axes `(pp, dp_replicate, expert_shard, ep)`. The `ep` ranks divide the experts of a layer,
    and the `expert_shard` ranks shard the same experts. None without expert parallelism."""

    @classmethod
    def build(cls, layout: ParallelLayout, device_type: str) -> "Meshes":
        """Make the meshes. The call is collective.

        Raises:
            ConfigError: the process group and the layout have different numbers of ranks.
        """
        world = device_mesh(layout, device_type)
        return cls(layout, world, _expert_mesh(layout, device_type) if layout.ep > 1 else None)

    @cached_property
    def fsdp(self) -> DeviceMesh:
        """Ranks that shard a parameter and sum its gradient. Context-parallel ranks are included.

        The mesh has one axis, or `(dp_replicate, ...)` with hybrid sharding.
        """
        divided = self.layout.cp > 1
        shard = self.world["dp_shard", "cp"]._flatten("dp_shard_cp") if divided else self.world["dp_shard"]
        if self.layout.dp_replicate == 1:
            return shard
        (name,) = shard.mesh_dim_names or ()
        return self.world["dp_replicate", name]

    @cached_property
    def expert_fsdp(self) -> DeviceMesh:
        """Ranks that shard a parameter of experts, which are already divided among expert-parallel ranks."""
        assert self.experts is not None, "there are no expert-parallel ranks"
        if self.layout.dp_replicate == 1:
            return self.experts["expert_shard"]
        return self.experts["dp_replicate", "expert_shard"]

    @property
    def tp(self) -> DeviceMesh:
        """Ranks that divide each layer."""
        return self.world["tp"]

    @property
    def cp(self) -> DeviceMesh:
        """Ranks that divide the tokens of a row."""
        return self.world["cp"]

    @property
    def pp(self) -> DeviceMesh:
        """Ranks that hold the stages of one model, first stage first."""
        return self.world["pp"]

    @property
    def ep(self) -> DeviceMesh:
        """Ranks that divide the experts of a layer."""
        assert self.experts is not None, "there are no expert-parallel ranks"
        return self.experts["ep"]

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """Process group of the mesh `tp`, or None if it has only one rank."""
        return self.tp.get_group() if self.layout.tp > 1 else None


def _expert_mesh(layout: ParallelLayout, device_type: str) -> DeviceMesh:
    sharing = layout.dp_shard * layout.cp * layout.tp
    shape = (layout.pp, layout.dp_replicate, sharing // layout.ep, layout.ep)
    return init_device_mesh(device_type, shape, mesh_dim_names=("pp", "dp_replicate", "expert_shard", "ep"))
