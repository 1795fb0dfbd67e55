"""Tiny models with eight tokens, whose proposals are often accepted, and exact probabilities of their responses."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_process import EngineProcess
from generation_helpers import ask, plain, spread_out
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult, SamplingParams
from nemo_rl.weight_sync.transport import TransportSpec

SPEC = TransportSpec("shared_memory", run_id="test", bucket_size_bytes=100_000)
"""Describes the transport of weight syncs."""
VOCABULARY = 8
WIDTH = 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": 7,
    "bos_token_id": None,
    "pad_token_id": 0,
}


def llama(seed: int = 0) -> PreTrainedModel:
    config = LlamaConfig(**SIZES, num_hidden_layers=4)
    return spread_out(AutoModelForCausalLM.from_config(config, dtype=torch.float32), seed)


def like(model: PreTrainedModel, noise: float) -> PreTrainedModel:
    """Disturb a model, so that it proposes what the original often accepts."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * noise)
    return model


def save_eagle3(folder: Path, *, own_head: bool) -> None:
    """Save a random EAGLE-3 head for `llama`."""
    config = LlamaConfig(**SIZES, num_hidden_layers=1).to_dict()
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCABULARY, "dtype": "float32"}
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.15

    layer = {
        "self_attn.q_proj": draw(WIDTH, 2 * WIDTH),
        "self_attn.k_proj": draw(WIDTH // 2, 2 * WIDTH),
        "self_attn.v_proj": draw(WIDTH // 2, 2 * WIDTH),
        "self_attn.o_proj": draw(WIDTH, WIDTH),
        "mlp.gate_proj": draw(96, WIDTH),
        "mlp.up_proj": draw(96, WIDTH),
        "mlp.down_proj": draw(WIDTH, 96),
        **{norm: torch.ones(WIDTH) for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm")},
    }
    tensors = {f"midlayer.{name}.weight": tensor for name, tensor in layer.items()}
    tensors |= {"fc.weight": draw(WIDTH, 3 * WIDTH), "norm.weight": torch.ones(WIDTH)}
    if own_head:
        tensors["lm_head.weight"] = draw(VOCABULARY, WIDTH)
    save_file(tensors, folder / "model.safetensors")


@torch.no_grad()
def exact_probabilities(
    model: PreTrainedModel, prompt: Sequence[int], length: int, sampling: SamplingParams
) -> torch.Tensor:
    """Return the probability `[V ** length]` float64 of every response, from Hugging Face's logits."""
    responses = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=length)))
    ids = torch.cat([torch.tensor(prompt).expand(len(responses), -1), responses], 1)
    logits = model(ids, use_cache=False).logits[:, len(prompt) - 1 : -1].double() / sampling.temperature
    if sampling.top_k is not None:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[..., -1:], -torch.inf)
    sorted_probs, order = logits.softmax(-1).sort(-1, descending=True)
    kept = sorted_probs.cumsum(-1) - sorted_probs < sampling.top_p
    probs = torch.zeros_like(logits).scatter(-1, order, sorted_probs * kept)
    probs = probs / probs.sum(-1, keepdim=True)
    return probs.gather(-1, responses[..., None])[..., 0].prod(-1)


def chi_square(results: Sequence[GenerationResult], probabilities: torch.Tensor, length: int) -> float:
    """Return the p-value of Pearson's test that responses of `length` tokens have these probabilities.

    Responses that are expected less than five times are counted together.
    """
    places = torch.tensor([VOCABULARY**power for power in reversed(range(length))])
    index = torch.stack([(torch.tensor(result.token_ids.tolist()) * places).sum() for result in results])
    observed = torch.bincount(index, minlength=len(probabilities)).double()
    expected = probabilities * len(results)
    assert not observed[probabilities == 0].any(), "a response is impossible"
    often = expected >= 5
    joined = torch.stack([observed[~often].sum(), expected[~often].sum()])
    rest = (joined[0] - joined[1]) ** 2 / joined[1] if joined[1] > 0 else 0.0
    statistic = ((observed - expected) ** 2 / expected)[often].sum() + rest
    freedom = often.sum() - int(joined[1] == 0)
    return float(torch.special.gammaincc(freedom.double() / 2, statistic / 2))


def draft_head_is_shared(engine: Any) -> bool:
    """Runs in the engine's process."""
    runner = engine._engine.model_executor.driver_worker.model_runner
    return runner.drafter.model.lm_head is runner.get_model().lm_head


def counts(proposals: torch.Tensor, prompt: Sequence[int], response: Sequence[int]) -> tuple[int, int]:
    """Return how many tokens are proposed for a greedy response, one in each pass, and how many are accepted.

    Args:
        proposals: the token that is proposed after each token but the first, in place of the one after the next.
        prompt: the prompt.
        response: the response.
    """
    everything = [*prompt, *response]
    proposed = accepted = 0
    known = len(prompt) + 1  # the first pass has no proposal
    while known < len(everything):
        hit = int(proposals[known - 2]) == everything[known]
        proposed, accepted, known = proposed + 1, accepted + hit, known + 1 + hit
    return proposed, accepted


def mixed_requests(prompts: Sequence[list[int]]) -> list[GenerationRequest]:
    """Return requests of many lengths, with and without filters and stops; the last one fills the context."""
    requests = [ask(prompt, seed=100 + i, max_new_tokens=20 + i) for i, prompt in enumerate([*prompts] * 3)]
    requests += [ask(prompt, seed=i, max_new_tokens=60, stop_token_ids=(7,)) for i, prompt in enumerate(prompts)]
    requests += [ask(prompt, seed=i, max_new_tokens=9, temperature=0.7, top_k=3) for i, prompt in enumerate(prompts)]
    return [*requests, ask(prompts[-1], seed=7, max_new_tokens=1000)]


def check_seeds(
    engines: EngineProcess, name: str, prompts: Sequence[list[int]], *, same_bits: bool
) -> tuple[list[GenerationRequest], list[GenerationResult]]:
    """Check that responses are the same alone, with others and in another order; return requests and responses.

    Args:
        engines: process of the engine.
        name: name of the engine.
        prompts: prompts of the requests; the last one leaves room for a long response.
        same_bits: log-probabilities have the same bits; otherwise the keys of a prompt may come from the cache or not,
            and be rounded in another way.
    """
    requests = mixed_requests(prompts)
    together = engines.generate(name, requests)

    def check(results: Sequence[GenerationResult], expected: Sequence[GenerationResult]) -> None:
        assert not same_bits or plain(results) == plain(expected)
        for result, right in zip(results, expected, strict=True):
            assert result.token_ids.tolist() == right.token_ids.tolist()
            assert result.logprobs == pytest.approx(right.logprobs, abs=2e-6)

    for _ in range(2):
        check(engines.generate(name, requests[::-1])[::-1], together)
    some = [*range(0, len(requests) - 1, 6), len(requests) - 1]
    check([engines.generate(name, [requests[i]])[0] for i in some], [together[i] for i in some])
    assert len(together[-1].token_ids) == 256 - len(prompts[-1])
    return requests, together
