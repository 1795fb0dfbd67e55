"""Merge a LoRA adapter into its base model, write the result for `transformers` and vLLM, and verify it.

The adapter was saved by this library or by PEFT. A checkpoint of this library that also has merged weights is exported
by `training_backend` instead. Invariant: weights are merged in float32 as `W + (alpha / r) B A`. `verify_merged`
compares the merged model with the base model and its unmerged adapter.
"""

import json
import logging
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.config import find_path
from nemo_rl.data.tokenizer import ensure_distinct_pad_token, load_tokenizer
from nemo_rl.files.trusted_code import copy_code, may_run
from nemo_rl.host.waiting_log import StillWaiting
from nemo_rl.models.dtensor.lora import attach_adapter, is_scoring_adapter, merge_adapters, read_adapter_config
from nemo_rl.models.dtensor.training_backend import DTensorTraining
from nemo_rl.models.huggingface.comparison import ExportCheck, compare_models, is_classifier
from nemo_rl.models.huggingface.folders import (
    ADAPTER_FOLDER,
    CONFIG_FILE,
    MODEL_FOLDER,
    PEFT_PREFIX,
    WEIGHTS_FILE,
    require_empty,
    save_tokenizer,
)
from nemo_rl.models.huggingface.layers import SCORE_HEAD
from nemo_rl.models.huggingface.load import (
    auto_class,
    load_causal_lm,
    load_model_config,
    load_scoring_model,
    names_of_scores,
    read_config,
    torch_dtype,
)
from nemo_rl.models.huggingface.tensor_files import TensorFiles, model_folder
from nemo_rl.utils.errors import CheckpointError

logger = logging.getLogger(__name__)

MERGE_TOLERANCE = 1e-4
"""Tolerance, larger than `comparison.VERIFY_TOLERANCE` because the two computations sum in different orders."""


@dataclass(frozen=True)
class AdapterSource:
    """An adapter with its base model and tokenizer."""

    folder: Path
    """Folder with adapter_config.json and adapter_model.safetensors."""
    base: str
    """Hugging Face id or folder of the model that the adapter was trained on."""
    tokenizer: str
    """Hugging Face id or folder of the tokenizer."""


def find_adapter(path: str | Path) -> Path:
    """Return the folder of an adapter, given that folder or a folder above it.

    Args:
        path: a step folder, its `policy` or `policy/weights`, or the adapter's folder.

    Raises:
        CheckpointError: none of these holds an adapter.
    """
    given = Path(path).expanduser()
    folders = (given, *(given / above / ADAPTER_FOLDER for above in ("", "weights", "policy/weights")))
    for folder in folders:
        if (folder / CONFIG_FILE).exists():
            return folder
    raise CheckpointError(
        f"{str(given)!r} holds no LoRA adapter: neither it nor its policy/weights/{ADAPTER_FOLDER} has a "
        f"{CONFIG_FILE}. Give a step folder of a run with policy.dtensor_cfg.lora_cfg.enabled=true, or a folder saved "
        "by PEFT."
    )


def adapter_source(adapter: str | Path, base: str | None = None, model_name: str | None = None) -> AdapterSource:
    """Find the adapter, its base and its tokenizer.

    Args:
        adapter: path that `find_adapter` accepts.
        base: id or folder of a model, or a checkpoint of full training. If None, `model_name`, or the base model that
            the adapter names.
        model_name: model whose tokenizer is used; if None, the base model.

    Raises:
        CheckpointError: there is no adapter, or a checkpoint given as base holds no weights.
    """
    folder = find_adapter(adapter)
    named = base or model_name or read_adapter_config(folder).get("base_model_name_or_path")
    if not named:
        raise CheckpointError(f"{folder / CONFIG_FILE} names no base model. Name it with --base-ckpt.")
    found = find_path(named)
    if found is not None and not (found / "config.json").exists():
        found = DTensorTraining().find_weights(found) / MODEL_FOLDER
    resolved = str(found or named)
    return AdapterSource(folder, resolved, str(find_path(model_name) or model_name) if model_name else resolved)


def export_merged(source: AdapterSource, target: Path, dtype: str | None = None) -> None:
    """Write base and adapter as one merged model.

    Args:
        target: a new or empty folder.
        dtype: number format of the weights, for example "bfloat16"; if None, float32.

    Raises:
        CheckpointError: the target already holds files, or the adapter does not fit the base.
        ConfigError: the base cannot be loaded, or the dtype is unknown.
    """
    require_empty(target)
    wanted = torch_dtype(dtype or "float32")

    def merge() -> None:
        model = _adapted(source)
        merge_adapters(model)
        nn.Module.to(model, wanted).save_pretrained(target)
        copy_code(str(model.config.name_or_path), target)
        save_tokenizer(load_tokenizer(source.tokenizer), target)

    model_folder(source.base)  # download before the wait below, because a download logs its own progress
    with StillWaiting(f"the merge of {source.folder} into {source.base}", "it is running") as progress:
        progress.during(merge)
    logger.info("Merged %s into %s: %s.", source.folder, source.base, target)


def export_adapter(source: AdapterSource, target: Path) -> None:
    """Copy only the adapter, in PEFT's format, with the name of its base model.

    Args:
        target: a new or empty folder.

    Raises:
        CheckpointError: the target already holds files, or the source is not a plain LoRA adapter.
    """
    require_empty(target)
    described = read_adapter_config(source.folder) | {"base_model_name_or_path": source.base}
    shutil.copytree(source.folder, target, dirs_exist_ok=True)
    (target / CONFIG_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def verify_merged(source: AdapterSource, target: Path) -> ExportCheck:
    """Compare the exported model with the base model and its unmerged adapter, in float32 on the CPU.

    Args:
        target: the exported folder.
    """

    def compare() -> ExportCheck:
        config = read_config(target)
        kind: Any = AutoModelForSequenceClassification if is_classifier(config) else auto_class(config)
        exported = kind.from_pretrained(target, dtype=torch.float32, trust_remote_code=may_run(target)).eval()
        return compare_models(_adapted(source), exported, load_tokenizer(target))

    with StillWaiting(f"the comparison of {target}", "it is running") as progress:
        check = progress.during(compare)
    return replace(check, tolerance=MERGE_TOLERANCE)


def _adapted(source: AdapterSource) -> PreTrainedModel:
    """Load the base model with the unmerged adapter."""
    scores = is_scoring_adapter(read_adapter_config(source.folder))
    model = _classifier(source) if scores else load_causal_lm(source.base)
    attach_adapter(model, source.folder)
    return model


def _classifier(source: AdapterSource) -> PreTrainedModel:
    """Load the base model as a sequence classifier with as many scores as the head in the adapter's files."""
    tokenizer = load_tokenizer(source.tokenizer)
    ensure_distinct_pad_token(tokenizer)
    num_scores = TensorFiles([source.folder / WEIGHTS_FILE]).like(f"{PEFT_PREFIX}{SCORE_HEAD}.weight").shape[0]
    config = load_model_config(source.base)
    names = names_of_scores(config) if is_classifier(config) else [f"LABEL_{n}" for n in range(num_scores)]
    overrides = {"pad_token_id": tokenizer.pad_token_id}
    return load_scoring_model(source.base, config_overrides=overrides, attributes=names if num_scores > 1 else ())
