"""What each rank of a model is there for: its place on the parallel axes, its rows, and whether its answers count.

Made once from the configuration. The controller shards and collects by it, worker groups get it as a `NamedSharding`,
ranks build their device mesh from it (`process_group.device_mesh`). Invariant: ranks are numbered row by row over
`AXES`, and nothing but this file turns a rank's number into a data-parallel rank.
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
    """Sizes of the parallel axes; their product is the number of ranks.

    Attributes:
        pp: stages that the layers are divided into; the last one computes loss and scores.
        dp_replicate: copies of the sharded model (HSDP).
        dp_shard: ranks that a copy is sharded over; with `dp_replicate` they train on different rows.
        cp: ranks that divide the tokens of the same rows.
        tp: ranks that divide each layer, on the same tokens.
        ep: ranks that share the experts of a layer; no axis of its own, it regroups those of `dp_shard`, `cp`, `tp`.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @classmethod
    def of(cls, policy: PolicyConfig, num_ranks: int) -> Self:
        """The layout that a policy section asks for.

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
        """Groups of ranks that work on different rows."""
        return self.dp_replicate * self.dp_shard

    @cached_property
    def sharding(self) -> NamedSharding:
        """The ranks under the axis names of worker groups, in which both data-parallel axes are one."""
        return NamedSharding.from_axis_sizes(
            {
                "pipeline_parallel": self.pp,
                "data_parallel": self.data_parallel_size,
                "context_parallel": self.cp,
                "tensor_parallel": self.tp,
            }
        )

    def data_parallel_rank(self, rank: int) -> int:
        """Which rows a rank works on; ranks that differ on other axes only get the same ones."""
        return self.sharding.get_worker_coords(rank)["data_parallel"]

    def random_path(self, rank: int) -> tuple[int, ...]:
        """What tells a rank's random numbers (dropout) apart: its rows, and behind the first stage its layers."""
        stage = self.sharding.get_worker_coords(rank)["pipeline_parallel"]
        return (self.data_parallel_rank(rank), stage) if stage else (self.data_parallel_rank(rank),)

    @property
    def result_ranks(self) -> list[int]:
        """The rank whose loss, metrics and scores count for each data-parallel rank, in that order.

        The last stage has them. Tensor-parallel ranks hold equal copies; context-parallel ranks too, because a backend
        joins what they computed for their tokens before it hands the scores of whole rows on.
        """
        return self.sharding.get_ranks_by_coord(pipeline_parallel=self.pp - 1, context_parallel=0, tensor_parallel=0)

    @property
    def stage_ranks(self) -> list[int]:
        """One rank of each pipeline stage, in the order of the layers."""
        return self.sharding.get_ranks_by_coord(data_parallel=0, context_parallel=0, tensor_parallel=0)
