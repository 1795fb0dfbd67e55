"""The Hugging Face engine beyond what `test_conformance` checks: how it draws, refuses and names tensors."""

import asyncio
import math
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

from nemo_rl.models.generation.draws import Distribution, bad_word_ids, banned_tokens, draw, filtered_logprobs
from nemo_rl.models.generation.hf import HfEngine
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult, ResponseSoFar
from nemo_rl.models.generation.responses import joined, rest_of
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
    generators = [torch.Generator().manual_seed(seed) for seed in range(200)]
    rows = logits.expand(200, -1)
    counts = Counter(each.token for _ in range(100) for each in draw(rows, Distribution(0.8), generators))
    expected = (logits / 0.8).softmax(0) * 20_000
    statistic = sum((counts[i] - e) ** 2 / e for i, e in enumerate(expected.tolist()))
    assert statistic < 33.7


def test_rare_tokens_keep_their_probability_in_a_large_vocabulary():
    """Half of the draws among 200,000 tokens are of tokens with 2.5e-6 each, and none is of a filtered token."""
    logits = torch.full((200_001,), -torch.inf)
    logits[100_000:] = 0.0
    logits[-1] = math.log(100_000)
    generators = [torch.Generator().manual_seed(seed) for seed in range(100)]
    rows = logits.expand(100, -1)
    tokens = [each.token for _ in range(10) for each in draw(rows, Distribution(1.0), generators)]
    assert min(tokens) >= 100_000
    assert 430 < sum(token == 200_000 for token in tokens) < 570, "4.4 standard deviations"
    assert len(set(tokens)) > 400


def test_rows_are_drawn_as_alone():
    """Rows with other filters, generators and neighbors get the tokens that each of them gets alone."""
    logits = torch.randn(6, 5_000, generator=torch.Generator().manual_seed(1)) * 3
    for distribution in (Distribution(1.0), Distribution(0.7, 5, 0.8, (3, 4)), Distribution(0.0)):
        generators = [torch.Generator().manual_seed(seed) for seed in range(6)]
        together = [draw(logits, distribution, generators) for _ in range(3)]
        for row, generator in enumerate(torch.Generator().manual_seed(seed) for seed in range(6)):
            alone = [draw(logits[row : row + 1], distribution, [generator])[0] for _ in range(3)]
            assert [each[row] for each in together] == alone
            assert not {each.token for each in alone} & set(distribution.banned)


def test_logits_that_are_not_finite_give_no_log_probability():
    logits = torch.zeros(3, 9)
    logits[1, 4] = torch.nan
    logits[2, 5] = torch.inf
    for distribution in (Distribution(1.0), Distribution(0.0)):
        drawn = draw(logits, distribution, [torch.Generator() for _ in range(3)])
        assert [math.isnan(each.logprob) for each in drawn] == [False, True, True]


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 1), (0.6, 1), (0.61, 2), (0.9, 2), (0.91, 3), (1.0, 4)])
def test_top_p_keeps_the_smallest_sufficient_set(top_p, kept):
    logits = torch.tensor([0.3, 0.6, 0.07, 0.03]).log()
    logprobs = filtered_logprobs(logits[None], Distribution(1.0, top_p=top_p))[0]
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
