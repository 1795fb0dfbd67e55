"""Tiny models with sharp distributions, and plain Hugging Face references to hold engines against."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from nemo_rl.models.generation.interfaces import EngineSettings, GenerationRequest, SamplingParams
from nemo_rl.models.huggingface.tiny import (
    TinyArch,
    TinyShape,
    make_char_tokenizer,
    make_tiny_model,
    save_tiny_checkpoint,
)

MAX_MODEL_LEN = 256
PROMPTS = [list(range(20 + 7 * i, 20 + 7 * i + length)) for i, length in enumerate([3, 12, 1, 30, 7])]


def tiny_shape(tie_embeddings: bool) -> TinyShape:
    return TinyShape(
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        max_positions=512,
        tie_embeddings=tie_embeddings,
    )


def make_model(arch: TinyArch, tie_embeddings: bool, seed: int) -> PreTrainedModel:
    """A random model whose next-token distributions are far from uniform, so that errors show."""
    model = make_tiny_model(arch, tiny_shape(tie_embeddings), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.15 if parameter.dim() > 1 else parameter + 0.3 * noise)
    return model.eval()


def save_model(folder: Path, model: PreTrainedModel) -> None:
    save_tiny_checkpoint(folder, model, make_char_tokenizer())


def make_settings(folder: Path, backend: str, **overrides: Any) -> EngineSettings:
    values = {
        "backend": backend,
        "model_name": str(folder),
        "tokenizer_name": str(folder),
        "device": "cpu",
        "precision": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "kv_cache_bytes": 16 << 20,
    }
    return EngineSettings(**values | overrides)


def ask(prompt: Sequence[int], seed: int = 0, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(list(prompt), SamplingParams(**{"max_new_tokens": 12} | sampling), seed)


@torch.no_grad()
def greedy_reference(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The likeliest continuation, one full forward pass a token, no cache and no batch."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@torch.no_grad()
def logits_of(model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
    """Logits [response length, V] from which each response token was drawn."""
    ids = torch.tensor([[*prompt, *response]])
    return model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]


def reference_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], sampling: SamplingParams
) -> list[float]:
    """log_softmax(logits / T) over the tokens that top-k and then top-p leave, at the response's tokens."""
    logits = logits_of(model, prompt, response).double() / (sampling.temperature or 1.0)
    kept = torch.ones_like(logits, dtype=torch.bool)
    for row, row_kept in zip(logits, kept, strict=True):
        order = row.argsort(descending=True).tolist()
        order = order[: sampling.top_k or len(order)]
        probs = row[order].softmax(0).tolist()
        mass, allowed = 0.0, []
        for token, prob in zip(order, probs, strict=True):
            if mass < sampling.top_p:
                allowed.append(token)
            mass += prob
        row_kept[:] = False
        row_kept[allowed] = True
    masked = logits.masked_fill(~kept, -torch.inf)
    return masked.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist()


@torch.no_grad()
def restrict_vocabulary(model: PreTrainedModel, text: str) -> PreTrainedModel:
    """Let a model with its own output head say nothing but the tokens of `text`; returns it."""
    allowed = make_char_tokenizer()(text)["input_ids"]
    silent = [token for token in range(model.config.vocab_size) if token not in allowed]
    model.lm_head.weight[silent] = 0.0
    model.lm_head.weight[allowed[-1]] = -model.lm_head.weight[allowed[:-1]].sum(0)
    return model
