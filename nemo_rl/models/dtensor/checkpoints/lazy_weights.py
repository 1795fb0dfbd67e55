"""Build models with `from_pretrained` without reading their weights, and read each rank's part of the weights later.

transformers chooses the class and maps the names in files to weights. It also initializes weights that are in no file,
ties weights and fills buffers. Only reading is skipped: each weight in a file becomes a parameter on the meta device,
and all other tensors get values on the CPU.

`materialize` runs after sharding. It allocates a rank's part of the weights on its final device and reads it from the
files tensor by tensor. A rank therefore never stores more than its part and one tensor, or one group of tensors that
are converted together.

Invariant: after the weights are read, the model equals that of `from_pretrained` bit for bit: every weight has the
value of the files, or was initialized by transformers if no file has it.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.models.dtensor.checkpoints.model_files import read_weights
from nemo_rl.models.huggingface.checkpoint_names import groups_in_memory
from nemo_rl.models.huggingface.tensor_files import TensorFiles
from nemo_rl.utils.errors import CheckpointError

logger = logging.getLogger(__name__)

_METHOD = "_load_pretrained_model"
"""Name of the method by which transformers reads the weights of a model on the meta device."""


@dataclass
class LazyWeights:
    """Files of a model whose weights have not been read yet."""

    files: list[Path] = field(default_factory=list)
    """The safetensors files of the model; empty if its weights have been read."""

    @cached_property
    def tensors(self) -> TensorFiles:
        """The tensors of the files. The files are opened once, to match names and to read."""
        return TensorFiles(self.files)


@contextmanager
def weights_left_in_files() -> Iterator[LazyWeights]:
    """Run a block in which `from_pretrained` makes a model without reading its safetensors files.

    Models in other formats (`pytorch_model.bin`, quantised ones) are read as usual, and a warning is logged.

    Raises:
        CheckpointError: a file is damaged, or has a tensor of another shape than the model.
    """
    lazy_weights = LazyWeights()
    read: Any = getattr(PreTrainedModel, _METHOD)

    def leave(
        model: PreTrainedModel, state_dict: Any, checkpoint_files: list[str] | None, load_config: Any, *rest: Any
    ) -> Any:
        files = checkpoint_files or []
        if load_config.is_quantized or not files or not all(file.endswith(".safetensors") for file in files):
            logger.warning(
                "The weights of %s are not in safetensors: every rank reads the whole model into host memory first. "
                "Converted to safetensors, each rank reads its part only.",
                load_config.pretrained_model_name_or_path,
            )
            return read(model, state_dict, checkpoint_files, load_config, *rest)
        lazy_weights.files = [Path(file) for file in files]
        return _match(model, lazy_weights.tensors, load_config), None

    setattr(PreTrainedModel, _METHOD, staticmethod(leave))
    try:
        yield lazy_weights
    finally:
        setattr(PreTrainedModel, _METHOD, staticmethod(read))


def _match(model: PreTrainedModel, tensors: TensorFiles, load_config: Any) -> Any:
    """Return what transformers reports about a load (missing and mismatched weights), computed only from shapes."""
    found = {name: tensors.like(name) for name in tensors}
    for extra in _tied_twice(model, tensors, load_config.weight_mapping or []):
        del found[extra]
    info, _ = convert_and_load_state_dict_in_model(model, found, replace(load_config, device_map={"": "meta"}))
    for name, theirs, ours in sorted(info.mismatched_keys):
        groups = [group for group in groups_in_memory(model, tensors) if group.target == name]
        source = next((source for group in groups for source in group.sources), name)
        raise CheckpointError(
            f"The files of {load_config.pretrained_model_name_or_path} do not fit {type(model).__name__} as its "
            f"configuration describes it: {name} has shape {tuple(ours)}, but {tuple(theirs)} in "
            f"{tensors.file_of.get(source, 'its files')}."
        )
    return info


def _tied_twice(model: PreTrainedModel, tensors: TensorFiles, rules: list[Any]) -> list[str]:
    """Return names of tensors in the files that are bit for bit equal to the tensor to which the model ties them.

    transformers ties two weights that are both in the files only if they are equal. Here it cannot compare them,
    because it does not read them.
    """
    groups = groups_in_memory(model, tensors, rules)
    source_of = {group.target: next(iter(group.sources)) for group in groups if group.converter is None}
    repeated = []
    tied: dict[str, str] = model.all_tied_weights_keys
    for target, source in list(tied.items()):
        if target not in source_of or source not in source_of:
            continue
        if tensors.equal(source_of[target], source_of[source]):
            repeated.append(source_of[target])
        else:
            logger.warning(
                "The configuration of %s ties %s to %s, but its files hold different values for them: they stay two "
                "weights. Set tie_word_embeddings=false in its config.json to silence this warning.",
                type(model).__name__,
                target,
                source,
            )
            del tied[target]
    return repeated


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
    """Allocate the tensors on the meta device, move all others to their device, and keep weights tied."""
    for parameter in [*model.parameters()]:
        if parameter.device != home:
            torch.utils.swap_tensors(parameter, nn.Parameter(_at(parameter, home), parameter.requires_grad))
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != device:
                setattr(module, name, _at(buffer, device))
    if isinstance(model, FSDPModule):
        model._apply(lambda tensor: tensor.detach())  # FSDP2 then reads its shards again and pads uneven ones


def _at(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)
