"""Add expert parallelism to vLLM's CPU build, whose kernel does not support it.

`vllm.model_executor.layers.fused_moe.experts.cpu_moe.CPUUnquantizedExperts.apply` ignores `expert_map`: it passes the
kernel ids among all experts of a layer with the weights of this rank's experts only, so the kernel reads out of bounds.
Invariant: the sum of the results of a stage's ranks equals the result of one rank with all experts.
"""

from functools import wraps
from typing import Any


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
