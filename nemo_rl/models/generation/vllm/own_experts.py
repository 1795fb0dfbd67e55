"""Add expert parallelism to vLLM's CPU build, whose kernel and communicator do not support it.

`vllm.model_executor.layers.fused_moe.experts.cpu_moe.CPUUnquantizedExperts.apply` ignores `expert_map`: it passes the
kernel ids among all experts of a layer with the weights of this rank's experts only, so the kernel reads out of bounds.
`vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator` has none of the two operations that exchange
tokens between replicas. Invariant: the sum of the results of a stage's ranks equals the result of one rank with all
experts, and that of a token does not depend on the others.
"""

from functools import wraps
from typing import Any

import torch
import torch.distributed as dist


def compute_own_experts() -> None:
    """Let CPU experts use the ids of this process's experts; experts of other ranks add nothing."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe  # vLLM also imports it on CPUs only

    experts: Any = cpu_moe.CPUUnquantizedExperts
    of_all = experts.apply

    @wraps(of_all)
    def of_own(self: Any, **arguments: Any) -> None:
        places = arguments["expert_map"][arguments["topk_ids"].long()]  # [T, top-k]; -1: expert of another rank
        is_own = places >= 0
        arguments["topk_ids"] = places.clamp(min=0).to(arguments["topk_ids"].dtype)
        arguments["topk_weights"] = arguments["topk_weights"] * is_own
        of_all(self, **arguments)
        if arguments["apply_router_weight_on_input"]:  # top-1: the kernel applies no weight
            arguments["output"].mul_(is_own)

    experts.apply = of_own


def exchange_tokens() -> None:
    """Let CPU replicas exchange tokens before and after their experts."""
    from vllm.distributed.device_communicators import cpu_communicator  # vLLM also imports it on CPUs only

    communicator: Any = cpu_communicator.CpuCommunicator
    communicator.all_gatherv = _all_gatherv
    communicator.reduce_scatterv = _reduce_scatterv


def _all_gatherv(
    self: Any, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor | list[torch.Tensor]:
    """Join the rows of all members; see `DeviceCommunicatorBase.all_gatherv`, `sizes` has the rows of each."""
    assert dim == 0, "tokens are rows"
    if isinstance(input_, torch.Tensor):
        return _joined(self, input_, sizes)
    return [_joined(self, each, sizes) for each in input_]


def _joined(communicator: Any, own: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
    sizes = sizes or [len(own)] * communicator.world_size
    joined = own.new_empty((sum(sizes), *own.shape[1:]))
    for rank, part in enumerate(joined.split(sizes)):
        if rank == communicator.rank_in_group:
            part.copy_(own)
        dist.broadcast(part, communicator.ranks[rank], group=communicator.device_group)
    return joined


def _reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    """Sum the rows that are this member's; see `DeviceCommunicatorBase.reduce_scatterv`.

    The parts are added in the order of the members, so the sum for a token does not depend on its row.
    """
    assert dim == 0, "tokens are rows"
    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    parts = [torch.empty_like(input_) for _ in range(self.world_size)]
    dist.all_gather(parts, input_.contiguous(), group=self.device_group)
    own = torch.stack([part.split(sizes)[self.rank_in_group] for part in parts])
    return own.sum(0)
