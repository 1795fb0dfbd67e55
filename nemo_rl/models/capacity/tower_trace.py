"""Predict the memory that images need in a forward and backward pass, from a run of the vision tower without weights.

`trace_tower` builds the model on torch's meta device, gives memory without values to the tower alone, and runs it on a
few patches. Of equal blocks, only one is run, so that a tower of any size takes a moment. The tower is not run on the
meta device, because towers read the sizes of images from tensors. The bytes that autograd saves grow linearly with the
number of patches. Invariant: modules that the run does not train save nothing.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.initialization import no_init_weights
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.config import PolicyConfig
from nemo_rl.data.images.families import TowerInputs, tower_inputs
from nemo_rl.models.capacity.memory_trace import Recorder
from nemo_rl.models.huggingface.layers import freeze_parts, parts_without_text
from nemo_rl.models.huggingface.load import auto_class, torch_dtype

_FEWEST_PATCHES = 64
"""Smallest number of patches of a run. With more patches, bytes that do not depend on their number are a small part."""


@dataclass(frozen=True)
class TowerTrace:
    """Memory of the modules of a model that read images."""

    frozen: int
    """Number of elements of the model's parameters that are not trained, without regard to adapters."""
    kept: float = 0.0
    """Bytes of each patch that are kept for the backward pass. 0 if these modules are not trained."""
    block: float = 0.0
    """Bytes of each patch of the intermediate values of the largest block."""
    patches_per_token: float = 0.0
    """Number of patches of each token that a feature replaces. 0 if the policy reads no images."""


_TRACES: dict[Any, TowerTrace] = {}


def trace_tower(config: PretrainedConfig, policy: PolicyConfig) -> TowerTrace:
    """Count the bytes that a policy needs for each patch of its images.

    Args:
        config: the whole configuration of a model with modules that read images or sound.
        policy: section with the number format and the parts that are trained.
    """
    frozen, lora = policy.dtensor_cfg.automodel_kwargs.freeze_config, policy.dtensor_cfg.lora_cfg.enabled
    key = (config.to_json_string(use_diff=False), policy.is_vlm, policy.precision, lora, frozen.model_dump_json())
    if key not in _TRACES:
        _TRACES[key] = _trace(config, policy)
    return _TRACES[key]


def _trace(config: PretrainedConfig, policy: PolicyConfig) -> TowerTrace:
    hf = _without_values(config, policy)
    freeze_parts(hf, policy)
    frozen = sum(parameter.numel() for parameter in hf.parameters() if not parameter.requires_grad)
    if not policy.is_vlm:
        return TowerTrace(frozen)
    count = -(-_FEWEST_PATCHES // tower_inputs(config, 1).num_patches)
    inputs = tower_inputs(config, count)
    kept = 0.0 if policy.dtensor_cfg.lora_cfg.enabled else sum(_saved(hf, inputs))
    *blocks, _ = _saved(_without_values(config, policy), inputs)
    return TowerTrace(frozen, kept, max(blocks), inputs.num_patches / inputs.num_features)


def _without_values(config: PretrainedConfig, policy: PolicyConfig) -> PreTrainedModel:
    """Build a model on the meta device, with all parts trainable."""
    with torch.device("meta"), no_init_weights():
        hf: PreTrainedModel = auto_class(config).from_config(deepcopy(config), dtype=torch_dtype(policy.precision))
        hf.tie_weights()
    return hf.train()


def _saved(hf: PreTrainedModel, inputs: TowerInputs) -> list[float]:
    """Return the bytes of each patch that autograd saves, in each block of the tower and then outside the blocks."""
    for part in parts_without_text(hf):
        part.to_empty(device="cpu")
        for buffer in part.buffers():
            buffer.zero_()  # indices must be valid
    recorder = Recorder(hf, _blocks(hf))
    with recorder.recording():
        hf.get_image_features(**inputs.arguments)  # type: ignore[operator]
    blocks = recorder.all_layers()
    sizes = [block.outside + block.into_blocks + block.inside + block.keys_values for block in blocks]
    return [size / inputs.num_patches for size in (*sizes, recorder.others)]


def _blocks(hf: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated blocks of the tower."""
    lists = [each for part in parts_without_text(hf) for each in part.modules() if isinstance(each, nn.ModuleList)]
    return max((list(each) for each in lists), key=len)
