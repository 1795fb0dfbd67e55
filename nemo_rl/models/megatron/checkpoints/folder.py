"""Read and export checkpoints of the Megatron Core backend without a model, a GPU or megatron.

A weights folder holds `iter_0000000` with the tensors of the whole model in the format `torch_dist`, the Hugging Face
configuration and tokenizer, and with LoRA also `adapter`. Invariant: an export has every tensor of the checkpoint
once, with its adapter merged, and is written one tensor at a time, from front to back.
"""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nemo_rl.config import CheckpointingConfig, PolicyConfig
from nemo_rl.files.manifest import find_damage
from nemo_rl.files.safe_checkpoint import METADATA_FILE
from nemo_rl.models.huggingface.folders import CONSOLIDATED_FOLDER, MODEL_FOLDER, TOKENIZER_FILES, require_empty
from nemo_rl.models.huggingface.peft_folder import ADAPTER_FOLDER, adapter_scaling
from nemo_rl.models.huggingface.sizes import count_parameters
from nemo_rl.models.huggingface.tensor_files import MAX_FILE_BYTES, write_model_files
from nemo_rl.models.megatron.checkpoints.saved_tensors import SavedTensors, by_parameter
from nemo_rl.models.training.low_rank import ADAPTER_PARAMETERS, merged
from nemo_rl.utils.errors import CheckpointError

if TYPE_CHECKING:  # see `models.training.backends`
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from nemo_rl.models.huggingface.comparison import ExportCheck

logger = logging.getLogger(__name__)

ITERATION = "iter_0000000"
"""Subfolder of a weights folder that holds the tensors."""
_FLOAT32_BYTES, _HALF_BYTES = 4, 2


def find_weights(path: Path) -> Path:
    """Return the weights folder, which holds `iter_0000000`.

    Args:
        path: a step folder, its `policy`, `policy/weights` or `policy/weights/iter_0000000`.

    Raises:
        CheckpointError: none of these holds weights.
    """
    given = path.expanduser()
    for folder in (given, given / "weights", given / "policy" / "weights", given.parent):
        if (folder / ITERATION / METADATA_FILE).exists() and (folder != given.parent or given.name == ITERATION):
            return folder
    raise CheckpointError(
        f"{str(given)!r} is no policy checkpoint of Megatron Core: neither it nor its policy/weights has a folder "
        f"{ITERATION} with {METADATA_FILE}. Give a step folder, for example results/grpo/step_10, or its "
        "policy/weights."
    )


def complete_checkpoint(weights: Path, tokenizer: "PreTrainedTokenizerBase", precision: str | None) -> None:
    """Write the tokenizer into the weights folder, and optionally a copy in `precision` into `model/consolidated`."""
    tokenizer.save_pretrained(str(weights))
    if precision is not None:
        _export(weights, weights / MODEL_FOLDER / CONSOLIDATED_FOLDER, precision)


def checkpoint_bytes(policy: PolicyConfig, checkpointing: CheckpointingConfig) -> int | None:
    """Return a lower bound: weights, Adam's two moments and float32 weights, and a consolidated model if saved."""
    parameters = count_parameters(policy.model_name)
    if parameters is None:
        return None
    full = policy.precision == "float32"
    weights = (_FLOAT32_BYTES if full else _HALF_BYTES) * parameters
    settings: Any = policy.megatron_cfg
    has_moments = settings.optimizer.optimizer == "adam"
    trained = 0 if policy.adapter_keys else parameters
    state = (2 * has_moments + (not full)) * _FLOAT32_BYTES * trained
    return weights * (1 + checkpointing.save_consolidated) + (state if checkpointing.save_optimizer else 0)


def export(weights: Path, target: Path, tokenizer_name: str | None = None, dtype: str | None = None) -> None:
    """Write a folder that `from_pretrained` and engines load; see `TrainingBackend.export`.

    Raises:
        CheckpointError: the target already holds files, there is no tokenizer, a file of the weights is damaged, or
            the weights do not fit the configuration in their folder.
        ConfigError: the dtype is unknown.
    """
    from transformers import AutoTokenizer

    require_empty(target)
    if tokenizer_name is None and not _beside(weights, TOKENIZER_FILES):
        raise CheckpointError(f"{weights} has no tokenizer. Name one: policy.tokenizer.name in the file of --config.")
    damage = find_damage(weights.absolute().parents[1], "policy/weights/")
    if damage:
        raise CheckpointError(f"{weights} is damaged: {'; '.join(damage)}. Export another checkpoint.")
    _export(weights, target, dtype)
    if not _beside(weights, TOKENIZER_FILES):
        AutoTokenizer.from_pretrained(tokenizer_name).save_pretrained(target)
    logger.info("Exported %s to %s.", weights, target)


