"""Conversations and pairs: what is read, what is refused, and which place an error names."""

import json

import pytest
import torch
from data_helpers import write_lines
from tiny_models import make_char_tokenizer
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from nemo_rl.config import DatasetConfig, SupervisedDataConfig
from nemo_rl.data.collate_fn import feedback_collate_fn, preference_collate_fn
from nemo_rl.data.datasets.preference_datasets import load_preference_dataset
from nemo_rl.data.datasets.response_datasets import load_response_dataset
from nemo_rl.data.datasets.setup import setup_feedback_data, setup_preference_data, setup_sft_data
from nemo_rl.data.processors import PROCESSOR_REGISTRY, preference_preprocessor
from nemo_rl.data.tokenizer import ensure_distinct_pad_token
from nemo_rl.utils.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def chars():
    return make_char_tokenizer()


def config(**keys):
    return SupervisedDataConfig.build(**keys)


def reasons(rows):
    return {f"{row.line}": row.reason for row in rows}


def say(role, text):
    return {"role": role, "content": text}


def test_pairs_go_through_the_processor_that_the_entry_names(chars, tmp_path, monkeypatch):
    path = write_lines(tmp_path / "pairs.jsonl", {"prompt": "1+1=", "chosen": "2", "rejected": "3"})

    def with_margin(row, spec, tokenizer, longest, idx):
        return preference_preprocessor(row, spec, tokenizer, longest, idx) | {"margin": 7.0}

    monkeypatch.setitem(PROCESSOR_REGISTRY, "with_margin", with_margin)
    entry = {"data_path": path}
    assert "margin" not in setup_preference_data(chars, config(train=entry)).train[0]
    assert setup_preference_data(chars, config(train=entry | {"processor": "with_margin"})).train[0]["margin"] == 7.0
    with pytest.raises(DataError, match="processor 'with_margim' is unknown"):
        setup_preference_data(chars, config(train=entry | {"processor": "with_margim"}))


