"""How far an exported model is from the one that was trained: both answer the same texts.

Invariant: two models are compared on the CPU in the format they are loaded in; scores for sequence classifiers,
log-probabilities for all others.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

VERIFY_TEXTS = (
    "The sum of 17 and 25 is",
    "Once upon a time there was a small engine that",
    "def square(number):\n    return",
)
SCORING_SUFFIX = "ForSequenceClassification"
"""Ending of the names of model classes that score."""
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


def compare_models(
    trained: PreTrainedModel, exported: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> ExportCheck:
    """Compare log-probabilities of the tokens of `VERIFY_TEXTS`; scores of the texts, for sequence classifiers."""
    answer = _score if type(trained).__name__.endswith(SCORING_SUFFIX) else _token_logprobs
    ids = [torch.tensor([tokenizer(text)["input_ids"]]) for text in VERIFY_TEXTS]
    differences = torch.cat([(answer(trained, row) - answer(exported, row)).abs() for row in ids])
    return ExportCheck(differences.max().item(), differences.numel())


@torch.no_grad()
def _token_logprobs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """`[T - 1]` log-probabilities of `ids` `[1, T]` from the second token on."""
    logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None]).squeeze(-1)


@torch.no_grad()
def _score(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """`[1]` score of `ids` `[1, T]`."""
    return model(input_ids=ids).logits[0].float()