def verify_export(weights: Path, target: Path) -> "ExportCheck":
    """Compare the outputs of an exported model with those of the checkpoint, in float32 on the CPU.

    The checkpoint is loaded into a model with random weights by transformers' rules for names in memory, the exported
    folder by `from_pretrained`. Both use the same rules between Megatron Core and the hub.

    Raises:
        CheckpointError: the weights do not fit the model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    from nemo_rl.models.huggingface.checkpoint_names import in_memory
    from nemo_rl.models.huggingface.comparison import compare_models

    config = AutoConfig.from_pretrained(weights)
    kind: Any = AutoModelForSequenceClassification if has_scalar_head(config) else AutoModelForCausalLM
    trained = kind.from_config(config, dtype=torch.float32).eval()
    hub = {name: tensor for name, tensor, _ in hub_tensors_of(weights, config)}
    own = trained.state_dict()
    missing = set(own) - {name for name in own if name.endswith("lm_head.weight") and config.tie_word_embeddings}
    for name, value in in_memory(trained, hub, hub.__getitem__):
        own[name].copy_(value)
        missing.discard(name)
    if missing:
        raise CheckpointError(f"{weights} does not fit {type(trained).__name__}: it lacks {sorted(missing)[:5]}.")
    exported = kind.from_pretrained(target, dtype=torch.float32).eval()
    return compare_models(trained, exported, AutoTokenizer.from_pretrained(target))


def _export(weights: Path, target: Path, dtype: str | None) -> None:
    from transformers import AutoConfig

    from nemo_rl.models.huggingface.load import torch_dtype

    config = AutoConfig.from_pretrained(weights)
    wanted = None if dtype is None else torch_dtype(dtype)
    likes = {name: _as(like, wanted, kept) for name, like, kept in hub_tensors_of(weights, config, meta=True)}
    target.mkdir(parents=True, exist_ok=True)
    values = ((name, _as(value, wanted, kept)) for name, value, kept in hub_tensors_of(weights, config))
    write_model_files(target, likes, values, MAX_FILE_BYTES)
    for file in _beside(weights):
        shutil.copyfile(file, target / file.name)
    config.dtype = wanted or next(like.dtype for like in likes.values() if like.is_floating_point())
    config.save_pretrained(target)


def has_scalar_head(config: "PretrainedConfig") -> bool:
    """Return whether a configuration is that of a reward model."""
    from nemo_rl.models.huggingface.comparison import SCORING_SUFFIX

    return any(name.endswith(SCORING_SUFFIX) for name in config.architectures or ())


def _beside(weights: Path, names: tuple[str, ...] | None = None) -> list[Path]:
    """List the files in the weights folder, optionally only those with the given names."""
    files = sorted(file for file in weights.iterdir() if file.is_file())
    return [file for file in files if names is None or file.name in names]


def _as(tensor: Tensor, dtype: torch.dtype | None, kept: bool) -> Tensor:
    return tensor if dtype is None or kept or not tensor.is_floating_point() else tensor.to(dtype)


def hub_tensors_of(
    weights: Path, config: "PretrainedConfig", *, meta: bool = False
) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield a checkpoint's tensors under the names and shapes of the hub.

    Args:
        weights: the weights folder.
        config: configuration of the model.
        meta: yield only shapes and dtypes, as tensors on the meta device.

    Yields:
        Name, tensor, and whether it keeps its dtype.

    Raises:
        CheckpointError: the folder is damaged, or its tensors do not fit the configuration.
    """
    from nemo_rl.models.megatron.conversion.rules import hub_tensors, rules_for

    rules = rules_for(config, has_scalar_head=has_scalar_head(config))
    saved = SavedTensors(weights / ITERATION)
    kept = by_parameter(saved.names)
    adapters = {name: kept.pop(name) for name in list(kept) if name.endswith(ADAPTER_PARAMETERS)}
    scaling = adapter_scaling(weights / ADAPTER_FOLDER) if adapters else 0.0
    wanted = {rule.parameter for bundle in rules.bundles() for rule in bundle}
    copies = {rule.parameter for rule in rules.by_parameter.values() if rule.copy_of_tied}
    for names, problem in ((wanted - kept.keys(), "it lacks"), (kept.keys() - wanted - copies, "it also has")):
        if names:
            raise CheckpointError(
                f"{weights} is no {config.model_type} of its config.json: {problem} {sorted(names)[:5]}."
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
