"""Conversations of a notebook become the batch that SFT would train on."""

import pytest
import torch
from tiny_models import make_char_tokenizer

import nemo_rl
from nemo_rl.utils.errors import DataError

pytestmark = pytest.mark.fast

TURNS = [
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+3="},
    {"role": "assistant", "content": "five"},
]


def counted(batch, row: int) -> list[int]:
    return batch["input_ids"][row][batch["token_mask"][row] == 1].tolist()


def test_assistant_tokens_are_unmasked_and_rows_are_padded() -> None:
    tokenizer = make_char_tokenizer()
    batch = nemo_rl.chat_batch(tokenizer, [TURNS, TURNS[:2]])
    rendered = [tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False) for turns in (TURNS, TURNS[:2])]
    # The template ends a turn with a newline after the closing token; the model never generates it.
    lengths = batch["input_lengths"].tolist()
    for row, ids in enumerate(rendered):
        assert batch["input_ids"][row, : lengths[row]].tolist() == ids[: lengths[row]]
        assert (batch["input_ids"][row, lengths[row] :] == tokenizer.pad_token_id).all()
    text = tokenizer.decode(counted(batch, 0))
    assert text == "2<|im_end|>five<|im_end|>"
    assert tokenizer.decode(counted(batch, 1)) == "2<|im_end|>"
    assert batch["sample_mask"].tolist() == [1.0, 1.0]
    assert (batch["input_ids"].dtype, batch["token_mask"].dtype) == (torch.int64, torch.float32)


def test_only_last_unmasks_only_the_last_turn() -> None:
    tokenizer = make_char_tokenizer()
    batch = nemo_rl.chat_batch(tokenizer, [TURNS], only_last=True)
    assert tokenizer.decode(counted(batch, 0)) == "five<|im_end|>"


def test_too_long_and_empty_conversations_are_refused() -> None:
    tokenizer = make_char_tokenizer()
    with pytest.raises(DataError, match="1 of 2 conversations are longer than max_length=40 tokens, the first is numb"):
        nemo_rl.chat_batch(tokenizer, [TURNS[:2], TURNS], max_length=40)
    with pytest.raises(DataError, match="no conversation"):
        nemo_rl.chat_batch(tokenizer, [])
