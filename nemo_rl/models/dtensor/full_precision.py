"""Compute with some parameters of a module in float32, while FSDP2 rounds the others.

FSDP2 has one precision for the parameters that it gathers together, and such a parameter may belong to the same module
as others (`A_log` and the projections of a mixer), or be read without a call of its module. So FSDP2 leaves them out of
a module's first group, and they become a second one of the same module, which its hooks gather at the same time.

Invariant: gradients of the second group are reduced in float32, over the same ranks.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


def shard_in_float32(module: nn.Module, parameters: Iterable[nn.Parameter], offload: OffloadPolicy) -> None:
    """Shard parameters that `fully_shard` was told to ignore, and compute with them in float32.

    Args:
        module: has been given to `fully_shard`, with `ignored_params`, and manages further parameters.
        parameters: of it or of its modules; on the meta device, or moved to the module's device here.
        offload: as in `fully_shard`.
    """
    chosen = list(parameters)
    if not chosen:
        return
    assert isinstance(module, FSDPModule), "fully_shard comes first"
    state: Any = module._get_fsdp_state()
    first = state._fsdp_param_groups[0]
    for parameter in chosen:
        if not parameter.is_meta:
            parameter.data = parameter.data.to(first.device)
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    places = (first.modules, first.mesh_info, first.post_forward_mesh_info, first.device)
    state._fsdp_param_groups.append(FSDPParamGroup(chosen, *places, None, policy, offload))
