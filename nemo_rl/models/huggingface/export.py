"""From a checkpoint of the DTensor backend to a folder for `transformers` and vLLM, and the proof that it is one.

Checkpoints hold safetensors under Hugging Face names already (`models.dtensor.checkpoint_io`), so an export copies them
(`folders`), adds the tokenizer and, if asked, changes the number format. Works for any head. Adapters whose base is
elsewhere: `adapter_export`. Invariant: `verify_export` compares the folder as `transformers` reads it with the
checkpoint as training reads it.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
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
from nemo_rl.models.huggingface.folders import TENSOR_FILES, TOKENIZER_FILES, copy_model_folder
from nemo_rl.models.huggingface.load import torch_dtype
from nemo_rl.utils.errors import CheckpointError
from nemo_rl.utils.manifest import find_damage

logger = logging.getLogger(__name__)

VERIFY_TEXTS = (
    "The sum of 17 and 25 is",
    "Once upon a time there was a small engine that",
    "def square(number):\n    return",
)
_SCORING = "ForSequenceClassification"
VERIFY_TOLERANCE = 1e-5
"""Largest difference of a log-probability between an export in float32 and what was trained."""


@dataclass(frozen=True)
class ExportCheck:
    """How far the exported model is from the checkpoint.

    Attributes:
        max_difference: largest absolute difference of a log-probability (a score, in reward models).
        num_values: log-probabilities or scores compared.
        tolerance: largest difference that rounding in float32 explains.
    """

    max_difference: float
    num_values: int
    tolerance: float = VERIFY_TOLERANCE

    def __str__(self) -> str:
        return f"Largest difference of {self.num_values} log-probabilities: {self.max_difference:.3g}"

    def holds_for(self, dtype: str | None) -> bool:
        """Whether the export is the trained model; weights rounded to fewer bits may differ by any amount."""
        return dtype in ("bfloat16", "float16") or self.max_difference <= self.tolerance


def find_weights(path: str | Path) -> Path:
    """The folder of a checkpoint that holds `model/`, from it, from a folder above it or from `model` itself.

    Args:
        path: a step folder, its `policy` or `policy/weights`, or `policy/weights/model`.

    Raises:
        CheckpointError: none of these holds weights.
    """
    given = Path(path).expanduser()
    for folder in (given, given / "weights", given / "policy" / "weights", given.parent):
        if any((folder / MODEL_FOLDER).glob(TENSOR_FILES)) and (folder != given.parent or given.name == MODEL_FOLDER):
            return folder
    raise CheckpointError(
        f"{str(given)!r} is no policy checkpoint: neither it nor its policy/weights has a folder {MODEL_FOLDER} with "
        f"{TENSOR_FILES} files. Give a step folder, for example results/grpo/step_10, or its policy/weights."
    )


def export_checkpoint(weights: Path, target: Path, tokenizer_name: str | None = None, dtype: str | None = None) -> None:
    """Write a folder that `from_pretrained` and vLLM load.

    Args:
        weights: what `find_weights` returns.
        target: a new or empty folder.
        tokenizer_name: tokenizer for checkpoints that have none beside the weights.
        dtype: number format of floating-point weights, for example "bfloat16"; None keeps that of the checkpoint.

    Raises:
        CheckpointError: the target holds files already, there is no tokenizer, or a file of the weights is damaged.
        ConfigError: the dtype is unknown.
    """
    source = weights / MODEL_FOLDER
    require_empty(target)
    tokenizer_files = [source / name for name in TOKENIZER_FILES if (source / name).exists()]
    if not tokenizer_files and tokenizer_name is None:
        raise CheckpointError(f"{source} has no tokenizer. Name one: policy.tokenizer.name in the file of --config.")
    damage = find_damage(weights.absolute().parents[1], "policy/weights/")
    if damage:
        raise CheckpointError(f"{weights} is damaged: {'; '.join(damage)}. Export another checkpoint.")
    wanted = None if dtype is None else torch_dtype(dtype)
    copy_model_folder(source, target, wanted)
    if not tokenizer_files:
        AutoTokenizer.from_pretrained(tokenizer_name).save_pretrained(target)
    logger.info("Exported %s to %s.", source, target)


def verify_export(weights: Path, target: Path, texts: Sequence[str] = VERIFY_TEXTS) -> ExportCheck:
    """Compare what the exported model answers with what the checkpoint answers, in float32 on the CPU.

    The checkpoint goes through the reader of training into a model with random weights, the exported folder
    through `from_pretrained`: two readers that share no more than the rules for names and shapes.

    Args:
        weights: the checkpoint, as for `export_checkpoint`.
        target: the exported folder.
        texts: what is scored; each needs at least two tokens.

    Raises:
        CheckpointError: the weights do not fit the model.
    """
    config = AutoConfig.from_pretrained(weights / MODEL_FOLDER)
    scores = any(name.endswith(_SCORING) for name in config.architectures or ())
    kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    trained = kind.from_config(config, dtype=torch.float32).eval()
    load_weights(trained, weights)
    exported = kind.from_pretrained(target, dtype=torch.float32).eval()
    return compare_models(trained, exported, AutoTokenizer.from_pretrained(target), texts)


def compare_models(
    trained: PreTrainedModel, exported: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> ExportCheck:
    """Compare log-probabilities of the texts' tokens; scores of the texts, for sequence classifiers."""
    answer = _score if type(trained).__name__.endswith(_SCORING) else _token_logprobs
    ids = [torch.tensor([tokenizer(text)["input_ids"]]) for text in texts]
    differences = torch.cat([(answer(trained, row) - answer(exported, row)).abs() for row in ids])
    return ExportCheck(differences.max().item(), differences.numel())


def require_empty(target: Path) -> None:
    """Check that an export overwrites nothing.

    Raises:
        CheckpointError: the folder holds files.
    """
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{str(target)!r} is not empty. Give a new folder for the exported model.")


@torch.no_grad()
def _token_logprobs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """`[T - 1]` log-probabilities of `ids` `[1, T]` from the second token on."""
    logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None]).squeeze(-1)


@torch.no_grad()
def _score(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """`[1]` score of `ids` `[1, T]`."""
    return model(input_ids=ids).logits[0].float()
