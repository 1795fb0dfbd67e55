"""Expert parallelism in vLLM's CPU build, whose kernel does not know it.

`vllm.model_executor.layers.fused_moe.experts.cpu_moe.CPUUnquantizedExperts.apply` ignores `expert_map`: it gives the
kernel ids among all experts of a layer beside the weights of this rank's, and the kernel reads beyond these. Invariant:
what the ranks of a stage compute adds up to what one rank with all experts does.
"""

from functools import wraps
from typing import Any


def compute_own_experts() -> None:
    """Let the experts of this process on a CPU see the ids of their own; those of other ranks add nothing."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe  # vLLM, too, imports it on CPUs only

    experts: Any = cpu_moe.CPUUnquantizedExperts
    of_all = experts.apply

    @wraps(of_all)
    def of_own(self: Any, **arguments: Any) -> None:
        places = arguments["expert_map"][arguments["topk_ids"].long()]  # [T, top-k], -1: of another rank
        is_own = places >= 0
        arguments["topk_ids"] = places.clamp(min=0).to(arguments["topk_ids"].dtype)
        arguments["topk_weights"] = arguments["topk_weights"] * is_own
        of_all(self, **arguments)
        if arguments["apply_router_weight_on_input"]:  # the only expert of a token, and no weight is applied here
            arguments["output"].mul_(is_own)

    experts.apply = of_own
