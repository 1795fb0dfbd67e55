"""Round models to bfloat16 as a trainer does."""

import torch
from transformers import PreTrainedModel

from nemo_rl.models.huggingface.load import hold_in_float32


def in_bfloat16(model: PreTrainedModel) -> PreTrainedModel:
    """Round a float32 model as transformers does, and keep what has to stay; buffers stay too."""
    kept = {name: each.detach().clone() for name, each in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    hold_in_float32(model, torch.bfloat16)
    for name, parameter in model.named_parameters():
        if parameter.dtype is torch.float32:
            parameter.data = kept[name]
    return model
