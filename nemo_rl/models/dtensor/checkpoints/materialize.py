"""Load this rank's part of the weights into a model that was made without them (`huggingface.lazy_weights`).

Runs after sharding: a rank's part is allocated on its final device, then read from the files, tensor by tensor. So no
rank ever holds more of the model than its part and one tensor, or one group of tensors that are converted together.

Invariant: afterwards every weight has the value of the files, or was initialized by transformers if no file has it.
"""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.models.dtensor.checkpoints.model_files import read_weights
from nemo_rl.models.huggingface.lazy_weights import LazyWeights
from nemo_rl.utils.errors import CheckpointError


def materialize(
    model: nn.Module, hf: PreTrainedModel, lazy_weights: LazyWeights, device: torch.device, *, cpu_offload: bool
) -> None:
    """Allocate and read this rank's part of the weights, in place.

    Args:
        model: the wrapped model, sharded by any DTensor placements or not.
        hf: the Hugging Face model in it.
        lazy_weights: the files with the model's weights.
        device: device on which the rank computes.
        cpu_offload: keep parameters in host memory instead.

    Raises:
        CheckpointError: a weight of the model has no value and is not in the files.
    """
    empty = {name for name, tensor in (*hf.named_parameters(), *hf.named_buffers()) if tensor.is_meta}
    _allocate(model, device, torch.device("cpu") if cpu_offload else device)
    lacking = empty - read_weights(hf, lazy_weights.tensors)
    if lacking:
        raise CheckpointError(f"{type(hf).__name__} has weights that were not read: {', '.join(sorted(lacking)[:5])}.")


@torch.no_grad()
def _allocate(model: nn.Module, device: torch.device, home: torch.device) -> None:
    """Allocate memory for tensors on the meta device and move the others to their device; tied weights stay tied."""
    for parameter in [*model.parameters()]:
        if parameter.device != home:
            torch.utils.swap_tensors(parameter, nn.Parameter(_at(parameter, home), parameter.requires_grad))
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != device:
                setattr(module, name, _at(buffer, device))
    if isinstance(model, FSDPModule):
        model._apply(lambda tensor: tensor.detach())  # makes FSDP2 read its shards again, and pad uneven ones


def _at(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)
