"""Read and write a draft model, as vLLM and others load it, and the state of its optimizer.

Layout (W = weights folder, O = optimizer folder of a checkpoint):

    W/draft/            config.json and model.safetensors under published names
    O/draft.pt          moments of its optimizer under the names of its parameters

One rank writes; every rank reads its part. So a checkpoint fits any number of ranks.
"""

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from nemo_rl.distributed.ranks.shared_failure import raise_on_all_ranks
from nemo_rl.files.safe_load import load_plain
from nemo_rl.models.draft.head import EMBEDDING, TO_TARGET, DraftHead
from nemo_rl.models.draft.names import in_module, published
from nemo_rl.models.huggingface.tensor_files import TensorFiles
from nemo_rl.models.training.checkpoint_writes import Write
from nemo_rl.models.training.interfaces import CheckpointPaths
from nemo_rl.utils.errors import CheckpointError

logger = logging.getLogger(__name__)

FOLDER, MOMENTS = "draft", "draft.pt"
_NOT_READ = ("t2d",)
"""Which of the policy's tokens can be proposed; `d2t` says the same."""
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def read_weights(head: DraftHead, folder: Path) -> None:
    """Read the weights of a folder into a draft model in place; collective.

    Raises:
        CheckpointError: the folder lacks a tensor, or one has another shape.
    """
    files = sorted(folder.glob("*.safetensors"))
    tensors = TensorFiles(files)
    stored = {in_module(name): name for name in tensors if name not in _NOT_READ}
    wanted = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    stored.pop(EMBEDDING, None)
    if head.shape.proposes_all:
        stored.pop(TO_TARGET, None)
    lacking = wanted.keys() - stored.keys()
    if not files or lacking:
        raise CheckpointError(
            f"{folder} is no draft model of this kind: it lacks {', '.join(sorted(lacking)[:5]) or '*.safetensors'}."
        )
    unknown = stored.keys() - wanted.keys()
    if unknown:
        raise CheckpointError(f"{folder} has tensors that the draft model lacks: {', '.join(sorted(unknown)[:5])}.")
    for name, source in stored.items():
        shape = tuple(tensors.like(source).shape)
        if shape != wanted[name]:
            raise CheckpointError(f"{folder}: {source} has shape {shape}, not {wanted[name]}.")
    read: dict[str, Any] = {name: tensors.read(source) for name, source in stored.items()}
    set_model_state_dict(head, read, options=StateDictOptions(full_state_dict=True, strict=False))


def prepared(head: DraftHead, optimizer: Optimizer, paths: CheckpointPaths) -> Iterator[Write]:
    """Yield the writes of the draft model, with copies on one rank; collective.

    Args:
        head: the draft model.
        optimizer: its optimizer.
        paths: folders of the checkpoint; without an optimizer folder only the weights are written.
    """
    yield partial(_write_weights, head, _copies(get_model_state_dict(head, options=_WHOLE)), paths.weights / FOLDER)
    if paths.optimizer is not None:
        state = _copies(get_optimizer_state_dict(head, optimizer, options=_WHOLE)) if optimizer.state else {}
        yield partial(_write_moments, state, paths.optimizer / MOMENTS)


def load(head: DraftHead, optimizer: Optimizer, paths: CheckpointPaths) -> None:
    """Read what the writes of `prepared` wrote; a checkpoint without a draft model changes nothing; collective.

    Raises:
        CheckpointError: it holds the draft model of another shape.
    """
    folder = paths.weights / FOLDER
    if not folder.is_dir():
        logger.warning("%s has no draft model (policy.draft): it starts with its first weights.", paths.weights)
        return
    read_weights(head, folder)
    if paths.optimizer is not None and (paths.optimizer / MOMENTS).exists():
        state = load_plain(paths.optimizer / MOMENTS)
        if state:
            set_optimizer_state_dict(head, optimizer, state, options=StateDictOptions(full_state_dict=True))


def _copies(value: Any) -> Any:
    """Copy dicts, lists and tensors, so that later updates do not change them."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copies(below) for key, below in value.items()}
    return [_copies(below) for below in value] if isinstance(value, list) else value


def _write_weights(
    head: DraftHead, tensors: dict[str, Tensor], folder: Path, group: dist.ProcessGroup | None = None
) -> None:
    shape = head.shape
    with raise_on_all_ranks(group):
        if dist.get_rank() == 0:
            shape.save_config(folder)
            named = {published(name, shape.num_layers): tensor.contiguous() for name, tensor in tensors.items()}
            save_file(named, folder / "model.safetensors", metadata={"format": "pt"})


def _write_moments(state: dict[str, Any], file: Path, group: dist.ProcessGroup | None = None) -> None:
    with raise_on_all_ranks(group):
        if dist.get_rank() == 0:
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, file)
