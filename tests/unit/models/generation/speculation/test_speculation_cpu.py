"""Speculative decoding in a real vLLM engine on the CPU, against Hugging Face: distribution, log-probabilities, ends.

One process hosts all engines. The n-gram engine is the last: it imports numba, after which vLLM cannot register its
functions for CPUs again.
"""

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_process import EngineProcess
from generation_helpers import (
    ask,
    check_spans,
    greedy_reference,
    logits_of,
    make_settings,
    reference_logprobs,
    save_model,
    streamed,
)
from speculating import (
    SPEC,
    VOCABULARY,
    check_seeds,
    chi_square,
    draft_head_is_shared,
    exact_probabilities,
    like,
    llama,
    save_eagle3,
)
from transformers import PreTrainedModel

from nemo_rl.models.generation.engine_load import load_metrics
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult, SamplingParams
from nemo_rl.utils.seed import derive_seed
from nemo_rl.weight_sync.endpoints import WeightSender
from nemo_rl.weight_sync.parts import WholeWeights

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra cpu or vllm"),
]

DRAFT, EAGLE, SHARED, NGRAM = "draft model", "eagle3", "eagle3 without its own head", "n-gram"
KINDS = [*(pytest.param(kind, marks=pytest.mark.long) for kind in (DRAFT, EAGLE, SHARED)), NGRAM]
LENGTH = 4
PROMPT = [1, 2, 3, 1, 2, 5, 1, 2]
PROMPTS = [PROMPT, [3], [4, 4, 4, 6, 4, 4], [(3 * i) % VOCABULARY for i in range(140)]]
HOTTER = {"temperature": 1.3, "top_p": 1.0, "top_k": None}
BANNED, WORD = 4, chr(33 + 4)
"""A token and its text: the tokenizer's tokens begin with the printable ASCII characters."""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    root = tmp_path_factory.mktemp("models")
    for name in ("target", "draft"):
        (root / name).mkdir()
    save_model(root / "target", llama())
    save_model(root / "draft", like(llama(), 0.03))
    save_eagle3(root / "head", own_head=True)
    save_eagle3(root / "headless", own_head=False)
    sections: dict[str, dict[str, Any]] = {
        DRAFT: {"method": "draft_model", "model": str(root / "draft"), "num_speculative_tokens": 3},
        EAGLE: {"method": "eagle3", "model": str(root / "head"), "num_speculative_tokens": 3},
        SHARED: {"method": "eagle3", "model": str(root / "headless"), "num_speculative_tokens": 3},
        NGRAM: {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    }
    settings = {
        kind: make_settings(root / "target", "vllm", engine_kwargs={"speculative_config": section})
        for kind, section in sections.items()
    }
    with EngineProcess(settings) as process:  # it builds each engine with its first call
        yield process


def deploy(engines: EngineProcess, sender: WeightSender, kind: str, seed: int) -> PreTrainedModel:
    """Sync the weights of a model of this seed; every parameter of the engine but those of the draft must get one."""
    model = llama(seed)
    assert engines.sync(kind, sender, SPEC, WholeWeights(streamed(model).items), seed) == []
    return model


def accepted(engines: EngineProcess, kind: str) -> dict[str, float]:
    """Return the metrics of the responses since the last call."""
    metrics = load_metrics([load for load in engines.loads[kind] if load is not None])
    engines.loads.clear()
    return metrics


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 5, "top_p": 0.8}], ids=["plain", "filtered"])
def test_responses_have_the_probabilities_of_the_model(engines, sender, kind, sampling):
    """Chi-square over all responses of four tokens; log-probabilities are those of the filtered distribution."""
    model = deploy(engines, sender, kind, seed=0)
    requests = [ask(PROMPT, seed=derive_seed(0, kind, i), max_new_tokens=LENGTH, **sampling) for i in range(1200)]
    accepted(engines, kind)
    results = engines.generate(kind, requests)
    metrics = accepted(engines, kind)
    assert metrics["spec_acceptance_rate"] > 0.02 and metrics["spec_proposed_tokens"] > 1000
    exact = exact_probabilities(model, PROMPT, LENGTH, SamplingParams(**sampling))
    assert chi_square(results, exact, LENGTH) > 1e-4
    hotter = exact_probabilities(model, PROMPT, LENGTH, SamplingParams(**{"temperature": 1.0} | sampling | HOTTER))
    assert chi_square(results, hotter, LENGTH) < 1e-4, "the test would not notice another temperature"
    for request, result in zip(requests[:20], results, strict=False):
        check_logprobs(model, request, result)


