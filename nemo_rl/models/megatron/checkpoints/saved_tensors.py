"""Read whole tensors of a `torch_dist` folder by name, one at a time, without megatron, a process group or a model.

Invariant: besides the requested tensor, at most one rank's part of it is in memory.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from nemo_rl.distributed.ranks.shared_failure import reasons_of
from nemo_rl.files.safe_checkpoint import METADATA_FILE, only_plain_values, read_metadata
from nemo_rl.utils.errors import CheckpointError

_BROKEN = (OSError, RuntimeError, ValueError, KeyError, AssertionError, EOFError)


class SavedTensors:
    """The tensors of a folder.

    Args:
        folder: folder in the format `torch_dist`.

    Raises:
        CheckpointError: the folder is damaged, or not in this format.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = dcp.FileSystemReader(folder)
        self._metadata = read_metadata(folder / METADATA_FILE)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        found = self._metadata.state_dict_metadata.items()
        self._held = {name: held for name, held in found if isinstance(held, TensorStorageMetadata)}
        self.names = list(self._held)
        """Names of all tensors in the folder."""

    def like(self, name: str) -> Tensor:
        """Return a tensor on the meta device with the shape and dtype of a stored one."""
        held = self._held[name]
        return torch.empty(held.size, dtype=held.properties.dtype, device="meta")

    def read(self, names: Iterable[str]) -> Tensor:
        """Read one tensor, or several stacked along their rows, to the CPU.

        Raises:
            CheckpointError: a file is damaged.
        """
        names = list(names)
        likes = [self.like(name) for name in names]
        if len(names) == 1:
            whole = torch.empty_like(likes[0], device="cpu")
            targets = {names[0]: whole}
        else:
            rows = [len(like) for like in likes]
            whole = torch.empty((sum(rows), *likes[0].shape[1:]), dtype=likes[0].dtype)
            targets = dict(zip(names, whole.split(rows), strict=True))
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(targets, self._metadata, is_coordinator=True)
        try:
            with only_plain_values():
                self._reader.read_data(planner.create_local_plan(), planner).wait()
        except dcp.CheckpointException as error:
            raise CheckpointError(f"{self._folder} is damaged: {reasons_of(error)}") from error
        except CheckpointError:
            raise
        except _BROKEN as error:
            raise CheckpointError(f"{self._folder} cannot be read: {type(error).__name__}: {error}") from error
        return whole


_MTP_LAYER = re.compile(r"^(mtp\.layers\.\d+\.)transformer_layer\.")
"""Name under which Megatron Core stores the transformer layer of a multi-token-prediction layer."""
_HALF = re.compile(r"_[wv]$")
"""Suffixes of the names of gate and up, which are stacked in one parameter."""


def by_parameter(names: Iterable[str]) -> dict[str, list[str]]:
    """Group tensor names by the parameter of the whole model that they store.

    Args:
        names: `SavedTensors.names`.
    """
    from nemo_rl.models.megatron.conversion.names import own_name

    found: dict[str, list[str]] = {}
    for name in names:
        parameter = own_name(_HALF.sub("", name).replace(".experts.experts.", ".experts.local_experts."))
        parameter = _MTP_LAYER.sub(r"\1mtp_model_layer.", parameter)
        found.setdefault(parameter, []).append(name)
    return {parameter: sorted(kept, key=lambda name: (name.endswith("_v"), name)) for parameter, kept in found.items()}
