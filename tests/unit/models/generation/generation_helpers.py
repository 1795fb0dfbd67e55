"""Tiny models with sharp distributions, and plain Hugging Face references to compare engines with."""

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tiny_models import (
    TinyArch,
    TinyShape,
    make_char_tokenizer,
    make_tiny_model,
    save_tiny_checkpoint,
)
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from nemo_rl.models.dtensor.checkpoints.model_files import weights_by_name
from nemo_rl.models.generation.interfaces import (
    Engine,
    EngineSettings,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
)
from nemo_rl.models.huggingface.checkpoint_names import in_checkpoint

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
    """Make a random model whose next-token distributions are far from uniform, so that errors show."""
    return spread_out(make_tiny_model(arch, tiny_shape(tie_embeddings), seed=seed), seed)


def make_mixture(arch: str, seed: int, **fields: Any) -> PreTrainedModel:
    """Make a random model with four experts, two for each token: "qwen3_moe", "mixtral" or "deepseek_v3"."""
    torch.manual_seed(seed)
    config = mixture_config(arch)
    config.update(fields)
    model = spread_out(AutoModelForCausalLM.from_config(config, dtype=torch.float32), seed)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.normal_(std=0.3)
    return model


def mixture_config(arch: str) -> PretrainedConfig:
    """Return a config with experts of a width that vLLM pads on CPUs (48) and the one latent attention it has there."""
    sizes: dict[str, Any] = {
        "vocab_size": 264,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 256,
        "eos_token_id": 258,
        "bos_token_id": None,
    }
    if arch == "mixtral":
        return MixtralConfig(**sizes, num_key_value_heads=1, head_dim=32, num_local_experts=4, intermediate_size=48)
    if arch == "qwen3_moe":
        return Qwen3MoeConfig(
            **sizes, num_key_value_heads=1, head_dim=32, num_experts=4, moe_intermediate_size=48, norm_topk_prob=True
        )
    if arch == "gpt_oss":
        return GptOssConfig(
            **sizes, num_key_value_heads=1, head_dim=32, num_local_experts=4, intermediate_size=64, sliding_window=8
        )
    return DeepseekV3Config(
        **sizes,
        num_key_value_heads=2,
        first_k_dense_replace=1,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        moe_intermediate_size=48,
        intermediate_size=96,
        q_lora_rank=32,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    )


def spread_out(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Draw the weights again, so large that next-token distributions are far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.15 if parameter.dim() > 1 else parameter + 0.3 * noise)
    return model.eval()


def streamed(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Yield the weights as a policy sends them, under their names in checkpoints."""
    return dict(in_checkpoint(model, weights_by_name(model).items()))


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
    """Return the likeliest continuation by one full forward pass per token, without cache or batch."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@torch.no_grad()
def logits_of(model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
    """Return the logits [response length, V] from which each response token was drawn."""
    ids = torch.tensor([[*prompt, *response]])
    return model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]


def reference_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], sampling: SamplingParams
) -> list[float]:
    """Return log_softmax(logits / T) at the response's tokens, over the tokens that top-k and then top-p keep."""
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
    """Let a model with its own output head generate only the tokens of `text`; return it."""
    allowed = make_char_tokenizer()(text)["input_ids"]
    silent = [token for token in range(model.config.vocab_size) if token not in allowed]
    model.lm_head.weight[silent] = 0.0
    model.lm_head.weight[allowed[-1]] = -model.lm_head.weight[allowed[:-1]].sum(0)
    return model


async def answered(engine: Engine, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
    """Return the answers of an engine in this process to concurrent requests."""
    return list(await asyncio.gather(*(engine.generate(str(i), request) for i, request in enumerate(requests))))


async def load_weights(engine: Engine, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> list[str]:
    """Run one update; return what `finish_weight_update` returns."""
    await engine.begin_weight_update()
    await engine.load_tensors(list(tensors))
    return await engine.finish_weight_update(version)


def plain(results: Iterable[GenerationResult]) -> list[tuple[Any, ...]]:
    """Return responses in a form that can be compared."""
    return [
        (r.token_ids.tolist(), r.logprobs.tolist(), r.finish_reason, r.weight_versions, r.error, r.text)
        for r in results
    ]


def check_spans(
    request: GenerationRequest,
    result: GenerationResult,
    models: dict[int, PreTrainedModel],
    spans: list[tuple[int, int]],
) -> None:
    """Check each span of a response, sampled without filters, against the model whose weights generated it."""
    assert result.weight_versions == spans
    tokens = result.token_ids.tolist()
    for (start, version), (end, _) in zip(spans, [*spans[1:], (len(tokens), -1)], strict=True):
        prefix, span = [*request.prompt_token_ids, *tokens[:start]], tokens[start:end]
        if request.sampling.temperature == 0:
            assert span == logits_of(models[version], prefix, span).argmax(-1).tolist()
        for other, model in models.items():
            logits = logits_of(model, prefix, span).double() / (request.sampling.temperature or 1.0)
            expected = logits.log_softmax(-1).gather(1, torch.tensor(span)[:, None])[:, 0]
            agrees = bool((torch.tensor(result.logprobs[start:end]) - expected).abs().max() < 1e-4)
            assert agrees == (other == version), f"span {start}..{end} against version {other}"
