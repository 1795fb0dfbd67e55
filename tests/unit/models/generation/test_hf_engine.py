"""The Hugging Face engine against Hugging Face itself: tokens, log-probabilities, stops, weights."""

import asyncio
import math
import string
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from generation_helpers import (
    MAX_MODEL_LEN,
    PROMPTS,
    answered,
    ask,
    check_spans,
    greedy_reference,
    load_weights,
    logits_of,
    make_model,
    make_settings,
    plain,
    reference_logprobs,
    save_model,
)
from tiny_models import make_char_tokenizer

from nemo_rl.experience.continued import joined, rest_of
from nemo_rl.models.generation.hf.engine import HfEngine
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult, ResponseSoFar, SamplingParams
from nemo_rl.models.generation.sampling import bad_word_ids, banned_tokens, draw, filtered_logprobs
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


def test_greedy_equals_hugging_face(engine, model):
    results = run(engine, [ask(prompt, temperature=0.0) for prompt in PROMPTS])
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.token_ids.tolist() == greedy_reference(model, prompt, 12)
        assert result.finish_reason == "length"
        expected = reference_logprobs(model, prompt, result.token_ids.tolist(), SamplingParams(temperature=0.0))
        assert result.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.7},
    ],
)
def test_logprobs_are_those_of_the_distribution_that_was_sampled(engine, model, sampling):
    results = run(engine, [ask(prompt, seed=i, **sampling) for i, prompt in enumerate(PROMPTS)])
    for prompt, result in zip(PROMPTS, results, strict=True):
        expected = reference_logprobs(model, prompt, result.token_ids.tolist(), SamplingParams(**sampling))
        assert all(map(math.isfinite, expected)), "a filtered token was sampled"
        assert result.logprobs == pytest.approx(expected, abs=1e-4)


def test_bad_words_are_never_sampled_and_get_no_probability(engine, model):
    tokenizer = make_char_tokenizer()
    prompts = PROMPTS * 4
    free = run(engine, [ask(prompt, seed=i) for i, prompt in enumerate(prompts)])
    printable = tokenizer(string.ascii_letters + string.digits + string.punctuation)["input_ids"]
    pairs = [pair for result in free for pair in pairwise(result.token_ids.tolist()) if set(pair) <= set(printable)]
    counts = Counter(token for result in free for token in result.token_ids.tolist() if token in printable)
    first, second = pairs[0]
    banned = next(token for token, _ in counts.most_common() if token not in pairs[0])
    words = (tokenizer.decode([banned]), tokenizer.decode([first, second]))
    results = run(engine, [ask(prompt, seed=i, bad_words=words) for i, prompt in enumerate(prompts)])
    assert any(first in result.token_ids.tolist()[:-1] for result in results)
    for prompt, result in zip(prompts, results, strict=True):
        assert banned not in result.token_ids.tolist()
        logits = logits_of(model, prompt, result.token_ids.tolist()).double()
        logits[:, banned] = -math.inf
        for position, before in enumerate(result.token_ids.tolist()[:-1], start=1):
            if before == first:
                logits[position, second] = -math.inf
                assert result.token_ids.tolist()[position] != second
        expected = logits.log_softmax(-1)[range(len(result.token_ids)), result.token_ids.tolist()]
        assert result.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_bad_words_match_those_of_vllm():
    """At the start of a text and after a space, where the first token differs; the last token is banned."""
    tokenizer = make_char_tokenizer()
    assert bad_word_ids([" ab"], tokenizer) == [tokenizer.encode("ab")]
    sequences = [[7], [1, 2, 3], [2, 3, 4]]
    assert banned_tokens(sequences, []) == [7]
    assert banned_tokens(sequences, [1, 2]) == [7, 3]
    assert banned_tokens(sequences, [9, 1, 2, 3]) == [7, 4]
    assert banned_tokens(sequences, [2]) == [7]


def test_a_seed_fixes_the_response_whatever_else_runs(engine):
    wanted = ask(PROMPTS[1], seed=123)
    (alone,) = run(engine, [wanted])
    crowd = [ask(prompt, seed=i) for i, prompt in enumerate(PROMPTS * 2)]
    for place in (0, 4, 10):
        result = run(engine, [*crowd[:place], wanted, *crowd[place:]])[place]
        assert result.token_ids.tolist() == alone.token_ids.tolist()
        assert result.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    others = {tuple(run(engine, [ask(PROMPTS[1], seed=seed)])[0].token_ids.tolist()) for seed in range(8)}
    assert len(others) == 8


def test_a_large_seed_is_allowed(engine):
    assert run(engine, [ask([5], seed=2**63 - 1)])[0].error is None


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


