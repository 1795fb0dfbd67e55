"""Compute the results of one process: transformers' model in float64, row by row without padding, plain autograd."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.losses.loss_function import LossInputType, LossType
from nemo_rl.models.dtensor.proof.numbers import in_float64
from nemo_rl.models.huggingface.recurrent import use_configured_time_steps
from parity.models import VOCABULARY

LEARNING_RATE = 0.05
STEPS = 2


@dataclass
class Numbers:
    """Results of some updates.

    Attributes:
        losses: loss of each update.
        gradients: whole gradients of each update, by name.
        norms: gradient norm of each update.
        logprobs: `[B, T]` before each update, zeros where no token is scored.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)


class WeightedLikelihood:
    """Advantage-weighted negative log-likelihood per token, which both sides compute."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB
    needs_reference = False

    def __call__(
        self, logprobs: Tensor, data: BatchedDataDict[Any], global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute the loss of one microbatch, divided by the global number of tokens."""
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        return -(logprobs * mask * data["advantages"][:, 1:]).sum() / global_valid_toks, {}


def batch(rows: int = 8, width: int = 40, seed: int = 0) -> BatchedDataDict[Any]:
    """Return right-padded rows of 9 to `width` tokens, one of them not counted, with advantages of both signs."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(9, width + 1, (rows,), generator=draw)
    lengths[0] = width
    real = torch.arange(width)[None] < lengths[:, None]
    prompt = torch.arange(width)[None] < torch.randint(1, 6, (rows, 1), generator=draw)
    counted = torch.ones(rows)
    counted[1] = 0.0
    return BatchedDataDict(
        {
            "input_ids": torch.randint(3, VOCABULARY, (rows, width), generator=draw) * real,
            "input_lengths": lengths,
            "token_mask": (real & ~prompt).float(),
            "sample_mask": counted,
            "advantages": torch.randn(rows, width, generator=draw),
        }
    )


def one_process(
    model_name: str,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float64,
    batches: Sequence[BatchedDataDict[Any]] | None = None,
) -> Numbers:
    """Compute losses, gradients and log-probabilities of transformers' model under plain SGD.

    Args:
        model_name: folder of the model.
        steps: number of updates.
        dtype: dtype of the model.
        batches: rows of each update, random ones by default.
    """
    kind = AutoModelForCausalLM
    model = kind.from_pretrained(model_name, dtype=torch.float32, attn_implementation="eager").to(dtype)
    use_configured_time_steps(model)
    model.set_experts_implementation("eager")  # grouped products do not support float64
    model.train()
    batches = batches or random_batches(steps)  # before the default dtype changes, which would draw other numbers
    with in_float64() if dtype == torch.float64 else nullcontext():
        return _updates(model, batches)


def random_batches(steps: int) -> list[BatchedDataDict[Any]]:
    """Return the rows of each update on which both sides train by default."""
    return [batch(seed=step) for step in range(steps)]


def _updates(model: PreTrainedModel, batches: Sequence[BatchedDataDict[Any]]) -> Numbers:
    numbers = Numbers()
    for data in batches:
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        scored = torch.zeros(data["input_ids"].shape, dtype=torch.float64)
        total = 0.0
        for row, length in enumerate(data["input_lengths"].tolist()):
            ids = data["input_ids"][row : row + 1, :length]
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            logprobs = logits.double().log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
            weights = (mask * data["advantages"][:, 1:])[row, : length - 1]
            loss = -(logprobs * weights).sum() / mask.sum()
            loss.backward()
            total += loss.item()
            scored[row, 1:length] = logprobs.detach()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        numbers.losses.append(total)
        numbers.gradients.append(gradients)
        numbers.norms.append(torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt().item())
        numbers.logprobs.append(scored)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= LEARNING_RATE * parameter.grad
        model.zero_grad(set_to_none=True)
    return numbers
