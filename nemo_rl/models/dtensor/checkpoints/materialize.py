"""Give a model that was made without its weights (`huggingface.unread`) this rank's part of them.

After sharding: what a rank holds is allocated where it will live, then read from the files, tensor by tensor. So no
rank ever holds more of the model than its part and one tensor, or one group of tensors that are converted together.

Invariant: afterwards every weight is that of the files, or was drawn by transformers because no file has it.
"""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.models.dtensor.checkpoints.model_files import read_weights
from nemo_rl.models.huggingface.lazy_weights import Unread
from nemo_rl.models.huggingface.tensor_files import TensorFiles
from nemo_rl.utils.errors import CheckpointError


def materialize(
    model: nn.Module, hf: PreTrainedModel, unread: Unread, device: torch.device, *, cpu_offload: bool
) -> None:
    """Allocate and read this rank's part of the weights, in place.

    Args:
        model: the wrapped model, sharded by any DTensor placements or not.
        hf: the Hugging Face model in it.
        unread: the files it was made from.
        device: where the rank computes.
        cpu_offload: whether parameters live in host memory instead.

    Raises:
        CheckpointError: a weight of the model is neither real nor in the files.
    """
    empty = {name for name, tensor in (*hf.named_parameters(), *hf.named_buffers()) if tensor.is_meta}
    _allocate(model, device, torch.device("cpu") if cpu_offload else device)
    lacking = empty - read_weights(hf, TensorFiles(unread.files))
    if lacking:
        raise CheckpointError(f"{type(hf).__name__} has weights that were not read: {', '.join(sorted(lacking)[:5])}.")


@torch.no_grad()
def _allocate(model: nn.Module, device: torch.device, home: torch.device) -> None:
    """Memory for everything that has none, and everything real where it belongs; tied weights stay one.

    Args:
        model: sharded or not.
        device: of buffers.
        home: of parameters.
    """
    for parameter in [*model.parameters()]:
        if parameter.device != home:
            torch.utils.swap_tensors(parameter, nn.Parameter(_at(parameter, home), parameter.requires_grad))
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != device:
                setattr(module, name, _at(buffer, device))
    if isinstance(model, FSDPModule):
        model._apply(lambda tensor: tensor.detach())  # FSDP2 looks at its shards again, and pads uneven ones


def _at(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)
