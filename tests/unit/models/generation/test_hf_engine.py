"""The Hugging Face engine beyond what `test_conformance` checks: how it draws, refuses and names tensors."""

import asyncio
from collections import Counter

import numpy as np
import pytest
import torch
from generation_helpers import (
    MAX_MODEL_LEN,
    PROMPTS,
    answered,
    ask,
    check_spans,
    load_weights,
    make_model,
    make_settings,
    plain,
    save_model,
)
from tiny_models import make_char_tokenizer

from nemo_rl.models.generation.hf import HfEngine
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult, ResponseSoFar, SamplingParams
from nemo_rl.models.generation.responses import joined, rest_of
from nemo_rl.models.generation.rows import bad_word_ids, banned_tokens, draw, filtered_logprobs
from nemo_rl.utils.errors import GenerationError


@pytest.fixture(scope="module")
def model():
    return make_model("qwen2", True, seed=1)


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, model)
    return HfEngine(make_settings(folder, "hf"))


def run(engine: HfEngine, requests: list[GenerationRequest]) -> list[GenerationResult]:
    return asyncio.run(answered(engine, requests))


def test_bad_words_match_those_of_vllm():
    """At the start of a text and after a space, where the first token differs; the last token is banned."""
    tokenizer = make_char_tokenizer()
    assert bad_word_ids([" ab"], tokenizer) == [tokenizer.encode("ab")]
    sequences = [[7], [1, 2, 3], [2, 3, 4]]
    assert banned_tokens(sequences, []) == [7]
    assert banned_tokens(sequences, [1, 2]) == [7, 3]
    assert banned_tokens(sequences, [9, 1, 2, 3]) == [7, 4]
    assert banned_tokens(sequences, [2]) == [7]


def test_samples_follow_the_distribution():
    """Chi-square over ten tokens, 20,000 draws: above 33.7 with probability 1e-4."""
    logits = torch.linspace(-1.0, 1.5, 10)
    sampling = SamplingParams(temperature=0.8)
    generator = torch.Generator().manual_seed(0)
    counts = Counter(draw(logits, sampling, generator)[0] for _ in range(20_000))
    expected = (logits / 0.8).softmax(0) * 20_000
    statistic = sum((counts[i] - e) ** 2 / e for i, e in enumerate(expected.tolist()))
    assert statistic < 33.7


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 1), (0.6, 1), (0.61, 2), (0.9, 2), (0.91, 3), (1.0, 4)])
def test_top_p_keeps_the_smallest_sufficient_set(top_p, kept):
    logits = torch.tensor([0.3, 0.6, 0.07, 0.03]).log()
    logprobs = filtered_logprobs(logits, SamplingParams(top_p=top_p))
    assert int(logprobs.isfinite().sum()) == kept
    assert logprobs.exp().sum().item() == pytest.approx(1.0)


def test_a_response_is_arrays_and_a_text_without_special_tokens(engine, model):
    tokenizer = make_char_tokenizer()
    results = run(engine, [ask(prompt, seed=seed) for seed, prompt in enumerate(PROMPTS)])
    for result in results:
        assert (result.token_ids.dtype, result.logprobs.dtype) == (np.int32, np.float32)
        assert result.text == tokenizer.decode(result.token_ids, skip_special_tokens=True)
    assert any(result.text != tokenizer.decode(result.token_ids) for result in results), "some sampled a special token"


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ([1] * MAX_MODEL_LEN, "256 tokens does not fit the context of 256"),
        ([], "0 tokens does not fit"),
        ([1, 264], "outside 0..263"),
        ([-1], "outside 0..263"),
    ],
)
def test_prompts_that_cannot_be_served_are_refused(engine, prompt, sentence):
    with pytest.raises(GenerationError, match=sentence):
        run(engine, [ask(prompt)])


def test_responses_so_far_continue_with_other_weights_and_disturb_nothing(engine, model):
    """The first tokens are those of the old weights, the rest those of the new ones, given the first."""
    new = make_model("qwen2", True, seed=3)
    requests = [ask(prompt, seed=i) for i, prompt in enumerate(PROMPTS)]

    async def interrupted() -> tuple[list[ResponseSoFar], list[GenerationResult]]:
        answers = asyncio.ensure_future(answered(engine, requests))
        while not engine._running or engine.num_tokens("0") < 5:
            await asyncio.sleep(0)
        found = await engine.responses_so_far([*map(str, range(len(requests))), "unknown"])
        return [found[str(i)] for i in range(len(requests))], await answers

    asyncio.run(load_weights(engine, model.named_parameters(), 7))
    try:
        expected = run(engine, requests)
        parts, results = asyncio.run(interrupted())
        assert asyncio.run(engine.responses_so_far(["0"])) == {}
        asyncio.run(load_weights(engine, new.named_parameters(), 8))
        rests = run(engine, [rest_of(request, part) for request, part in zip(requests, parts, strict=True)])
    finally:
        asyncio.run(load_weights(engine, model.named_parameters(), 0))
    assert plain(results) == plain(expected)
    for request, part, rest, result in zip(requests, parts, rests, results, strict=True):
        assert part.token_ids.tolist() == result.token_ids.tolist()[:5]
        whole = joined(part, rest, (), make_char_tokenizer())
        assert (len(whole.token_ids), whole.finish_reason) == (12, "length")
        check_spans(request, whole, {7: model, 8: new}, [(0, 7), (5, 8)])


def test_missing_and_unknown_tensors_are_named(engine, model):
    left_out = "model.layers.1.self_attn.k_proj.weight"
    tensors = [(name, tensor) for name, tensor in model.named_parameters() if name != left_out]
    assert asyncio.run(load_weights(engine, tensors, 0)) == [left_out]
    with pytest.raises(GenerationError, match="no tensor named model.nothing"):
        asyncio.run(engine.load_tensors([("model.nothing", torch.zeros(1))]))
