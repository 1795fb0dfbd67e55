"""Read and export checkpoints of the Megatron Core backend, without a model, a GPU or megatron.

A weights folder holds `iter_0000000` with the tensors of the whole model in the format `torch_dist`, the Hugging Face
configuration and tokenizer, and with LoRA also `adapter`. Invariant: an export contains every tensor of the checkpoint
once, with its adapter merged. One tensor is in memory at a time.
"""

import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from nemo_rl.config import CheckpointingConfig, PolicyConfig
from nemo_rl.distributed.ranks.shared_failure import reasons_of
from nemo_rl.files.safe_checkpoint import METADATA_FILE, only_plain_values, read_metadata
from nemo_rl.models.huggingface.folders import ADAPTER_FOLDER, adapter_scaling
from nemo_rl.models.huggingface.load import read_config
from nemo_rl.models.huggingface.sizes import count_parameters
from nemo_rl.models.huggingface.tensor_files import MAX_FILE_BYTES, write_model_files
from nemo_rl.models.megatron.checkpoints import ITERATION
from nemo_rl.models.training.low_rank import ADAPTER_PARAMETERS, merged
from nemo_rl.utils.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from nemo_rl.models.megatron.conversion.parts import RowLayout

_BROKEN = (OSError, RuntimeError, ValueError, KeyError, AssertionError, EOFError)


class SavedTensors:
    """Read the tensors of a checkpoint folder in the format `torch_dist`.

    Raises:
        CheckpointError: the folder is damaged, or in another format.
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
        """Return a tensor on the meta device with the shape and dtype of a stored tensor."""
        held = self._held[name]
        return torch.empty(held.size, dtype=held.properties.dtype, device="meta")

    def read(self, names: Iterable[str]) -> Tensor:
        """Read one tensor, or several tensors concatenated along their rows, to the CPU.

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
"""Name by which Megatron Core stores the transformer layer of a multi-token-prediction layer."""
_HALF = re.compile(r"_[wv]$")
"""Suffixes of the stored names of gate and up, the two halves of one parameter."""
_MAMBA_CONVOLUTION = re.compile(r"\.conv1d\.(weight|bias)(?=\.(?:x|B|C)$)")
_BLOCK = re.compile(r"(?:(?<=weight)|(?<=bias)|(?<=lora_B))\.(?:z|x|B|C|dt|query|key|value|beta|alpha)$")
"""Suffixes of the stored names of the blocks of a parameter in a Mamba-2 layer or gated delta net."""
_BLOCKS = (
    ("z", "x", "B", "C", "dt"),
    ("x", "B", "C"),
    ("query", "key", "value", "z", "beta", "alpha"),
    ("query", "key", "value"),
)
"""Names of the blocks of each parameter that is stored in blocks, in order."""
_IN_ORDER = ("_w", "_v", ".query", ".key", ".value", ".z", ".x", ".B", ".C", ".dt", ".beta", ".alpha")
"""Suffixes in the order of the parts in their parameter."""


def by_parameter(names: Iterable[str]) -> dict[str, list[str]]:
    """Group the names of stored tensors by the parameter of the whole model that contains them."""
    from nemo_rl.models.megatron.conversion.parts import own_name

    found: dict[str, list[str]] = {}
    for name in names:
        whole = _BLOCK.sub("", _MAMBA_CONVOLUTION.sub(r".conv1d_\1", _HALF.sub("", name)))
        parameter = own_name(whole.replace(".experts.experts.", ".experts.local_experts."))
        parameter = _MTP_LAYER.sub(r"\1mtp_model_layer.", parameter)
        found.setdefault(parameter, []).append(name)
    return {parameter: sorted(kept, key=_order) for parameter, kept in found.items()}


def block_rows(name: str, layout: "RowLayout") -> tuple[int, slice] | None:
    """Return the number of rows of an undivided parameter, and the rows of a stored block in it.

    Args:
        name: name of the stored tensor.
        layout: rows of the parameter.

    Returns:
        None if the tensor is not a block of a parameter with several blocks.
    """
    from nemo_rl.models.megatron.conversion.parts import ByHeads

    found = _BLOCK.search(name)
    if found is None or not isinstance(layout, ByHeads):
        return None
    sizes = layout.sizes
    block = next(each for each in _BLOCKS if len(each) == len(sizes) and found[0][1:] in each).index(found[0][1:])
    first = sum(sizes[:block])
    return sum(sizes), slice(first, first + sizes[block])


def stored_blocks(layout: "RowLayout") -> dict[str, int]:
    """Return the number of rows of each stored block of a projection, by its name. None for other layers."""
    from nemo_rl.models.megatron.conversion.parts import ByHeads

    if not isinstance(layout, ByHeads):
        return {}
    names = next(each for each in _BLOCKS if len(each) == len(layout.sizes))
    return dict(zip(names, layout.sizes, strict=True))


def _order(name: str) -> int:
    return next((number for number, suffix in enumerate(_IN_ORDER) if name.endswith(suffix)), 0)


