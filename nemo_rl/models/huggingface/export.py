"""From a checkpoint of the DTensor backend to a folder for `transformers` and vLLM, and the proof that it is one.

Checkpoints hold safetensors under Hugging Face names already (`models.dtensor.checkpoint_io`), so an export
copies them tensor by tensor, adds the tokenizer and, if asked, changes the number format. Works for any head.
Law: `verify_export` compares the folder as `transformers` reads it with the checkpoint as training reads it.
"""

import json
import logging
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.models.dtensor.checkpoint_io import MODEL_FOLDER, load_weights
from nemo_rl.models.huggingface.load import torch_dtype
from nemo_rl.utils.errors import CheckpointError

logger = logging.getLogger(__name__)

VERIFY_TEXTS = (
    "The sum of 17 and 25 is",
    "Once upon a time there was a small engine that",
    "def square(number):\n    return",
)
_TENSORS = "*.safetensors"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


@dataclass(frozen=True)
class ExportCheck:
    """How far the exported model is from the checkpoint.

    Attributes:
        max_difference: largest absolute difference of a log-probability (a score, in reward models).
        num_values: log-probabilities or scores compared.
    """

    max_difference: float
    num_values: int


def find_weights(path: str | Path) -> Path:
    """The folder of a checkpoint that holds `model/`, from it, from a folder above it or from `model` itself.

    Args:
        path: a step folder, its `policy` or `policy/weights`, or `policy/weights/model`.

    Raises:
        CheckpointError: none of these holds weights.
    """
    given = Path(path).expanduser()
    for folder in (given, given / "weights", given / "policy" / "weights", given.parent):
        if any((folder / MODEL_FOLDER).glob(_TENSORS)) and (folder != given.parent or given.name == MODEL_FOLDER):
            return folder
    raise CheckpointError(
        f"{str(given)!r} is no policy checkpoint: neither it nor its policy/weights has a folder {MODEL_FOLDER} with "
        f"{_TENSORS} files. Give a step folder, for example results/grpo/step_10, or its policy/weights."
    )


def export_checkpoint(weights: Path, target: Path, tokenizer_name: str | None = None, dtype: str | None = None) -> None:
    """Write a folder that `from_pretrained` and vLLM load.

    Args:
        weights: what `find_weights` returns.
        target: a new or empty folder.
        tokenizer_name: tokenizer for checkpoints that have none beside the weights.
        dtype: number format of floating-point weights, for example "bfloat16"; None keeps that of the checkpoint.

    Raises:
        CheckpointError: the target holds files already, or there is no tokenizer.
        ConfigError: the dtype is unknown.
    """
    source = weights / MODEL_FOLDER
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{str(target)!r} is not empty. Give a new folder for the exported model.")
    tokenizer_files = [source / name for name in _TOKENIZER_FILES if (source / name).exists()]
    if not tokenizer_files and tokenizer_name is None:
        raise CheckpointError(f"{source} has no tokenizer. Name one: policy.tokenizer.name in the file of --config.")
    wanted = None if dtype is None else torch_dtype(dtype)
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.suffix == ".safetensors":
            _copy_tensors(file, target / file.name, wanted)
        elif file.is_file():
            shutil.copyfile(file, target / file.name)
    if wanted is not None:
        _note_dtype(target, dtype or "")
    if not tokenizer_files:
        AutoTokenizer.from_pretrained(tokenizer_name).save_pretrained(target)
    logger.info("Exported %s to %s.", source, target)


def _copy_tensors(source: Path, target: Path, dtype: torch.dtype | None) -> None:
    if dtype is None:
        shutil.copyfile(source, target)
        return
    with safe_open(source, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    converted = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    save_file(converted, target, metadata={"format": "pt"})


def _note_dtype(target: Path, dtype: str) -> None:
    """Keep config.json and the index in step with converted weights."""
    path = target / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    path.write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n", encoding="utf-8")
    index = target / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text(encoding="utf-8"))
        content["metadata"] = {"total_size": sum(file.stat().st_size for file in target.glob(_TENSORS))}
        index.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def verify_export(weights: Path, target: Path, texts: Sequence[str] = VERIFY_TEXTS) -> ExportCheck:
    """Compare what the exported model answers with what the checkpoint answers, in float32 on the CPU.

    The checkpoint goes through the reader of training into a model with random weights, the exported folder
    through `from_pretrained`: two readers that have no code in common.

    Args:
        weights: the checkpoint, as for `export_checkpoint`.
        target: the exported folder.
        texts: what is scored; each needs at least two tokens.

    Raises:
        CheckpointError: the weights do not fit the model.
    """
    config = AutoConfig.from_pretrained(weights / MODEL_FOLDER)
    scores = any(name.endswith("ForSequenceClassification") for name in config.architectures or ())
    kind, answer = (AutoModelForSequenceClassification, _score) if scores else (AutoModelForCausalLM, _token_logprobs)
    trained = kind.from_config(config, dtype=torch.float32).eval()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load_weights(trained, weights)
    exported = kind.from_pretrained(target, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(target)
    differences = [
        (answer(trained, ids) - answer(exported, ids)).abs() for ids in (_encode(tokenizer, text) for text in texts)
    ]
    joined = torch.cat(differences)
    return ExportCheck(joined.max().item(), joined.numel())


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    return torch.tensor([tokenizer(text)["input_ids"]])


@torch.no_grad()
def _token_logprobs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """`[T - 1]` log-probabilities of `ids` `[1, T]` from the second token on."""
    logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None]).squeeze(-1)


@torch.no_grad()
def _score(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """`[1]` score of `ids` `[1, T]`."""
    return model(input_ids=ids).logits[0].float()
