"""Describe the task of each rank of a model: position on the parallel axes, rows, and whether its results count.

A `ParallelLayout` is made once from the configuration. With it, the controller shards inputs and collects results,
worker groups get a `NamedSharding`, and ranks build their device mesh (`process_group.device_mesh`). Invariant: ranks
are numbered row by row over `AXES`, and only this file converts a rank number into a data-parallel rank.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from nemo_rl.config import PolicyConfig, parallel_sizes
from nemo_rl.distributed.named_sharding import NamedSharding

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes of a device mesh, outermost first."""


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the parallel axes. Their product is the number of ranks."""

    pp: int = 1
    """Number of pipeline stages into which the layers are divided. The last stage computes loss and scores."""
    dp_replicate: int = 1
    """Number of copies of the sharded model (HSDP)."""
    dp_shard: int = 1
    """Number of ranks that shard a copy. Ranks that differ on this axis or `dp_replicate` train on different rows."""
    cp: int = 1
    """Number of ranks that divide the tokens of the same rows."""
    tp: int = 1
    """Number of ranks that divide each layer and work on the same tokens."""
    ep: int = 1
    """Ranks that share the experts of a layer; not a separate axis: it regroups `dp_shard`, `cp` and `tp`."""

    @classmethod
    def of(cls, policy: PolicyConfig, num_ranks: int) -> Self:
        """Build the layout that a policy section requests.

        Raises:
            ConfigError: the ranks do not divide into the sizes.
        """
        return cls(**parallel_sizes(policy, num_ranks))

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    @property
    def data_parallel_size(self) -> int:
        """Number of groups of ranks that process different rows."""
        return self.dp_replicate * self.dp_shard

    @cached_property
    def sharding(self) -> NamedSharding:
        """The ranks with the axis names of worker groups, which join the two data-parallel axes."""
        return NamedSharding.from_axis_sizes(
            {
                "pipeline_parallel": self.pp,
                "data_parallel": self.data_parallel_size,
                "context_parallel": self.cp,
                "tensor_parallel": self.tp,
            }
        )

    def data_parallel_rank(self, rank: int) -> int:
        """Return the data-parallel rank of a rank. Ranks that differ only on other axes have the same."""
        return self.sharding.get_worker_coords(rank)["data_parallel"]

    def random_path(self, rank: int) -> tuple[int, ...]:
        """Return a rank's seed path for dropout: its data-parallel rank, and its stage if it is not the first one."""
        stage = self.sharding.get_worker_coords(rank)["pipeline_parallel"]
        return (self.data_parallel_rank(rank), stage) if stage else (self.data_parallel_rank(rank),)

    @property
    def result_ranks(self) -> list[int]:
        """The rank with the loss, metrics and scores of each data-parallel rank, in order.

        The last pipeline stage has these results. Tensor-parallel ranks hold equal copies. Context-parallel ranks do
        too, because a backend joins the results for their tokens into scores of whole rows.
        """
        return self.sharding.get_ranks_by_coord(pipeline_parallel=self.pp - 1, context_parallel=0, tensor_parallel=0)

    @property
    def stage_ranks(self) -> list[int]:
        """One rank of each pipeline stage, in layer order."""
        return self.sharding.get_ranks_by_coord(data_parallel=0, context_parallel=0, tensor_parallel=0)
