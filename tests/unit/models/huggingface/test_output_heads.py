"""Heads of real architectures are found by their own logits and scored in chunks like Hugging Face in float64."""

import logging

import pytest
import torch
from architectures import random_model
from policy_helpers import VOCAB
from torch import Tensor
from transformers import PreTrainedModel

from nemo_rl.distributed.parallel_logprobs import LogitTransform, SamplingDensity, TopK
from nemo_rl.models.dtensor.heads import build_causal_lm
from nemo_rl.models.huggingface.logits import find_transform
from nemo_rl.utils.errors import ConfigError

TOKENS = (torch.arange(20).view(2, 10) * 7 + 3) % VOCAB
POSITIONS, TARGETS = torch.tensor([0, 4, 8, 10, 13, 17]), torch.tensor([5, 96, 0, 33, 64, 12])
TEMPERATURE = 0.7

HEADS = {
    "qwen2": ({}, LogitTransform()),
    "gptj": ({}, LogitTransform()),  # with a bias
    "llama4_text": ({}, LogitTransform()),  # whose body is not at its `base_model_prefix`
    "gemma2": ({"final_logit_softcapping": 5.0}, LogitTransform(cap=5.0)),
    "gemma3_text": ({"final_logit_softcapping": 1000.0}, LogitTransform(cap=1000.0)),
    "nanochat": ({}, LogitTransform(cap=15.0)),
    "cohere2": ({}, LogitTransform(0.0625)),
    "granite": ({"logits_scaling": 8.0}, LogitTransform(0.125)),
}


def hf_results(hf: PreTrainedModel) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Return log-probs, entropies, largest logits, and gradients of a loss on both, from the model's own logits."""
    logits = hf(input_ids=TOKENS, use_cache=False).logits.flatten(0, 1)[POSITIONS]
    logp = torch.log_softmax(logits / TEMPERATURE, -1)
    scores, entropy = logp.gather(-1, TARGETS[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    return scores, entropy, logits.topk(4).indices, gradients(hf, scores, entropy)


def gradients(hf: PreTrainedModel, scores: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    hf.zero_grad()
    (scores * torch.linspace(-1, 2, len(POSITIONS)) + 0.3 * entropy).sum().backward()
    return {name: p.grad for name, p in hf.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("arch", HEADS)
def test_scores_and_gradients_equal_those_of_the_models_own_logits(arch) -> None:
    special, transform = HEADS[arch]
    hf = random_model(arch, **special).double()
    model = build_causal_lm(hf, chunk_size=4)
    assert model.transform == transform
    *want, want_grads = hf_results(hf)
    scores, entropy = model({"input_ids": TOKENS}, POSITIONS, TARGETS, SamplingDensity(TEMPERATURE))
    grads = gradients(hf, scores, entropy)
    ids = model({"input_ids": TOKENS}, POSITIONS, TARGETS, top_k=TopK(4))[1]
    torch.testing.assert_close([scores, entropy, ids], want, rtol=1e-9, atol=1e-9)
    assert grads.keys() == want_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, want_grads[name], rtol=1e-7, atol=1e-9, msg=name)


def test_logit_caps_are_found_even_for_small_logits() -> None:
    """A new model's logits are so small that capping changes nothing; training makes them large."""
    capped = random_model("gemma2", initializer_range=1e-3, final_logit_softcapping=30.0)
    assert find_transform(capped) == LogitTransform(cap=30.0)
    plain = random_model("qwen2", initializer_range=1e-3, final_logit_softcapping=30.0)
    assert find_transform(plain) == LogitTransform(), "the configuration names a cap that the model does not apply"
    capped.config.final_logit_softcapping = None
    capped.train()
    assert find_transform(capped) == LogitTransform() and capped.training
    assert not capped.lm_head._forward_pre_hooks


def test_unknown_heads_use_the_models_own_forward_on_one_rank(caplog) -> None:
    hf = random_model("bert", is_decoder=True).double()
    assert find_transform(hf) is None
    with caplog.at_level(logging.WARNING):
        model = build_causal_lm(hf)
    assert "BertLMHeadModel makes its logits by more than a linear head" in caplog.text
    *want, want_grads = hf_results(hf)
    scores, entropy = model({"input_ids": TOKENS}, POSITIONS, TARGETS, SamplingDensity(TEMPERATURE))
    grads = gradients(hf, scores, entropy)
    ids = model({"input_ids": TOKENS}, POSITIONS, TARGETS, top_k=TopK(4))[1]
    torch.testing.assert_close([scores, entropy, ids], want)
    torch.testing.assert_close(grads, want_grads)
    assert build_causal_lm(hf, transform=LogitTransform(2.0)).transform == LogitTransform(2.0), "as given"
    with pytest.raises(ConfigError, match="BertLMHeadModel.*tensor_parallel_size=1"):
        build_causal_lm(hf, divides_head=True)
