"""Reward models for tests: batches with scores and labelled steps, and their losses by transformers in float64."""

from typing import Any

import torch
from policy_helpers import random_batch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.losses.rewards import RegressionLossFn, StepLossFn
from nemo_rl.models.huggingface.load import describe_scores

NAMES = ["helpfulness", "correctness", "verbosity"]
WEIGHTS = {"helpfulness": 1.0, "correctness": 2.0, "verbosity": 0.5}
REGRESSION = {"enabled": True, "reward_model_type": "regression", "attributes": NAMES}
PROCESS = {"enabled": True, "reward_model_type": "process"}
PROMPT = 12
"""Number of tokens that the first rows share, as answers to one prompt do."""


def classifier(language_model: PreTrainedModel, names: list[str] | None = None) -> PreTrainedModel:
    """Return a sequence classifier with the body of a language model and a head whose outputs are about 1."""
    config = language_model.config
    config.tie_word_embeddings = False
    describe_scores(config, names or [])
    made: PreTrainedModel = AutoModelForSequenceClassification.from_config(config)
    made.base_model.load_state_dict(language_model.base_model.state_dict())
    weight = made.get_parameter("score.weight")
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)) / weight.shape[1] ** 0.5)
    return made.eval()


def answers(rows: int = 8, width: int = 24, vocab: int = 97) -> BatchedDataDict[Any]:
    """Make rows of different lengths with scores and labelled steps, of which the first ones share a prompt."""
    data = random_batch(rows, width, seed=11)
    family = slice(0, rows // 2)
    data["input_ids"][family, :PROMPT] = data["input_ids"][0, :PROMPT]
    data["input_lengths"][family] = data["input_lengths"][family].clamp(min=PROMPT + 3)
    real = torch.arange(width)[None] < data["input_lengths"][:, None]
    data["input_ids"] = torch.where(real & (data["input_ids"] == 0), 7, data["input_ids"] * real).clamp(max=vocab - 1)
    generator = torch.Generator().manual_seed(12)
    data["target_scores"] = 2 * torch.randn(rows, len(NAMES), generator=generator)
    data["score_mask"] = (torch.rand(rows, len(NAMES), generator=generator) < 0.7).float()
    data["score_mask"][0] = 1.0
    counts = data["score_mask"] * data["sample_mask"][:, None]
    data["score_counts"] = counts.sum(0).repeat(rows, 1)
    data["token_mask"] = torch.zeros(rows, width)
    for row, length in enumerate(data["input_lengths"].tolist()):
        data["token_mask"][row, [3, length // 2, length - 1]] = 1.0
    data["step_labels"] = (torch.rand(rows, width, generator=generator) < 0.5).float() * data["token_mask"]
    del data["advantages"]
    return data


def loss_of(kind: str) -> Any:
    return RegressionLossFn(WEIGHTS) if kind == "regression" else StepLossFn()


def hf_scores(model: PreTrainedModel, data: BatchedDataDict[Any]) -> Tensor:
    """Return `[B, N]` of the classifier's own forward, one unpadded row at a time."""
    rows = zip(data["input_ids"], data["input_lengths"].tolist(), strict=True)
    return torch.cat([model(input_ids=ids[None, :length], use_cache=False).logits for ids, length in rows])


def hf_values(model: PreTrainedModel, data: BatchedDataDict[Any]) -> Tensor:
    """Return `[B, T]` with the classifier's score of the tokens before each token that counts."""
    rows = []
    for ids, mask in zip(data["input_ids"], data["token_mask"], strict=True):
        values = [
            model(input_ids=ids[None, :end], use_cache=False).logits[0, 0] if mask[end] > 0 else torch.zeros(())
            for end in range(1, len(ids))
        ]
        rows.append(torch.stack([torch.zeros_like(values[0]), *values]))
    return torch.stack(rows)


def reference(model: PreTrainedModel, data: BatchedDataDict[Any], kind: str) -> dict[str, Any]:
    """Return outputs, loss and gradients of one update by transformers alone, in float64."""
    model = model.double()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        outputs = hf_scores(model, data) if kind == "regression" else hf_values(model, data)
        given = outputs if kind == "regression" else outputs[:, 1:]
        steps = float((data["token_mask"] * data["sample_mask"][:, None]).sum())
        loss, _ = loss_of(kind)(given, data=data, global_valid_seqs=1.0, global_valid_toks=steps)
        loss.backward()
    finally:
        torch.set_num_threads(threads)
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {"outputs": outputs.detach(), "loss": loss.item(), "gradients": gradients}
