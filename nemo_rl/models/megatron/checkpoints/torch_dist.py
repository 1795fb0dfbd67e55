"""Write and read sharded state dicts of Megatron Core as `torch_dist` folders.

Megatron Core describes and checks the state. torch's writer writes it in the calling thread, because Megatron Core's
writer first starts a process, which takes seconds and needs an importable main module.
`megatron.core.dist_checkpointing.load` can read the folders too.

Invariant: if one rank cannot write or read, all ranks raise an error.
"""

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch import Tensor

from nemo_rl.distributed.ranks.shared_failure import raise_on_all_ranks, reasons_of, require_readable
from nemo_rl.files.safe_checkpoint import METADATA_FILE, only_plain_values, read_metadata
from nemo_rl.files.safe_load import load_plain
from nemo_rl.models.training.torch_backend import Keep, Write, as_it_is
from nemo_rl.utils.errors import CheckpointError

OPTIMIZER_FORMAT = "fully_reshardable"
"""Format in which each moment is a tensor with its parameter's shape, so that any mesh can read it."""
CONTENT: Mapping[str, Any] = {
    "singleton_local_shards": True,  # names of tensors contain layer and expert
    "distrib_optim_sharding_type": OPTIMIZER_FORMAT,
    "chained_optim_avoid_prefix": True,
}
"""Settings that determine names and shapes in a folder, which Megatron Core stores there."""
_REFUSED = {
    "dp_reshardable": "after loading it, training would continue with wrong numbers",
    "fully_sharded_model_space": "Megatron Core neither writes nor reads it any more",
}
_EXTRA_STATE = "_extra_state"

type Sharded = dict[str, Any]
"""Nested dicts and lists whose leaves describe the location of a rank's part in a whole tensor."""


class _Prepared(TorchDistSaveShardedStrategy):
    """Strategy that keeps the parts of this rank instead of writing them."""

    def __init__(self, keep: Keep) -> None:
        super().__init__()
        self._keep = keep
        self.parts: dict[str, list[ShardedBase]] = {}
        """Parts of this rank, by name."""

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "") -> AsyncRequest:
        """Keep the state. `dist_checkpointing.save` calls this after it has checked the state."""
        self.parts, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        for name, parts in self.parts.items():
            for index, part in enumerate(parts):
                if isinstance(part, ShardedTensor):
                    part.data = self._keep(f"{name}.{index}", part.data.detach())
        return AsyncRequest(None, (), [])


class _Planner(MCoreSavePlanner):
    """Planner that applies a function to each tensor when it is written."""

    def __init__(self, late: Keep) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._late = late

    def transform_object(self, write_item: Any, object: Any) -> Any:
        """Return the object to write. torch's writer calls this for each item."""
        return self._late(write_item.index.fqn, object) if isinstance(object, Tensor) else object


def prepare(folder: Path, state: Sharded, keep: Keep = as_it_is, late: Keep = as_it_is) -> Write:
    """Prepare to write this rank's sharded state to a folder. The call is collective.

    Args:
        folder: folder to write, which is created if it does not exist.
        keep: applied to every tensor that this rank will write.
        late: applied to each tensor when it is written. If it is given, each tensor gets its own file, so that its
            memory is freed after it is written.

    Returns:
        A function that writes the folder. It raises a CheckpointError on all ranks if a rank cannot write its files.
    """
    with raise_on_all_ranks():
        folder.mkdir(parents=True, exist_ok=True)
    prepared = _Prepared(keep)
    with raise_on_all_ranks(), _named(folder, "cannot be prepared"):
        dist_checkpointing.save(
            state, str(folder), prepared, async_sharded_save=True, content_metadata=dict(CONTENT), async_strategy=None
        )
    return partial(_write, folder, prepared.parts, late)


def _write(
    folder: Path, parts: dict[str, list[ShardedBase]], late: Keep, group: dist.ProcessGroup | None = None
) -> None:
    # # torch's writer keeps written tensors in memory until it closes the file.
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=late is as_it_is)
    with _named(folder, "cannot be written"):  # if one rank fails, torch's writer raises on all
        dcp.save(
            mcore_to_pyt_state_dict(parts),
            storage_writer=writer,
            planner=_Planner(late),
            process_group=group,
        )
    with raise_on_all_ranks(group):
        if dist.get_rank() == 0:
            save_config(CheckpointingConfig("torch_dist"), str(folder))


def read(folder: Path, state: Sharded) -> dict[str, Any]:
    """Read this rank's part of a folder into the tensors of `state`. The call is collective.

    Args:
        folder: folder that `prepare` wrote, on any mesh.

    Returns:
        The tensors in the structure of `state`.

    Raises:
        CheckpointError: the folder is damaged, in another format, or of another model.
    """
    with raise_on_all_ranks(), _named(folder, "cannot be read"), only_plain_values():
        _check_format(folder)
    with raise_on_all_ranks(), _named(folder, "does not fit, or is damaged"), only_plain_values():
        loaded, lacked, unknown = dist_checkpointing.load(state, str(folder), strict=StrictHandling.RETURN_ALL)
        for names, problem in ((unknown, "it lacks"), (lacked, "this model has no")):
            found = sorted(name for name in names if not name.endswith(_EXTRA_STATE))
            if found:
                raise CheckpointError(f"{folder} is of another model: {problem} {', '.join(found[:5])}.")
    return {name: value for name, value in loaded.items() if name in state}


def _check_format(folder: Path) -> None:
    read_metadata(folder / METADATA_FILE)
    common = folder / COMMON_STATE_FNAME
    if common.exists():  # written by older releases; Megatron Core may execute its code
        load_plain(common)
    content = dist_checkpointing.load_content_metadata(str(folder)) or {}
    found = content.get("distrib_optim_sharding_type", OPTIMIZER_FORMAT)
    if found != OPTIMIZER_FORMAT:
        raise CheckpointError(
            f"{folder} has its optimizer state in the format {found}: {_REFUSED.get(found, 'it is unknown here')}. "
            f"Save it with {OPTIMIZER_FORMAT}, or remove the optimizer folder to start from the weights only."
        )


@contextmanager
def _named(folder: Path, problem: str) -> Iterator[None]:
    """Run a block and convert its errors to a CheckpointError that names the folder."""
    try:
        yield
    except CheckpointError:
        raise
    except dcp.CheckpointException as error:
        require_readable(error)
        raise CheckpointError(f"{folder} {problem}: {reasons_of(error)}") from error
    except (
        CheckpointingException,
        OSError,
        RuntimeError,
        ValueError,
        KeyError,
        AssertionError,
        EOFError,
        pickle.UnpicklingError,
    ) as error:
        raise CheckpointError(f"{folder} {problem}: {type(error).__name__}: {error}") from error
