"""Compare an exported model with the trained model by their scores of the same texts.

Sequence classifiers are compared by their scores, and other models by log-probabilities. Invariant: both models compute
on the CPU in their loaded dtype.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

VERIFY_TEXTS = (
    "The sum of 17 and 25 is",
    "Once upon a time there was a small engine that",
    "def square(number):\n    return",
)
_SCORING_SUFFIX = "ForSequenceClassification"
"""Suffix of the names of model classes that score sequences."""
VERIFY_TOLERANCE = 1e-5
"""Largest accepted difference of a log-probability between a float32 export and the trained model."""


@dataclass(frozen=True)
class ExportCheck:
    """Difference between the exported model and the checkpoint."""

    max_difference: float
    """Largest absolute difference of a log-probability, or of a score for sequence classifiers."""
    num_values: int
    """Number of log-probabilities or scores compared."""
    tolerance: float = VERIFY_TOLERANCE
    """Largest difference that float32 rounding can cause."""

    def __str__(self) -> str:
        return f"Largest difference of {self.num_values} log-probabilities: {self.max_difference:.3g}"

    def holds_for(self, dtype: str | None) -> bool:
        """Return whether the difference is within the tolerance, or True for 16-bit dtypes, which round weights."""
        return dtype in ("bfloat16", "float16") or self.max_difference <= self.tolerance


def is_classifier(config: PretrainedConfig) -> bool:
    """Return whether a configuration describes a sequence classifier, such as a reward model."""
    return any(name.endswith(_SCORING_SUFFIX) for name in config.architectures or ())


def compare_models(
    trained: PreTrainedModel, exported: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> ExportCheck:
    """Compare log-probabilities of the tokens of `VERIFY_TEXTS`, or scores of the texts for sequence classifiers."""
    answer = _score if type(trained).__name__.endswith(_SCORING_SUFFIX) else _token_logprobs
    ids = [torch.tensor([tokenizer(text)["input_ids"]]) for text in VERIFY_TEXTS]
    differences = torch.cat([(answer(trained, row) - answer(exported, row)).abs() for row in ids])
    return ExportCheck(differences.max().item(), differences.numel())


@torch.no_grad()
def _token_logprobs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return `[T - 1]` log-probabilities of `ids` `[1, T]`, starting with the second token."""
    logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None]).squeeze(-1)


@torch.no_grad()
def _score(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the `[1]` score of `ids` `[1, T]`."""
    return model(input_ids=ids).logits[0].float()
