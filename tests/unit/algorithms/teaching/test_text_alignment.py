"""Teachers with another tokenizer: the bytes of tokens, common spans, and the differences that tokens get."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny_models import make_char_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.algorithms.teaching.prompts import TeacherPrompts
from nemo_rl.algorithms.teaching.teachers import TeacherRoutes
from nemo_rl.algorithms.teaching.text_alignment import AlignedTeacher, common_spans, read_answer, token_bytes
from nemo_rl.config import TokenizerConfig
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.utils.errors import ConfigError, DataError

CHARS = make_char_tokenizer()
SHARED = Path(__file__).resolve().parents[5] / "shared/data/tokenizers"
TEXTS = ["Hello world!", "x = 1\n\n  return é漢😀", " leading", "", "naïve <|im_end|> 12345 ▁"]


def of_pairs() -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each two digits, besides single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [f"{left}{right}" for left in "0123456789" for right in "0123456789"]
    vocabulary = {token: number for number, token in enumerate([*alphabet, *pairs, "<eos>"])}
    core = Tokenizer(models.BPE(vocabulary, [(pair[0], pair[1]) for pair in pairs]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<eos>")
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
    return tokenizer


def of_words() -> PreTrainedTokenizerFast:
    """A tokenizer with word marks and byte fallback, as SentencePiece makes them."""
    names = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁is", "▁4", "4", "2", "▁42", "▁It"]
    core = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")


PAIRS, WORDS = of_pairs(), of_words()


@pytest.mark.parametrize("tokenizer", [CHARS, PAIRS])
@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_tokens_are_those_of_the_text(tokenizer, text) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(token_bytes(tokenizer), ids)) == text.encode()


@pytest.mark.parametrize("name", ["gpt2", "llama3", "qwen3", "minimind"])
def test_the_bytes_of_tokens_of_published_tokenizers(name) -> None:
    if not SHARED.exists():
        pytest.skip("the published tokenizers are not on this machine")
    tokenizer = get_tokenizer(TokenizerConfig.build(name=str(SHARED / name)))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(token_bytes(tokenizer), ids)) == text.encode()


def test_word_marks_are_spaces_and_fallback_tokens_are_bytes() -> None:
    spell = token_bytes(WORDS)
    names = WORDS.convert_tokens_to_ids(["▁It", "▁is", "▁4", "2", "<0xC3>", "<0xA9>", "</s>"])
    assert b"".join(map(spell, names)) == " It is 42é</s>".encode()


def test_a_tokenizer_without_bytes_is_refused() -> None:
    core = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    core.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="have no known bytes"):
        token_bytes(PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>"))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=4), max_size=12), st.data())
def test_spans_cover_both_sides_and_are_the_shortest(left: list[bytes], data: Any) -> None:
    whole = b"".join(left)
    assume(whole)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    right = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    spans = list(common_spans(left, right))
    assert [n for span, _ in spans for n in range(span.start, span.stop)] == list(range(len(left)))
    assert [n for _, span in spans for n in range(span.start, span.stop)] == list(range(len(right)))
    for mine, theirs in spans:
        assert b"".join(left[mine]) == b"".join(right[theirs])
        inner = {len(b"".join(left[mine.start : n])) for n in range(mine.start + 1, mine.stop)}
        other = {len(b"".join(right[theirs.start : n])) for n in range(theirs.start + 1, theirs.stop)}
        assert not {n for n in inner & other if 0 < n < len(b"".join(left[mine]))}


def test_tokens_that_spell_other_texts_have_no_spans() -> None:
    with pytest.raises(ValueError, match="different bytes"):
        list(common_spans([b"ab"], [b"a"]))


def test_an_answer_is_read_in_the_tokens_of_the_teacher() -> None:
    prompt = torch.tensor([7, 8, 9])
    answer = [*CHARS.encode("8+5=13", add_special_tokens=False), CHARS.eos_token_id]
    row = read_answer(prompt, 25, answer, CHARS, PAIRS, 100)
    assert row is not None
    assert row.token_ids[:3].tolist() == [7, 8, 9]
    assert PAIRS.convert_ids_to_tokens(row.token_ids[3:].tolist()) == ["8", "+", "5", "=", "13", "<eos>"]
    assert [(own.start - 25, own.stop - 25) for own, _ in row.spans] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 6), (6, 7)]
    assert [(other.start, other.stop) for _, other in row.spans][-2:] == [(7, 8), (8, 9)]
    assert read_answer(prompt, 25, answer, CHARS, PAIRS, 8) is None


def test_an_answer_that_is_no_text_cannot_be_read() -> None:
    half = CHARS.encode("é", add_special_tokens=False)[:1]
    assert read_answer(torch.tensor([1]), 0, half, CHARS, PAIRS, 100) is None


class TokenScores:
    """A model whose log-probability of a token is minus its id over 100."""

    def get_logprobs(self, rows: BatchedDataDict[Any]) -> dict[str, torch.Tensor]:
        self.seen = [PAIRS.decode(row[:n]) for row, n in zip(rows["input_ids"], rows["input_lengths"], strict=True)]
        return {"logprobs": -rows["input_ids"].double() / 100}


def sample(answer: list[int], turns: int = 1) -> Trajectory:
    prompt = torch.tensor(
        CHARS.encode("<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    )
    turn = {"role": "assistant", "content": "", "token_ids": torch.tensor(answer)}
    log = [{"role": "user", "content": "", "token_ids": prompt}, *[{**turn, "generation_logprobs": None}] * turns]
    return Trajectory(0, 0, 0, "math", log, len(prompt), reward=1.0)


def test_each_token_gets_the_difference_of_its_span() -> None:
    answer = [*CHARS.encode("=13", add_special_tokens=False), CHARS.eos_token_id]
    row = sample(answer)
    start = row.prompt_length
    tensors = BatchedDataDict(
        input_ids=torch.cat([message["token_ids"] for message in row.message_log])[None],
        token_mask=torch.tensor([[0.0] * start + [1.0] * len(answer)]),
        sample_mask=torch.ones(1),
        prev_logprobs=-torch.arange(start + len(answer), dtype=torch.float64)[None] / 10,
    )
    datum = {
        "message_log": [row.message_log[0]],
        "idx": 0,
        "chat": {"messages": [{"role": "user", "content": "1+2="}], "tools": None},
    }
    teacher = TokenScores()
    stage = AlignedTeacher(
        teacher,  # type: ignore[arg-type]
        "teachers.math",
        TeacherRoutes({"math": "teachers.math"}),
        TeacherPrompts([datum], PAIRS),  # type: ignore[arg-type]
        CHARS,
        100,
    )
    metrics = stage.apply(StepBatch(tensors, [row]))
    assert teacher.seen == ["[user] 1+2=\n[assistant] =13<eos>"]
    own = tensors["prev_logprobs"][0, start:]
    ids = {name: PAIRS.convert_tokens_to_ids(name) for name in ("=", "13", "<eos>")}
    gap = -ids["13"] / 100 - (own[1] + own[2])
    wanted = torch.stack([torch.tensor(-ids["="] / 100), own[1] + gap, own[2] + gap, torch.tensor(-ids["<eos>"] / 100)])
    torch.testing.assert_close(tensors["teacher_logprobs"][0, start:].double(), wanted.double(), rtol=1e-6, atol=1e-6)
    assert torch.equal(tensors["teacher_logprobs"][0, :start], tensors["prev_logprobs"][0, :start])
    assert (metrics["teachers.math/num_rows"], metrics["teachers.math/num_unread"]) == (1, 0)
    with pytest.raises(DataError, match="several responses"):
        stage.apply(StepBatch(tensors, [sample(answer, turns=2)]))