_FLOAT32_BYTES, _HALF_BYTES = 4, 2


def checkpoint_bytes(policy: PolicyConfig, checkpointing: CheckpointingConfig) -> int | None:
    """Return a lower bound of a checkpoint's bytes, or None if the number of parameters is unknown.

    The bound includes weights, Adam's two moments or Muon's one, float32 copies of 16-bit weights, and a saved
    consolidated model.
    """
    parameters = count_parameters(policy.model_name)
    if parameters is None:
        return None
    full = policy.precision == "float32"
    weights = (_FLOAT32_BYTES if full else _HALF_BYTES) * parameters
    settings: Any = policy.megatron_cfg
    moments = 1 if settings.optimizer.is_muon else 2 * (settings.optimizer.optimizer == "adam")
    trained = 0 if policy.adapter_keys else parameters
    state = (moments + (not full)) * _FLOAT32_BYTES * trained
    return weights * (1 + checkpointing.save_consolidated) + (state if checkpointing.save_optimizer else 0)


def read_into(model: "PreTrainedModel", weights: Path) -> None:
    """Read a checkpoint into a model of transformers (`FolderBackend.read_into`).

    Megatron Core's tensors are converted to hub tensors as in an export, and then to the model's weights in memory.
    """
    from nemo_rl.models.huggingface.checkpoint_names import in_memory

    config = model.config
    hub = {name: tensor for name, tensor, _ in hub_tensors_of(weights, config)}
    own = model.state_dict()
    missing = set(own) - {name for name in own if name.endswith("lm_head.weight") and config.tie_word_embeddings}
    for name, value in in_memory(model, hub, hub.__getitem__):
        own[name].copy_(value)
        missing.discard(name)
    if missing:
        raise CheckpointError(f"{weights} does not fit {type(model).__name__}: it lacks {sorted(missing)[:5]}.")


def write_model(weights: Path, target: Path, dtype: torch.dtype | None) -> None:
    """Write a folder for `from_pretrained`, one tensor at a time (`FolderBackend.write_model`)."""
    config = read_config(weights)
    likes = {name: _as(like, dtype, kept) for name, like, kept in hub_tensors_of(weights, config, meta=True)}
    target.mkdir(parents=True, exist_ok=True)
    values = ((name, _as(value, dtype, kept)) for name, value, kept in hub_tensors_of(weights, config))
    write_model_files(target, likes, values, MAX_FILE_BYTES)
    for file in sorted(file for file in weights.iterdir() if file.is_file()):
        shutil.copyfile(file, target / file.name)
    config.dtype = dtype or next(like.dtype for like in likes.values() if like.is_floating_point())
    config.save_pretrained(target)


def _as(tensor: Tensor, dtype: torch.dtype | None, kept: bool) -> Tensor:
    return tensor if dtype is None or kept or not tensor.is_floating_point() else tensor.to(dtype)


def hub_tensors_of(
    weights: Path, config: "PretrainedConfig", *, meta: bool = False
) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield a checkpoint's tensors with the names and shapes of the hub.

    Args:
        weights: the weights folder of a checkpoint.
        meta: yield only shapes and dtypes, as tensors on the meta device.

    Yields:
        Name, tensor, and whether the tensor keeps its dtype in an export.

    Raises:
        CheckpointError: the folder is damaged, or its tensors do not fit the Hugging Face configuration.
    """
    from nemo_rl.models.huggingface.comparison import is_classifier
    from nemo_rl.models.megatron.conversion.rules import hub_tensors, rules_for

    saved = SavedTensors(weights / ITERATION)
    kept = by_parameter(saved.names)
    num_mtp_layers = len({name.split(".")[2] for name in kept if name.startswith("mtp.layers.")})
    rules = rules_for(config, has_scalar_head=is_classifier(config), num_mtp_layers=num_mtp_layers)
    adapters = {name: kept.pop(name) for name in list(kept) if name.endswith(ADAPTER_PARAMETERS)}
    scaling = adapter_scaling(weights / ADAPTER_FOLDER) if adapters else 0.0
    wanted = {rule.parameter for bundle in rules.bundles() for rule in bundle}
    copies = {rule.parameter for rule in rules.by_parameter.values() if rule.copy_of_tied}
    for names, problem in ((wanted - kept.keys(), "it lacks"), (kept.keys() - wanted - copies, "it also has")):
        if names:
            raise CheckpointError(
                f"{weights} is not the {config.model_type} of its config.json: {problem} {sorted(names)[:5]}."
            )

    def read(parameter: str) -> Tensor:
        if not meta:
            whole, layer = saved.read(kept[parameter]), parameter.removesuffix(".weight")
            if layer == parameter or f"{layer}.lora_A" not in adapters:
                return whole
            a, b = (saved.read(adapters[f"{layer}.{each}"]) for each in ADAPTER_PARAMETERS)
            return merged(whole, a, b, scaling)
        likes = [saved.like(name) for name in kept[parameter]]
        return likes[0] if len(likes) == 1 else torch.cat(likes)

    yield from hub_tensors(rules, read)
