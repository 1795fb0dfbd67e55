"""Critics for tests: tiny models with a scalar head, values by Hugging Face prefix by prefix, and a value loss."""

from pathlib import Path
from typing import Any

import torch
from policy_helpers import random_batch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.ranks.placements import whole
from nemo_rl.losses.loss_function import LossInputType, LossType
from nemo_rl.models.dtensor.pipeline.stages import stage_of
from nemo_rl.models.policy.batching import count_valid

PROMPT = 10
"""Tokens that rows of a family share, one of which each row keeps."""


class SquaredError:
    """Mean squared difference between values and returns, over the tokens that count."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.VALUE
    needs_reference = False
    rows_per_unit = 1

    def __call__(
        self, values: Tensor, data: Any, global_valid_seqs: Any, global_valid_toks: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        assert values.shape == mask.shape
        loss = ((values - data["returns"][:, 1:]).square() * mask).sum() / global_valid_toks
        return loss, {"loss": loss.detach(), "value": (values.detach() * mask).sum() / global_valid_toks}


def critic_batch(rows: int = 8, width: int = 24) -> BatchedDataDict[Any]:
    """Make rows of different lengths, of which the first half shares a prompt, with a return for each token."""
    data = random_batch(rows, width, seed=5)
    family = slice(0, rows // 2)
    data["input_ids"][family, :PROMPT] = data["input_ids"][0, :PROMPT]
    data["input_lengths"][family] = data["input_lengths"][family].clamp(min=PROMPT + 2)
    missing = (data["input_ids"] == 0) & (torch.arange(width)[None] < data["input_lengths"][:, None])
    data["input_ids"][missing] = 7
    data["token_mask"] = (torch.arange(width)[None] < data["input_lengths"][:, None]).float()
    data["token_mask"][:, 0] = 0.0
    data["token_mask"][family, :PROMPT] = 0.0
    data["returns"] = torch.randn(rows, width, generator=torch.Generator().manual_seed(9))
    return data


def critic(language_model: PreTrainedModel) -> PreTrainedModel:
    """Return a sequence classifier with the body of a language model and a head whose outputs are about 1."""
    config = language_model.config
    config.num_labels, config.tie_word_embeddings = 1, False
    made: PreTrainedModel = AutoModelForSequenceClassification.from_config(config)
    made.base_model.load_state_dict(language_model.base_model.state_dict())
    weight = made.get_parameter("score.weight")
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)) / weight.shape[1] ** 0.5)
    return made.eval()


def save_critic(folder: Path, language_model: PreTrainedModel) -> str:
    critic(language_model).save_pretrained(folder)
    return str(folder)


def hf_values(model: PreTrainedModel, data: BatchedDataDict[Any]) -> Tensor:
    """Return `[B, T]` with the model's own score of the tokens before each token; differentiable."""
    zero = torch.zeros((), dtype=next(model.parameters()).dtype)
    rows = []
    for ids, length in zip(data["input_ids"], data["input_lengths"].tolist(), strict=True):
        scores = [model(input_ids=ids[None, :end], use_cache=False).logits[0, 0] for end in range(1, length)]
        rows.append(torch.stack([zero, *scores, *[zero] * (len(ids) - length)]))
    return torch.stack(rows)


def reference(model: PreTrainedModel, data: BatchedDataDict[Any]) -> dict[str, Any]:
    """Return values, loss, metrics and gradients of one update by Hugging Face alone, in float64."""
    model.set_experts_implementation("eager")  # the others do not support float64
    model = model.double()
    _, tokens = count_valid(data)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the products are tiny, and on a busy machine threads wait for each other
    try:
        values = hf_values(model, data)
        loss, metrics = SquaredError()(values[:, 1:], data, None, tokens)
        loss.backward()
    finally:
        torch.set_num_threads(threads)
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {"values": values.detach(), "loss": loss.item(), "metrics": metrics, "gradients": gradients}


def relative(got: Tensor, want: Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    return ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()


def kept_gradients(worker: Any) -> dict[str, Tensor]:
    """Return a dict that the worker's next update fills with the whole gradients, instead of changing weights."""
    gradients: dict[str, Tensor] = {}

    def keep() -> tuple[float, bool]:
        hf = worker.backend.model.hf
        stage = stage_of(hf)
        for key, weight in hf.named_parameters():
            if weight.grad is not None:
                gradients[key if stage is None else stage.known_as(key)] = whole(weight.grad).clone()
        return 0.0, True

    worker.backend.clip_and_step = keep
    return gradients
