"""Thinking of sampled turns: tags that are tokens, tags that are texts, what is out of place, what was said."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from nemo_rl.config import RewardPenaltyConfig
from nemo_rl.experience.penalties import EmptyFinalAnswer, MalformedThinkTag, ReviewSettings, repeats
from nemo_rl.experience.thinking import TextTags, TokenTags, sampled_turns, thinking_reader
from nemo_rl.utils.errors import ConfigError

pytestmark = pytest.mark.fast

TOKENIZERS = Path(__file__).resolve().parents[2] / "assets/tokenizers"
QWEN3 = AutoTokenizer.from_pretrained(TOKENIZERS / "qwen3")
READERS = {
    "tokens": thinking_reader(RewardPenaltyConfig(), QWEN3),
    "texts": TextTags(QWEN3, "<think>", "</think>"),
    "several tokens": TextTags(QWEN3, "[[plan]]", "[[done]]"),
}


def ids(text):
    return QWEN3(text, add_special_tokens=False)["input_ids"]


def turn(kind, text, before="<|im_start|>assistant\n"):
    """Read one turn, written with <think> and </think>, whatever the tags are."""
    if kind == "several tokens":
        before, text = (each.replace("<think>", "[[plan]]").replace("</think>", "[[done]]") for each in (before, text))
    prompt, sampled = ids(before), ids(text)
    (found,) = sampled_turns(READERS[kind], [*prompt, *sampled], [(len(prompt), len(prompt) + len(sampled))])
    return found


def malformed_texts(found):
    return [QWEN3.decode(found.token_ids[start:end]).strip() for start, end in found.malformed]


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    ("text", "reasoning", "final_answer", "wrong"),
    [
        ("<think>2 and 2</think>4<|im_end|>", ["2 and 2"], "4", []),
        ("<think></think>4<|im_end|>", [""], "4", []),
        ("4<|im_end|>", [], "4", []),
        ("<think>a</think>b<think>c</think>d", ["a", "c"], "d", []),
        ("<think>a</think>b</think>c", ["a"], "c", ["close"]),
        ("a</think>b", [], "b", ["close"]),
        ("<think>a<think>b</think>c", ["a", "b"], "c", ["open"]),
        ("</think>a<think>b", ["b"], "", ["close", "open"]),
        ("<think>2 and 2", ["2 and 2"], "", ["open"]),
        ("<think>a<think>b", ["a", "b"], "", ["open", "open"]),
    ],
)
def test_tags_out_of_place_are_found_wherever_they_are(kind, text, reasoning, final_answer, wrong):
    found = turn(kind, text)
    assert not found.opened
    assert (found.reasoning, found.final_answer) == (reasoning, final_answer)
    spelled = {"open": "[[plan]]", "close": "[[done]]"} if kind == "several tokens" else {}
    named = {"open": "<think>", "close": "</think>"} | spelled
    texts = malformed_texts(found)
    assert len(texts) == len(wrong)
    assert all(named[name] in text for name, text in zip(wrong, texts, strict=True))


@pytest.mark.parametrize("kind", READERS)
def test_a_prompt_may_have_opened_the_thinking(kind):
    before = "<|im_start|>assistant\n<think>\n"
    well = turn(kind, "2 and 2</think>4", before)
    assert well.opened and not well.malformed
    assert (well.reasoning, well.final_answer) == (["2 and 2"], "4")
    twice = turn(kind, "<think>2 and 2</think>4", before)
    assert len(twice.malformed) == 1
    never = turn(kind, "2 and 2<|im_end|>", before)
    assert never.malformed == [(len(never.token_ids) - 1, len(never.token_ids))]
    assert never.final_answer == ""


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    "before",
    [
        "Think between <think> and </think>.<|im_end|>\n<|im_start|>assistant\n",
        "Use the tag <think>.<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ],
)
def test_tags_in_a_question_or_closed_by_the_template_open_nothing(kind, before):
    assert not turn(kind, "4<|im_end|>", before).opened
    assert not turn(kind, "4<|im_end|>", before).malformed


def test_thinking_tokens_are_those_between_the_tags():
    thought = "Two and two make four."
    assert turn("tokens", f"<think>{thought}</think>4").num_thinking_tokens == len(ids(thought))
    assert turn("tokens", f"{thought}</think>4", "<think>").num_thinking_tokens == len(ids(thought))
    assert turn("tokens", thought).num_thinking_tokens == 0
    assert turn("tokens", f"<think>{thought}").num_thinking_tokens == len(ids(thought))


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    ("text", "without_tags"),
    [("<think>2 and 2</think>4<|im_end|>", "2 and 24"), ("4<|im_end|>", "4"), ("a<think>b", "ab")],
)
def test_the_text_of_a_turn_has_neither_tags_nor_special_tokens(kind, text, without_tags):
    assert turn(kind, text).text == without_tags


def test_the_tokens_of_a_tag_that_is_a_text_are_all_that_have_a_part_of_it():
    found = turn("several tokens", "4</think>5")
    ((start, end),) = found.malformed
    assert "[[done]]" in QWEN3.decode(found.token_ids[start:end])
    assert "[[done]]" not in QWEN3.decode(found.token_ids[start + 1 : end])
    assert "[[done]]" not in QWEN3.decode(found.token_ids[start : end - 1])


def test_several_turns_are_read_one_by_one():
    texts = ["<think>a</think>call", "observed<|im_start|>assistant\n<think>\n", "b</think>c", "x", "<think>d"]
    spans, tokens = [], []
    for number, text in enumerate(texts):
        start = len(tokens)
        tokens += ids(text)
        spans += [(start, len(tokens))] * (number % 2 == 0)
    first, second, third = sampled_turns(READERS["tokens"], tokens, spans)
    assert [each.opened for each in (first, second, third)] == [False, True, False]
    assert [bool(each.malformed) for each in (first, second, third)] == [False, False, True]
    assert third.start == spans[2][0]


def reader(**keys):
    return thinking_reader(RewardPenaltyConfig.build(**keys), QWEN3)


def test_ids_are_those_of_the_tokenizer_unless_they_are_given():
    added = QWEN3.get_added_vocab()
    assert reader() == TokenTags(QWEN3, added["<think>"], added["</think>"])
    given = reader(token_ids={"think_open": 5, "think_close": 6}, thinking_tags=["(", ")"])
    assert (given.open_id, given.close_id) == (5, 6)
    half = reader(token_ids={"think_open": 5})
    assert (half.open_id, half.close_id) == (5, added["</think>"])
    assert isinstance(reader(thinking_tags=["[[plan]]", "[[done]]"]), TextTags)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"token_ids": {"think_open": 5}, "thinking_tags": ["(", ")"]}, r"think_close is null and '\)' is not a token"),
        ({"token_ids": {"think_open": 99999, "think_close": 3}}, "think_open: there is no token 99999"),
    ],
)
def test_ids_that_do_not_fit_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        reader(**keys)


def test_unwanted_tokens_must_exist_and_not_end_each_answer():
    for tokens, message in (([1, 99999], "unwanted: there is no token 99999"), ([QWEN3.eos_token_id], "Take it away")):
        section = RewardPenaltyConfig.build(penalize_unwanted_tokens=True, token_ids={"unwanted": tokens})
        with pytest.raises(ConfigError, match=message):
            ReviewSettings(section).make(QWEN3)


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<>[]", exclude_categories=("Cs",)), max_size=60)
ANSWERS = WORDS.filter(lambda text: QWEN3.decode(ids(text), skip_special_tokens=True).strip())


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(list(READERS)), WORDS, ANSWERS, st.booleans())
def test_a_well_formed_answer_is_never_penalised(kind, thought, answer, opened):
    text = f"{thought}</think>{answer}<|im_end|>"
    found = turn(kind, text, "<think>\n") if opened else turn(kind, f"<think>{text}")
    assert MalformedThinkTag().offending([found]) == []
    assert EmptyFinalAnswer().offending([found]) == []
    assert not repeats(found.reasoning, found.final_answer) or len(thought) >= 40


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), max_size=6), st.booleans())
def test_tags_as_tokens_and_as_texts_are_found_alike(tags, opened):
    text = "".join(f"{'<think>' if opens else '</think>'}word " for opens in tags)
    before = "<think>\n" if opened else "assistant\n"
    found = [turn(kind, f"say {text}", before) for kind in ("tokens", "texts")]
    assert found[0].malformed == found[1].malformed
    assert found[0].reasoning == found[1].reasoning
    assert found[0].final_answer == found[1].final_answer
    # Reference: thinking is open after an opening tag; a tag that changes nothing is out of place, and so is open end.
    states = [opened, *tags]
    assert len(found[0].malformed) == sum(now == then for now, then in zip(states, tags, strict=False)) + states[-1]
