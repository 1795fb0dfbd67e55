"""Classes of the tokens of two tokenizers, and their file."""

import math
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny_models import make_char_tokenizer, make_pair_tokenizer

from nemo_rl.algorithms.teaching.projection import (
    NO_CLASS,
    Projection,
    common_beginnings,
    first_tokens,
    identity,
    num_ids,
    shared_tokens,
)
from nemo_rl.algorithms.teaching.text_alignment import spelling
from nemo_rl.config import TokenizerConfig
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.utils.errors import ConfigError

CHARS, PAIRS = make_char_tokenizer(), make_pair_tokenizer()
SHARED = Path(__file__).resolve().parents[5] / "shared/data/tokenizers"


def ids(tokenizer, *names: str) -> list[int]:
    return tokenizer.convert_tokens_to_ids(list(names))


def test_shared_tokens_are_those_with_equal_texts() -> None:
    found = shared_tokens(CHARS, PAIRS)
    assert found.indices[ids(CHARS, "1", "+", "Ġ"), 0].tolist() == ids(PAIRS, "1", "+", "Ġ")
    assert found.teacher_classes[ids(PAIRS, "1", "13")].tolist() == [*ids(PAIRS, "1"), NO_CLASS]
    assert int((found.indices >= 0).sum()) == 258  # all bytes, the end of the sequence and padding
    assert found.indices[CHARS.eos_token_id].tolist() == [PAIRS.eos_token_id]
    assert found.indices[ids(CHARS, "<|im_start|>"), 0].tolist() == [NO_CLASS]


def test_a_token_belongs_to_the_class_of_its_beginning() -> None:
    found = common_beginnings(CHARS, PAIRS)
    one = ids(PAIRS, "1")
    assert found.teacher_classes[ids(PAIRS, "1", "10", "19")].tolist() == one * 3
    assert found.indices[ids(CHARS, "1"), 0].tolist() == one
    assert int((found.teacher_classes >= 0).sum()) == 358
    back = common_beginnings(PAIRS, CHARS)
    assert back.indices[ids(PAIRS, "1", "10", "19"), 0].tolist() == ids(CHARS, "1") * 3
    tokens, logs = back.representatives
    assert tokens[ids(CHARS, "1")].tolist() == one and not logs.any()


def test_equal_tokenizers_have_a_class_for_each_token() -> None:
    for found in (shared_tokens(PAIRS, PAIRS), common_beginnings(PAIRS, PAIRS), identity(PAIRS)):
        assert torch.equal(found.indices[:, 0], torch.arange(360))
        assert torch.equal(found.teacher_classes, torch.arange(360))
        assert torch.equal(found.representatives[0], torch.arange(360))


@settings(max_examples=200, deadline=None)
@given(st.text("0123456789+= aé漢", min_size=1))
def test_both_models_begin_a_text_with_tokens_of_one_class(text: str) -> None:
    found = common_beginnings_of_pairs()
    own, other = (tokenizer.encode(text, add_special_tokens=False)[0] for tokenizer in (CHARS, PAIRS))
    assert found.indices[own, 0] == found.teacher_classes[other] >= 0


@cache
def common_beginnings_of_pairs() -> Projection:
    return common_beginnings(CHARS, PAIRS)


@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=1, max_size=6))
def test_the_first_token_of_any_bytes_is_found(text: bytes) -> None:
    first = first_tokens({0: text}, PAIRS)[0]
    assert text.startswith(spelling(PAIRS)(first))


@pytest.mark.long
@pytest.mark.parametrize("pair", [("qwen3", "llama3"), ("gpt2", "minimind"), ("minimind", "qwen3")])
def test_classes_of_published_tokenizers(pair) -> None:
    """Tokens begin with the text of their class, and each class has tokens of both."""
    if not SHARED.exists():
        pytest.skip("the published tokenizers are not on this machine")
    student, teacher = (get_tokenizer(TokenizerConfig.build(name=str(SHARED / name))) for name in pair)
    found = common_beginnings(student, teacher)
    special = [set(tokenizer.added_tokens_decoder) for tokenizer in (student, teacher)]
    of_both = ((student, found.indices[:, 0], special[0]), (teacher, found.teacher_classes, special[1]))
    for tokenizer, classes, left_out in of_both:
        for token in sorted(set(tokenizer.get_vocab().values()) - left_out):
            assert classes[token] >= 0
            assert spelling(tokenizer)(token).startswith(spelling(teacher)(int(classes[token])))
    classes = [set(each.unique().tolist()) - {NO_CLASS} for each in (found.teacher_classes, found.indices)]
    assert classes[0] == classes[1]
    exact = shared_tokens(student, teacher)
    both = exact.indices >= 0
    assert both.sum() > 0.1 * min(len(student), len(teacher))


def test_a_file_has_the_same_classes(tmp_path) -> None:
    found = common_beginnings(CHARS, PAIRS)
    found.save(tmp_path / "p.safetensors")
    read = Projection.load(str(tmp_path / "p.safetensors"), num_ids(CHARS), num_ids(PAIRS), "key")
    for name in ("indices", "weights", "teacher_classes"):
        assert torch.equal(getattr(read, name), getattr(found, name))


def test_the_token_with_the_largest_weight_represents_a_class() -> None:
    indices = torch.tensor([[0, 1], [1, NO_CLASS], [1, 2], [NO_CLASS, NO_CLASS]])
    weights = torch.tensor([[0.5, 0.5], [0.25, 0.0], [0.75, 0.125], [0.0, 0.0]])
    tokens, logs = Projection(indices, weights, torch.arange(4)).representatives
    assert tokens.tolist() == [0, 2, 2, -1]
    assert logs.tolist() == pytest.approx([math.log(0.5), math.log(0.75), math.log(0.125), 0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"indices": torch.zeros(5, 1, dtype=torch.int32)}, "is for 5 tokens of the student and 360 of the teacher"),
        ({"teacher_classes": torch.full((360,), 360, dtype=torch.int32)}, "no token ids of the teacher"),
        ({"weights": torch.full((264, 1), 2.0)}, r"weights outside of \(0, 1\]"),
        ({"other": torch.zeros(1)}, "has the tensors indices, other, teacher_classes, weights"),
    ],
)
def test_a_file_of_other_tokenizers_is_refused(changes, words, tmp_path) -> None:
    path = tmp_path / "p.safetensors"
    found = common_beginnings_of_pairs()
    tensors = {
        "indices": found.indices.int(),
        "weights": found.weights,
        "teacher_classes": found.teacher_classes.int(),
    }
    save_file(tensors | changes, path)
    with pytest.raises(ConfigError, match=words):
        Projection.load(str(path), 264, 360, "teacher.projection_matrix_path")


def test_a_missing_or_broken_file_is_named(tmp_path) -> None:
    (tmp_path / "broken").write_bytes(b"abc")
    for name in ("missing", "broken"):
        with pytest.raises(ConfigError, match=f"teacher.projection_matrix_path=.*{name}.* cannot be read"):
            Projection.load(str(tmp_path / name), 264, 360, "teacher.projection_matrix_path")