def test_every_kind_of_bad_conversation_is_skipped_by_name(chars, tmp_path, caplog):
    good = {"messages": [say("user", "1+1="), say("assistant", "2")]}
    rows = [
        good,
        {"message": []},
        {"messages": [say("user", "1+1="), say("assistant", "  ")]},
        {"messages": [say("user", "1+1="), say("assistant", "2"), say("user", "so?")]},
        {"messages": [say("user", "1" * 90), say("assistant", "2")]},
        {"messages": "1+1=2"},
        {"messages": [say("judge", "1+1="), say("assistant", "2")]},
        {"messages": [say("user", "x"), {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
    ]
    path = tmp_path / "rows.jsonl"
    write_lines(path, *rows)
    path.write_bytes(path.read_bytes() + b'{"messages": \n{"messages": "\xff"}\n' + json.dumps(good).encode())
    entry = {"dataset_name": "openai_format", "data_path": str(path)}
    with pytest.raises(DataError, match=r"81.8% of its rows cannot be used") as refused:
        setup_sft_data(chars, config(train=entry, max_input_seq_length=64))
    assert f"not valid UTF-8: {path}:10" in str(refused.value)
    data = setup_sft_data(chars, config(train=entry, max_input_seq_length=64, max_bad_row_share=0.9))
    assert len(data.train) == 2
    assert reasons(data.bad_rows) == {
        "2": "missing 'messages'",
        "3": "empty 'content'",
        "4": "the last message is not an assistant's",
        "5": "longer than data.max_input_seq_length=64 tokens",
        "6": "'messages' is text, not a list of messages",
        "7": "message 0 has the unknown role 'judge'",
        "8": "message 1 has a tool call without a name",
        "9": "not valid JSON",
        "10": "not valid UTF-8",
    }
    assert data.train.place(1) == (str(path), 11)


def test_rows_held_out_for_validation_are_checked_too(chars, tmp_path):
    rows = [{"input": "1" * (90 if i % 4 == 0 else 3), "output": "1"} for i in range(40)]
    entry = {"data_path": write_lines(tmp_path / "rows.jsonl", *rows), "split_validation_size": 0.5}
    data = setup_sft_data(chars, config(train=entry, max_input_seq_length=64, max_bad_row_share=0.3))
    assert sorted(row.line for row in data.bad_rows) == list(range(1, 41, 4))
    assert len(data.train) + len(data.validation) == 30
    assert all(data.validation[i]["loss_multiplier"] == 1 for i in range(len(data.validation)))


def test_every_kind_of_bad_pair_is_skipped_by_name(chars, tmp_path):
    rows = [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"prompt": "1+1=", "chosen": "2"},
        {"prompt": "1+1=", "chosen": "2", "rejected": ""},
        {"prompt": "1+1=", "chosen": "2", "rejected": "2"},
        {"prompt": "1+1=", "chosen": "2", "rejected": "3" * 90},
        {"chosen": "2", "rejected": "3"},
        {"prompt": [say("user", "1+1=")], "chosen": [say("assistant", "2")], "rejected": [say("assistant", "4")]},
    ]
    entry = {"data_path": write_lines(tmp_path / "pairs.jsonl", *rows)}
    with pytest.raises(DataError, match="71.4% of its rows"):
        setup_preference_data(chars, config(train=entry, max_input_seq_length=64))
    data = setup_preference_data(chars, config(train=entry, max_input_seq_length=64, max_bad_row_share=0.9))
    assert reasons(data.bad_rows) == {
        "2": "missing 'rejected'",
        "3": "empty 'rejected'",
        "4": "chosen and rejected are the same",
        "5": "longer than data.max_input_seq_length=64 tokens",
        "6": "'chosen' is not written as '\\n\\nHuman: ... \\n\\nAssistant: ...'",
    }
    batch = preference_collate_fn([data.train[0], data.train[1]], chars, 8, add_loss_mask=True)
    assert batch["input_ids"].shape[0] == 4 and batch["input_ids"].shape[1] % 8 == 0
    for row, answer in enumerate(["2", "3", "2", "4"]):
        kept = batch["input_ids"][row][batch["token_mask"][row] > 0]
        assert chars.decode(kept) == f"{answer}<|im_end|>"
    assert batch["idx"] == [0, 0, 1, 1]


def test_generic_preference_rows_take_best_and_worst(tmp_path):
    def completion(rank, text):
        return {"rank": rank, "completion": [say("assistant", text)]}

    rows = [
        {"context": [say("user", "q")], "completions": [completion(2, "c"), completion(0, "a"), completion(1, "b")]},
        {"context": [say("user", "q")], "completions": [completion(1, "c"), completion(1, "a")]},
    ]
    path = write_lines(tmp_path / "rows.jsonl", *rows)
    raw = load_preference_dataset(DatasetConfig.build(dataset_name="PreferenceDataset", data_path=path))
    texts = [c["completion"][0]["content"] for c in raw.dataset[0]["pair"]["completions"]]
    assert texts == ["a", "c"]
    assert [row.reason for row in raw.bad_rows] == ["'completions' has no two ranks to compare"]


def test_helpsteer3_rows_become_pairs(tmp_path):
    rows = [
        {"context": [say("user", "q")], "response1": "a", "response2": "b", "overall_preference": value}
        for value in (-2, 1, 0)
    ]
    path = write_lines(tmp_path / "rows.jsonl", *rows)
    raw = load_preference_dataset(DatasetConfig.build(dataset_name="HelpSteer3", data_path=path))
    chosen = [row["pair"]["completions"][0]["completion"][0]["content"] for row in raw.dataset]
    assert chosen == ["a", "b"]
    assert [row.reason for row in raw.bad_rows] == ["'overall_preference' prefers neither response"]


def test_named_validation_sets_are_validated_separately(chars):
    def entry(count, **keys):
        return {"dataset_name": "arithmetic_preference", "num_samples": count, **keys}

    train = [entry(20, name="held_out", split_validation_size=0.5), entry(4)]
    validation = [entry(3), entry(5, name="easy"), entry(6, name="easy"), entry(2)]
    data = setup_preference_data(chars, config(train=train, validation=validation))
    assert {name: len(rows) for name, rows in data.named_validation.items()} == {"held_out": 10, "easy": 11}
    assert len(data.validation) == 5


def test_margins_of_pairs_are_read(chars, tmp_path):
    pair = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    values = (2, 0.5, None, -1, "far", True, float("inf"))
    path = write_lines(tmp_path / "rows.jsonl", *({**pair, "lead": value} for value in values), pair)
    plain = {"data_path": write_lines(tmp_path / "plain.jsonl", pair)}
    entries = [{"data_path": path, "margin_key": "lead"}, plain]
    data = setup_preference_data(chars, config(train=entries, max_bad_row_share=0.9))
    assert reasons(data.bad_rows) == {
        "3": "empty 'lead'",
        "4": "'lead' is -1, not a finite number from 0 up",
        "5": "'lead' is text, not a number",
        "6": "'lead' is true/false, not a number",
        "7": "'lead' is inf, not a finite number from 0 up",
        "8": "missing 'lead'",
    }
    batch = preference_collate_fn([data.train[i] for i in range(3)], chars, 1, add_loss_mask=True)
    assert batch["margin"].tolist() == [2.0, 2.0, 0.5, 0.5, 0.0, 0.0]
    assert "margin" not in preference_collate_fn([data.train[2]], chars, 1, add_loss_mask=True)
    row = {"context": [say("user", "q")], "response1": "a", "response2": "b", "overall_preference": -2}
    path = write_lines(tmp_path / "helpsteer.jsonl", row)
    keys = {"dataset_name": "HelpSteer3", "data_path": path, "margin_key": "overall_preference"}
    assert load_preference_dataset(DatasetConfig.build(**keys)).dataset[0]["pair"]["margin"] == 2


def test_tulu3_preference_rows_become_pairs(tmp_path):
    row = {
        "id": "x",
        "prompt": "q",
        "chosen": [say("user", "q"), say("assistant", "a")],
        "rejected": [say("user", "q"), say("assistant", "b")],
        "chosen_rating": 4.5,
    }
    path = write_lines(tmp_path / "rows.jsonl", row)
    raw = load_preference_dataset(DatasetConfig.build(dataset_name="Tulu3Preference", data_path=path))
    assert raw.dataset[0]["pair"]["context"] == [say("user", "q")]
    answers = [completion["completion"] for completion in raw.dataset[0]["pair"]["completions"]]
    assert answers == [[say("assistant", "a")], [say("assistant", "b")]]


def test_rows_with_tools_in_openai_format_are_read(tmp_path, qwen3):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    row = {
        "chat": [say("user", "q"), {"role": "assistant", "content": None, "tool_calls": [call]}],
        "functions": json.dumps(tools),
        "about": "Be brief.",
    }
    path = write_lines(tmp_path / "rows.jsonl", row)
    keys = {"chat_key": "chat", "tool_key": "functions", "system_key": "about"}
    raw = load_response_dataset(DatasetConfig.build(dataset_name="openai_format", data_path=path, **keys))
    made = raw.dataset[0]
    assert made["tools"] == tools
    assert made["messages"][0] == say("system", "Be brief.")
    assert made["messages"][2]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    data = setup_sft_data(qwen3, config(train={"dataset_name": "openai_format", "data_path": path, **keys}))
    log = data.train[0]["message_log"]
    assert log[-1]["content"].endswith('{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>')


def test_generated_pairs_differ_in_one_result():
    entry = DatasetConfig.build(dataset_name="arithmetic_preference", num_samples=200, max_operand=199)
    train, validation = (load_preference_dataset(entry, role).dataset for role in ("train", "validation"))
    sums = [{row["pair"]["context"][0]["content"] for row in rows} for rows in (train, validation)]
    assert not sums[0] & sums[1]
    for row in train:
        right, wrong = (c["completion"][0]["content"].split(";") for c in row["pair"]["completions"])
        assert all(eval(step.replace("=", "==")) for step in right)
        assert [a == b for a, b in zip(right, wrong, strict=True)].count(False) == 1
        assert right[-1].split("=")[1] == str(eval(row["pair"]["context"][0]["content"].rstrip("=")))


def test_a_data_set_of_the_wrong_kind_is_refused():
    with pytest.raises(DataError, match="Did you mean 'HelpSteer3'"):
        load_preference_dataset(DatasetConfig.build(dataset_name="HelpSteer"))


def test_pad_token_is_not_the_end_token(chars, bare_tokenizer):
    before = chars.pad_token
    ensure_distinct_pad_token(chars)
    assert chars.pad_token == before
    bare_tokenizer.pad_token = bare_tokenizer.eos_token
    bare_tokenizer.unk_token = "<pad>"
    ensure_distinct_pad_token(bare_tokenizer)
    assert bare_tokenizer.pad_token == "<pad>"
    words = Tokenizer(models.WordLevel({"</s>": 0, "a": 1}, unk_token="</s>"))
    alone = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="</s>", eos_token="</s>")
    with pytest.raises(ConfigError, match="has no other token for it"):
        ensure_distinct_pad_token(alone)


def test_masks_count_each_token_once(chars):
    data = setup_sft_data(chars, config(train={"dataset_name": "arithmetic_sft", "num_samples": 5}))
    for index in range(5):
        log = data.train[index]["message_log"]
        text = chars.decode(torch.cat([message["token_ids"] for message in log]))
        assert text.count("<|im_end|>") == 2 and text.endswith("<|im_end|>")


def test_every_kind_of_bad_labelled_answer_is_skipped_by_name(chars, tmp_path):
    rows = [
        {"prompt": "1+1=", "completion": "2", "label": True},
        {"prompt": [say("user", "1+1=")], "completion": [say("assistant", "3")], "label": 0},
        {"prompt": "1+1=", "completion": "2"},
        {"prompt": "1+1=", "completion": "2", "label": "good"},
        {"prompt": "1+1=", "completion": " ", "label": True},
        {"prompt": "1+1=", "completion": "2" * 90, "label": True},
        {"completion": "\n\nHuman: 1+1=\n\nAssistant: 4", "label": False},
        {"completion": [say("assistant", "2")], "label": True},
        {"completion": "2", "label": True},
    ]
    path = write_lines(tmp_path / "rows.jsonl", *rows)
    entry = {"dataset_name": "BinaryFeedbackDataset", "data_path": path}
    data = setup_feedback_data(chars, config(train=entry, max_input_seq_length=64, max_bad_row_share=0.9))
    assert reasons(data.bad_rows) == {
        "3": "missing 'label'",
        "4": "'label' is text, neither true nor false",
        "5": "empty 'completion'",
        "6": "longer than data.max_input_seq_length=64 tokens",
        "8": "'completion' has no prompt",
        "9": "'completion' is not written as '\\n\\nHuman: ... \\n\\nAssistant: ...'",
    }
    batch = feedback_collate_fn([data.train[i] for i in range(3)], chars, 8)
    assert batch["desirable"].tolist() == [1.0, 0.0, 0.0]
    for row, answer in enumerate(["2", "3", "4"]):
        assert chars.decode(batch["input_ids"][row][batch["token_mask"][row] > 0]) == f"{answer}<|im_end|>"


def test_pairs_can_be_used_as_labelled_answers(chars, tmp_path):
    rows = [{"prompt": f"{i}+1=", "chosen": f"{i + 1}", "rejected": "9"} for i in range(5)]
    rows += [{"prompt": "1+1=", "chosen": "2", "rejected": "3" * 90}, {"prompt": "1+1=", "chosen": "2"}]
    path = write_lines(tmp_path / "rows.jsonl", *rows)
    entry = {"data_path": path, "split_validation_size": 0.34}
    data = setup_feedback_data(chars, config(train=entry, max_input_seq_length=64, max_bad_row_share=0.9))
    assert sorted(row.line for row in data.bad_rows) == [6, 7]
    assert len(data.train) + len(data.validation) == 2 * 5 + 1
    prompts = [{row["message_log"][0]["content"] for row in part} for part in (data.train, data.validation)]
    assert not prompts[0] & prompts[1]
    first, second = data.train[0], data.train[1]
    assert (first["desirable"], second["desirable"]) == (True, False)
    assert second["message_log"][-1]["content"].startswith("9")
    assert data.train.place(1) == data.train.place(0)
