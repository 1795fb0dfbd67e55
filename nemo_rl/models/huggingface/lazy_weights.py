"""Models as `from_pretrained` makes them, with their weights left in the files.

transformers decides everything: the class, which name of a file is which weight, what is missing and how that is drawn,
what is tied, what the buffers hold that no file has. Only the bytes are not read: each weight that a file holds is a
parameter on the meta device, everything else is real and on the CPU.
`models.dtensor.checkpoints.materialize` fills in the rest.

Invariant: read, the model equals the one of `from_pretrained` bit for bit.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.models.huggingface.checkpoint_names import groups_in_memory
from nemo_rl.models.huggingface.tensor_files import TensorFiles
from nemo_rl.utils.errors import CheckpointError

logger = logging.getLogger(__name__)

_METHOD = "_load_pretrained_model"
"""Where transformers reads the weights of a model that it has made on the meta device."""


@dataclass
class Unread:
    """What was not read.

    Attributes:
        files: the safetensors files of the model; none where its weights were read after all.
    """

    files: list[Path] = field(default_factory=list)


@contextmanager
def weights_left_in_files() -> Iterator[Unread]:
    """Let `from_pretrained` of the block make one model without reading its safetensors files.

    Models in other formats (`pytorch_model.bin`, quantised ones) are read as ever, and a log line says so.

    Raises:
        CheckpointError: a file is damaged, or holds a tensor whose shape is not the model's.
    """
    unread = Unread()
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
        unread.files = [Path(file) for file in files]
        return _match(model, TensorFiles(unread.files), load_config), None

    setattr(PreTrainedModel, _METHOD, staticmethod(leave))
    try:
        yield unread
    finally:
        setattr(PreTrainedModel, _METHOD, staticmethod(read))


def _match(model: PreTrainedModel, tensors: TensorFiles, load_config: Any) -> Any:
    """What transformers finds out in a load, from shapes alone."""
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
    """Tensors of the files that repeat, bit for bit, another one that the model ties them to.

    transformers ties two weights that the files both hold where they are equal, which it cannot see without bytes.
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
                "weights. tie_word_embeddings=false in its config.json says so.",
                type(model).__name__,
                target,
                source,
            )
            del tied[target]
    return repeated
