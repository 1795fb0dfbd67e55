"""Responses with a grammar: vLLM draws them in their form, and scores them as the policy without it."""

import importlib.util
import json
import re
from collections.abc import Iterator

import pytest
import torch
from engine_process import EngineProcess
from generation_helpers import (
    MAX_MODEL_LEN,
    ask,
    logits_of,
    make_model,
    make_settings,
    reference_logprobs,
    restrict_vocabulary,
    save_model,
    streamed,
)
from tiny_models import make_char_tokenizer, save_tiny_checkpoint
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from nemo_rl.models.generation.engine_load import load_metrics
from nemo_rl.models.generation.interfaces import GenerationResult, Grammar, SamplingParams

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra cpu or vllm"),
]

type Weights = dict[str, torch.Tensor]

NAME, THINKING, PROPOSING = "llama", "llama that thinks", "llama with proposals of n-grams"
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
PROMPT = list(range(20, 60))
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Berlin", "Kiel"]}, "sunny": {"type": "boolean"}},
    "required": ["city", "sunny"],
    "additionalProperties": False,
}
JSON = Grammar("json", json.dumps(SCHEMA))
REGEX = Grammar("regex", "[a-c]{3,9}-[0-9]+x")
CHOICE = Grammar("choice", json.dumps(["yes", "yesterday", "no"]))
EBNF = Grammar("grammar", 'root ::= ("ab" | "cd") root | "."')
GRAMMARS = [JSON, REGEX, CHOICE, EBNF]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model("llama", False, seed=0)


@pytest.fixture(scope="module")
def engines(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, model)
    thinking = tmp_path_factory.mktemp("thinking")
    save_tiny_checkpoint(
        thinking, restrict_vocabulary(make_model("llama", False, seed=3), "ab<|reserved_1|>"), thinker()
    )
    # The engine with n-grams is the last one: it imports numba, after which vLLM cannot make another engine.
    arguments = {NAME: {}, THINKING: {"reasoning_parser": "deepseek_r1"}, PROPOSING: {"speculative_config": NGRAM}}
    made = {
        name: make_settings(thinking if name == THINKING else folder, "vllm", load_weights=True, engine_kwargs=own)
        for name, own in arguments.items()
    }
    with EngineProcess(made) as process:
        yield process


def thinker() -> PreTrainedTokenizerFast:
    """Make the tokenizer of a model that reasons first."""
    known = make_char_tokenizer()
    text = known.backend_tokenizer.to_str().replace("<|reserved_0|>", "<think>").replace("<|reserved_1|>", "</think>")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(text), eos_token=known.eos_token, pad_token=known.pad_token
    )


def text_of(result: GenerationResult) -> str:
    return str(make_char_tokenizer().decode(result.token_ids.tolist(), skip_special_tokens=True))


def keeps(text: str, grammar: Grammar) -> bool:
    if grammar is JSON:
        value = json.loads(text)
        return value.keys() == {"city", "sunny"} and value["city"] in ("Bonn", "Berlin", "Kiel")
    if grammar is CHOICE:
        return text in json.loads(CHOICE.definition)
    return re.fullmatch(REGEX.definition if grammar is REGEX else r"(ab|cd)*\.", text) is not None


def is_complete(result: GenerationResult) -> bool:
    return result.finish_reason == "stop"


def check_forms(engines: EngineProcess, name: str, model: PreTrainedModel, grammar: Grammar) -> None:
    plain = [ask(PROMPT, seed=seed) for seed in range(4)]
    alone = engines.generate(name, plain)
    formed = [ask(PROMPT[: 10 + 3 * seed], seed=seed, max_new_tokens=200, grammar=grammar) for seed in range(6)]
    mixed = engines.generate(name, [*formed, *plain])
    results = mixed[: len(formed)]
    assert [each.token_ids.tolist() for each in mixed[len(formed) :]] == [each.token_ids.tolist() for each in alone]
    assert sum(map(is_complete, results)) >= 3
    for request, result in zip(formed, results, strict=True):
        tokens = result.token_ids.tolist()
        assert result.error is None and result.weight_versions == [(0, 0)]
        if is_complete(result):
            assert tokens[-1] == 258 and keeps(text_of(result), grammar)
        forced = reference_logprobs(model, request.prompt_token_ids, tokens, SamplingParams())
        assert result.logprobs == pytest.approx(forced, abs=1e-4)


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
def test_a_response_keeps_its_form_and_is_scored_without_it(engines, model, grammar):
    """Next to plain requests in the same batch, whose responses do not change."""
    check_forms(engines, NAME, model, grammar)


def test_without_scoring_the_log_probabilities_are_those_of_the_mask(engines, model):
    """They are larger, so a response whose mask was not taken away would not pass the test before."""
    sampling = {"max_new_tokens": 120, "grammar": CHOICE}
    scored, masked = engines.generate(NAME, [ask(PROMPT, **sampling), ask(PROMPT, **sampling, scores_policy=False)])
    assert masked.token_ids.tolist() == scored.token_ids.tolist()
    starts = make_char_tokenizer()("yn")["input_ids"]
    first = logits_of(model, PROMPT, masked.token_ids.tolist()[:1])[0, starts].log_softmax(-1)
    assert masked.logprobs[0] == pytest.approx(float(first[starts.index(int(masked.token_ids[0]))]), abs=1e-4)
    assert (masked.logprobs - scored.logprobs).max() > 1.0
    hot = ask(PROMPT, **sampling, scores_policy=False, temperature=0.3, top_p=0.9)
    assert keeps(text_of(engines.generate(NAME, [hot])[0]), CHOICE)


