"""Sharded state dicts of Megatron Core in folders, in the format `torch_dist`, and back.

Megatron Core describes and checks what is saved; torch's own writer writes it, in the calling thread, because Megatron
Core's starts a process first, which takes seconds and wants a main module that can be imported. Folders are the same:
`megatron.core.dist_checkpointing.load` reads them.

Invariant: where one rank cannot write or read, all ranks raise.
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

from nemo_rl.distributed.ranks.shared_failure import failing_together, reasons_of, require_readable
from nemo_rl.files.safe_checkpoint import METADATA_FILE, only_plain_values, read_metadata
from nemo_rl.files.safe_load import load_plain
from nemo_rl.models.training.checkpoint_writes import Keep, Write, as_it_is
from nemo_rl.utils.errors import CheckpointError

OPTIMIZER_FORMAT = "fully_reshardable"
"""Each moment is a tensor of its parameter's shape, so that any mesh reads what another one wrote."""
CONTENT: Mapping[str, Any] = {
    "singleton_local_shards": True,  # every layer and every expert under a name of its own
    "distrib_optim_sharding_type": OPTIMIZER_FORMAT,
    "chained_optim_avoid_prefix": True,
}
"""How names and shapes in the folders come about; Megatron Core keeps it in them."""
_REFUSED = {
    "dp_reshardable": "training goes on with wrong numbers behind a load of it",
    "fully_sharded_model_space": "Megatron Core neither writes nor reads it any more",
}
_EXTRA_STATE = "_extra_state"

type Sharded = dict[str, Any]
"""Nested dicts and lists whose leaves say where in a whole tensor a rank's part lies."""


class _Prepared(TorchDistSaveShardedStrategy):
    """Keeps what this rank has to write, instead of writing it.

    Args:
        keep: applied to every tensor.

    Attributes:
        parts: by name.
    """

    def __init__(self, keep: Keep) -> None:
        super().__init__()
        self._keep = keep
        self.parts: dict[str, list[ShardedBase]] = {}

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "") -> AsyncRequest:
        """Called by `dist_checkpointing.save` with what has passed its checks."""
        self.parts, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        for name, parts in self.parts.items():
            for index, part in enumerate(parts):
                if isinstance(part, ShardedTensor):
                    part.data = self._keep(f"{name}.{index}", part.data.detach())
        return AsyncRequest(None, (), [])


class _Planner(MCoreSavePlanner):
    """Says what is written in a tensor's place, when it is its turn.

    Args:
        late: applied to the tensor.
    """

    def __init__(self, late: Keep) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._late = late

    def transform_object(self, write_item: Any, object: Any) -> Any:
        """Called by torch's writer with what it is about to write."""
        return self._late(write_item.index.fqn, object) if isinstance(object, Tensor) else object


def prepare(folder: Path, state: Sharded, keep: Keep = as_it_is, late: Keep = as_it_is) -> Write:
    """Prepare a folder; collective.

    Args:
        folder: made if it is missing.
        state: what this rank holds.
        keep: applied to every tensor that this rank will write.
        late: applied to each of them when it is written, into a file of its own: what it returns is held no longer.

    Returns:
        Writes it, and raises a CheckpointError on all ranks where one of them could not write its files.
    """
    with failing_together():
        folder.mkdir(parents=True, exist_ok=True)
    prepared = _Prepared(keep)
    with failing_together(), _named(folder, "cannot be prepared"):
        dist_checkpointing.save(
            state, str(folder), prepared, async_sharded_save=True, content_metadata=dict(CONTENT), async_strategy=None
        )
    return partial(_write, folder, prepared.parts, late)


def _write(
    folder: Path, parts: dict[str, list[ShardedBase]], late: Keep, group: dist.ProcessGroup | None = None
) -> None:
    # Torch's writer holds what it has written until it closes the file.
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=late is as_it_is)
    with _named(folder, "cannot be written"):  # where one rank fails, torch's writer raises on all
        dcp.save(
            mcore_to_pyt_state_dict(parts),
            storage_writer=writer,
            planner=_Planner(late),
            process_group=group,
        )
    with failing_together(group):
        if dist.get_rank() == 0:
            save_config(CheckpointingConfig("torch_dist"), str(folder))


def read(folder: Path, state: Sharded) -> dict[str, Any]:
    """Read this rank's part of a folder, into the tensors of `state`; collective.

    Args:
        folder: what `prepare` wrote, on any mesh.
        state: what this rank wants, on this mesh.

    Returns:
        The tensors in the structure of `state`.

    Raises:
        CheckpointError: the folder is damaged, in another format, or of another model.
    """
    with failing_together(), _named(folder, "cannot be read"), only_plain_values():
        _check_format(folder)
    with failing_together(), _named(folder, "does not fit, or is damaged"), only_plain_values():
        loaded, lacked, unknown = dist_checkpointing.load(state, str(folder), strict=StrictHandling.RETURN_ALL)
        for names, problem in ((unknown, "it lacks"), (lacked, "this model has no")):
            found = sorted(name for name in names if not name.endswith(_EXTRA_STATE))
            if found:
                raise CheckpointError(f"{folder} is of another model: {problem} {', '.join(found[:5])}.")
    return {name: value for name, value in loaded.items() if name in state}


def _check_format(folder: Path) -> None:
    read_metadata(folder / METADATA_FILE)
    common = folder / COMMON_STATE_FNAME
    if common.exists():  # written by older releases of Megatron Core; an environment variable lets it execute code
        load_plain(common)
    content = dist_checkpointing.load_content_metadata(str(folder)) or {}
    found = content.get("distrib_optim_sharding_type", OPTIMIZER_FORMAT)
    if found != OPTIMIZER_FORMAT:
        raise CheckpointError(
            f"{folder} has its optimizer state in the format {found}: {_REFUSED.get(found, 'it is unknown here')}. "
            f"Save it with {OPTIMIZER_FORMAT}, or remove the optimizer folder to start with the weights alone."
        )


@contextmanager
def _named(folder: Path, problem: str) -> Iterator[None]:
    """Any way in which a folder fails, as an error that names it."""
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