def check_logprobs(model: PreTrainedModel, request: GenerationRequest, result: GenerationResult) -> None:
    expected = reference_logprobs(model, request.prompt_token_ids, result.token_ids.tolist(), request.sampling)
    assert result.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_follow_new_weights(engines, sender, kind):
    requests = [ask(prompt, temperature=0.0, max_new_tokens=30) for prompt in PROMPTS]
    for seed in (11, 12):
        model = deploy(engines, sender, kind, seed)
        results = engines.generate(kind, requests)
        for request, result in zip(requests, results, strict=True):
            assert result.token_ids.tolist() == greedy_reference(model, request.prompt_token_ids, 30)
            check_logprobs(model, request, result)


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_fixes_the_response_whatever_else_runs(engines, sender, kind):
    """Proposals depend on the request only, also after a response that fills the context.

    Log-probabilities may differ in the last bit when the keys of the prompt come from the cache.
    """
    model = deploy(engines, sender, kind, seed=21)
    requests, together = check_seeds(engines, kind, PROMPTS, same_bits=kind == NGRAM)
    for request, result in zip(requests, together, strict=True):
        check_logprobs(model, request, result)


@pytest.mark.parametrize("kind", KINDS)
def test_responses_end_at_stops_in_the_middle_of_accepted_proposals(engines, sender, kind):
    deploy(engines, sender, kind, seed=21)
    requests = [ask(prompt, seed=i, max_new_tokens=60, stop_token_ids=(6, 7)) for i, prompt in enumerate(PROMPTS * 6)]
    results = engines.generate(kind, requests)
    assert {result.finish_reason for result in results} >= {"stop"}
    for result in results:
        tokens = result.token_ids.tolist()
        assert len(result.logprobs) == len(tokens) and not {6, 7} & set(tokens[:-1])
        assert (tokens[-1] in (6, 7)) == (result.finish_reason == "stop")
    strings = [ask(PROMPT, seed=i, max_new_tokens=60, stop_strings=(WORD + WORD,)) for i in range(8)]
    for result in engines.generate(kind, strings):
        tokens = result.token_ids.tolist()
        assert len(result.logprobs) == len(tokens)
        if result.finish_reason == "stop":
            assert tokens[-2:] == [BANNED, BANNED]


@pytest.mark.parametrize("kind", KINDS)
def test_a_running_response_continues_with_new_weights(engines, sender, kind):
    old = deploy(engines, sender, kind, seed=31)
    requests = [ask(prompt, seed=i, max_new_tokens=100, temperature=float(i % 2)) for i, prompt in enumerate(PROMPTS)]
    ids = [f"{kind} {i}" for i in range(len(requests))]
    engines.call(kind, "submit", list(zip(ids, requests, strict=True)))
    new = deploy(engines, sender, kind, seed=32)
    results: dict[str, GenerationResult] = {}
    while len(results) < len(ids):
        results.update(engines.call(kind, "collect").results)
    starts = [results[id_].weight_versions[-1].start for id_ in ids]
    assert all(0 < start < 100 for start in starts)
    for id_, request in zip(ids, requests, strict=True):
        check_spans(request, results[id_], {31: old, 32: new}, [tuple(s) for s in results[id_].weight_versions])


@pytest.mark.parametrize("kind", KINDS)
def test_an_aborted_request_keeps_its_tokens(engines, sender, kind):
    model = deploy(engines, sender, kind, seed=33)
    request = ask(PROMPT, seed=4, max_new_tokens=200)
    engines.call(kind, "submit", [("ended", request), ("short", ask(PROMPT, max_new_tokens=9))])
    engines.call(kind, "collect")
    engines.call(kind, "abort", ["ended"])
    ((id_, result),) = engines.call(kind, "collect").results
    assert (id_, result.finish_reason) == ("ended", "abort") and 0 < len(result.token_ids) < 200
    check_spans(request, result, {33: model}, [(0, 33)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_word_is_never_drawn(engines, sender, kind):
    model = deploy(engines, sender, kind, seed=34)
    free = [ask(PROMPT, seed=i, max_new_tokens=40) for i in range(8)]
    assert any(BANNED in result.token_ids for result in engines.generate(kind, free))
    banned = [ask(PROMPT, seed=i, max_new_tokens=40, bad_words=(WORD,)) for i in range(8)]
    for result in engines.generate(kind, banned):
        tokens = result.token_ids.tolist()
        assert BANNED not in tokens
        logits = logits_of(model, PROMPT, tokens).double()
        logits[:, BANNED] = -torch.inf
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert result.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.long
def test_a_draft_with_its_own_head_keeps_it(engines):
    assert engines.look(SHARED, draft_head_is_shared) is True
    assert engines.look(EAGLE, draft_head_is_shared) is False
