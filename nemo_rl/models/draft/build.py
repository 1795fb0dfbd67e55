"""Build the draft model of a rank, with its weights sharded over the ranks that train on different tokens."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from nemo_rl.config import PolicyConfig
from nemo_rl.models.draft.choice import draft_folder, shape_of
from nemo_rl.models.draft.files import read_weights
from nemo_rl.models.draft.head import DraftHead
from nemo_rl.models.draft.trainer import DraftModel


def build_draft_model(
    config: PolicyConfig, mesh: DeviceMesh, dtype: torch.dtype, device: torch.device, seed: int
) -> DraftModel:
    """Build the draft model of a policy section; collective.

    FSDP2 shards it separately from the policy, because its backward pass runs inside the policy's forward pass.

    Args:
        config: the policy section.
        mesh: ranks with different tokens, which share the weights.
        dtype: dtype of its forward and backward pass; its weights are float32.
        device: device on which it computes.
        seed: run seed, for the weights of a new draft model.
    """
    head = DraftHead(shape_of(config))
    head.draw(torch.Generator().manual_seed(seed))
    if config.draft.model_name is not None:
        read_weights(head, draft_folder(config.draft.model_name))
    model = DraftModel(head.to(device), config.logprob_chunk_size)
    if mesh.size() > 1 or dtype != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        fully_shard(model, mesh=mesh, mp_policy=precision)
        assert isinstance(model, FSDPModule)
        model.set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(True)
    return model