def test_a_stop_token_ends_the_response_and_is_kept(engine, model):
    full = greedy_reference(model, PROMPTS[3], 12)
    stop = full[5]
    (result,) = run(engine, [ask(PROMPTS[3], temperature=0.0, stop_token_ids=(stop,))])
    assert result.finish_reason == "stop"
    assert result.token_ids.tolist() == full[: full.index(stop) + 1]
    assert len(result.logprobs) == len(result.token_ids)


def test_a_response_is_arrays_and_a_text_without_special_tokens(engine, model):
    tokenizer = make_char_tokenizer()
    results = run(engine, [ask(prompt, seed=seed) for seed, prompt in enumerate(PROMPTS)])
    for result in results:
        assert (result.token_ids.dtype, result.logprobs.dtype) == (np.int32, np.float32)
        assert result.text == tokenizer.decode(result.token_ids, skip_special_tokens=True)
    assert any(result.text != tokenizer.decode(result.token_ids) for result in results), "some sampled a special token"


def test_a_stop_string_may_span_several_tokens(engine, model):
    tokenizer = make_char_tokenizer()
    full = greedy_reference(model, PROMPTS[0], 12)
    stop = tokenizer.decode(full[3:6])
    (result,) = run(engine, [ask(PROMPTS[0], temperature=0.0, stop_strings=(stop,))])
    assert result.finish_reason == "stop"
    text = tokenizer.decode(result.token_ids.tolist())
    assert stop in text
    assert stop not in tokenizer.decode(result.token_ids.tolist()[:-1])
    assert result.token_ids.tolist() == full[: len(result.token_ids)]


def test_max_new_tokens_and_max_model_len_end_a_response(engine):
    results = run(engine, [ask([1, 2], max_new_tokens=1), ask([3] * (MAX_MODEL_LEN - 4), max_new_tokens=50)])
    assert [len(result.token_ids) for result in results] == [1, 4]
    assert [result.finish_reason for result in results] == ["length", "length"]


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


def test_new_weights_change_the_answers_and_the_version(engine, model):
    new = make_model("qwen2", True, seed=2)
    try:
        assert asyncio.run(load_weights(engine, new.named_parameters(), 7)) == []
        (result,) = run(engine, [ask(PROMPTS[1], temperature=0.0)])
        assert result.weight_versions == [(0, 7)]
        assert result.token_ids.tolist() == greedy_reference(new, PROMPTS[1], 12)
    finally:
        asyncio.run(load_weights(engine, model.named_parameters(), 0))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_running_response_continues_with_new_weights(engine, model, temperature):
    """The tokens and log-probabilities of each span are those of its weights, given all tokens before."""
    new = make_model("qwen2", True, seed=3)
    requests = [ask(prompt, seed=i, temperature=temperature) for i, prompt in enumerate(PROMPTS)]
    requests.append(ask(PROMPTS[0], max_new_tokens=2))

    async def updated_on_the_way() -> list[GenerationResult]:
        answers = asyncio.ensure_future(answered(engine, requests))
        while not engine._running or engine.num_tokens("0") < 5:
            await asyncio.sleep(0)
        await load_weights(engine, new.named_parameters(), 8)
        return await answers

    asyncio.run(load_weights(engine, model.named_parameters(), 7))
    try:
        *results, short = asyncio.run(updated_on_the_way())
    finally:
        asyncio.run(load_weights(engine, model.named_parameters(), 0))
    assert (len(short.token_ids), short.weight_versions) == (2, [(0, 7)])
    for request, result in zip(requests, results, strict=False):
        check_spans(request, result, {7: model, 8: new}, [(0, 7), (5, 8)])


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


def test_an_update_to_the_same_weights_does_not_change_running_responses(engine, model):
    requests = [ask(prompt, seed=i) for i, prompt in enumerate(PROMPTS)]
    asyncio.run(load_weights(engine, model.named_parameters(), 5))

    async def synced_on_the_way() -> list[GenerationResult]:
        answers = asyncio.ensure_future(answered(engine, requests))
        while not engine._running or engine.num_tokens("0") < 5:
            await asyncio.sleep(0)
        await load_weights(engine, model.named_parameters(), 5)
        return await answers

    assert plain(asyncio.run(synced_on_the_way())) == plain(run(engine, requests))


def test_missing_and_unknown_tensors_are_named(engine, model):
    left_out = "model.layers.1.self_attn.k_proj.weight"
    tensors = [(name, tensor) for name, tensor in model.named_parameters() if name != left_out]
    assert asyncio.run(load_weights(engine, tensors, 0)) == [left_out]
    with pytest.raises(GenerationError, match="no tensor named model.nothing"):
        asyncio.run(engine.load_tensors([("model.nothing", torch.zeros(1))]))