def test_what_cannot_be_kept_or_scored_is_refused(engines):
    bad = {
        "json": ["{", '{"type": "thing"}', "[1]"],
        "regex": ["(", "a\x00"],
        "choice": ["[]", '"no list"'],
        "grammar": ["root ::= (", " "],
    }
    requests = [ask(PROMPT, grammar=Grammar(kind, text)) for kind, texts in bad.items() for text in texts]
    hot = ask(PROMPT, grammar=CHOICE, temperature=0.5)
    long = ask([3] * (MAX_MODEL_LEN - 1), grammar=CHOICE)
    *results, refused_hot, refused_long = engines.generate(NAME, [*requests, hot, long])
    assert [result.error is not None for result in results] == [True] * len(requests)
    assert all("vLLM cannot keep an answer to this form" in str(result.error) for result in results)
    assert "temperature=0.5" in str(refused_hot.error)
    assert "leaves no room" in str(refused_long.error) and "demanded form needs 2" in str(refused_long.error)
    (cut,) = engines.generate(NAME, [ask([3] * (MAX_MODEL_LEN - 4), max_new_tokens=50, grammar=EBNF)])
    assert len(cut.token_ids) <= 3 and cut.error is None


def test_an_aborted_response_has_no_tokens_and_leaves_nothing(engines):
    engines.call(NAME, "submit", [("aborted", ask(PROMPT, max_new_tokens=200, grammar=Grammar("regex", "a{150,190}")))])
    engines.call(NAME, "abort", ["aborted"])
    ((request_id, result),), _ = engines.call(NAME, "collect")
    assert (request_id, result.finish_reason, len(result.token_ids)) == ("aborted", "abort", 0)
    assert engines.look(NAME, open_responses) == (0, 0, 0)
    assert keeps(text_of(engines.generate(NAME, [ask(PROMPT, grammar=CHOICE)])[0]), CHOICE)


def test_with_a_reasoning_parser_the_form_begins_after_the_reasoning(engines):
    """The likeliest tokens are letters, or the end of the reasoning."""
    requests = [
        ask(PROMPT[:length], temperature=0.0, max_new_tokens=150, grammar=CHOICE, scores_policy=False)
        for length in range(5, 40)
    ]
    answers = [thinker().decode(each.token_ids.tolist()) for each in engines.generate(THINKING, requests)]
    parts = [answer.removesuffix("<|im_end|>").split("</think>") for answer in answers if "</think>" in answer]
    assert any(reasoning for reasoning, _ in parts)
    assert all(set(reasoning) <= {"a", "b"} and answer in json.loads(CHOICE.definition) for reasoning, answer in parts)


def open_responses(engine) -> tuple[int, int, int]:
    return len(engine._scoring.prompts), len(engine._scoring.drawn), len(engine._vllm_ids)


def updated_between(engine, grammar: Grammar, weights: list[Weights]) -> tuple[list[int], list[float]]:
    """Draw a response, load other weights before it is scored, and go back to the first ones afterwards."""
    from nemo_rl.models.generation.vllm.running_model import load_tensors

    def load(tensors: Weights) -> None:
        engine.start_loading()
        load_tensors(engine._engine.model_executor.driver_worker, list(tensors.items()))
        engine.finish_loading(changed=True)

    engine.add_request("updated", ask(PROMPT, max_new_tokens=120, grammar=grammar))
    while not engine._scoring.drawn:
        assert not engine.step()
    tokens = engine._scoring.drawn["updated"].token_ids
    assert engine.num_tokens("updated") == len(tokens) and engine.sampled_so_far("updated") == ([], [])
    other, own = weights
    load(other)
    (response,) = engine.step()
    load(own)
    assert response.token_ids == tokens
    return response.token_ids, response.logprobs


def test_weights_that_come_before_the_scores_give_all_of_them(engines, model):
    other = make_model("llama", False, seed=1)
    weights = [streamed(other), streamed(model)]
    tokens, logprobs = engines.look(NAME, updated_between, CHOICE, weights)
    assert logprobs == pytest.approx(reference_logprobs(other, PROMPT, tokens, SamplingParams()), abs=1e-4)
    own = reference_logprobs(model, PROMPT, tokens, SamplingParams())
    assert max(abs(first - second) for first, second in zip(own, logprobs, strict=True)) > 0.1


def finished_before_scores(engine, grammar: Grammar) -> int:
    """Return how many waiting requests end before a response with a grammar that was added before them is scored."""
    limit = engine._cache.limit  # the scheduler's limit is set to this one after each step
    most, limit.most, limit.limit = limit.most, 1, 1
    try:
        engine.add_request("formed", ask(PROMPT, max_new_tokens=120, grammar=grammar))
        while not engine.num_tokens("formed"):  # requests that came before its grammar is ready would be first
            assert not engine.step()
        for number in range(4):
            engine.add_request(f"plain {number}", ask(PROMPT, max_new_tokens=10))
        finished: list[str] = []
        while len(finished) < 5:
            finished += [response.request_id for response in engine.step()]
    finally:
        limit.most = limit.limit = most
    return finished.index("formed")


def test_a_drawn_response_is_scored_before_requests_that_wait(engines):
    assert engines.look(NAME, finished_before_scores, CHOICE) == 0


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
def test_proposed_tokens_keep_the_form_too(engines, model, grammar):
    engines.loads[PROPOSING].clear()
    check_forms(engines, PROPOSING, model, grammar)
    metrics = load_metrics([load for load in engines.loads[PROPOSING] if load is not None])
    assert metrics["spec_proposed_tokens"] > 20
    assert grammar is CHOICE or metrics["spec_acceptance_rate"] > 0, "the few tokens of a choice are hard to propose"
