"""Rows of public data sets are read completely and with the right content."""

import gzip
import json
import re

import pytest
from transformers import AutoTokenizer

from nemo_rl.config import DataConfig, DatasetConfig
from nemo_rl.data.datasets import setup_response_data
from nemo_rl.data.datasets.preference_datasets import load_feedback_dataset, load_preference_dataset, parse_transcript
from nemo_rl.data.datasets.response_datasets import load_response_dataset


@pytest.fixture(scope="session", params=["minimind", "qwen3"])
def chat_tokenizer(request, shared_data):
    return AutoTokenizer.from_pretrained(shared_data / "tokenizers" / request.param)


def say(role, text):
    return {"role": role, "content": text}


def test_real_gsm8k_rows_are_read(shared_data, chat_tokenizer):
    path = shared_data / "gsm8k/train.jsonl.gz"
    train = {"dataset_name": "gsm8k", "data_path": str(path), "split_validation_size": 0.05}
    config = DataConfig.build(train=train, max_input_seq_length=256)
    data = setup_response_data(chat_tokenizer, config, ["math"])
    assert len(data.train) + len(data.validation) == 7473 and data.bad_rows == []
    first = data.train[0]
    assert first["extra_env_info"]["ground_truth"] == "72"
    assert "Natalia sold clips" in first["message_log"][0]["content"]
    answers = [row["messages"][1]["content"] for row in data.train.parts[0].parts[0].dataset]
    assert all(re.fullmatch(r"-?\d+(\.\d+)?", answer) for answer in answers)


@pytest.mark.parametrize(
    ("name", "question", "answer", "count"),
    [
        ("easy_math/svamp.jsonl.gz", "Question", "Answer", 1000),
        ("easy_math/mawps_addsub.jsonl.gz", "input", "target", 395),
        ("easy_math/mawps_singleop.jsonl.gz", "input", "target", 562),
        ("math/math_train_answers.json.gz", "problem", "answer", 7474),
        ("math/math_test.jsonl.gz", "problem", "solution", 5000),
        ("aime/aime25.jsonl", "problem", "expected_answer", 30),
        ("game24/24.csv", "Puzzles", "Rank", 1362),
    ],
)
def test_real_files_are_read(shared_data, name, question, answer, count):
    keys = {"input_key": question, "output_key": answer}
    raw = load_response_dataset(DatasetConfig.build(data_path=str(shared_data / name), **keys))
    assert raw.num_rows == count
    assert len(raw.dataset) + len(raw.bad_rows) == count
    assert {row.reason for row in raw.bad_rows} <= {f"empty {answer!r}"}
    assert len(raw.bad_rows) == (4 if "train_answers" in name else 0)
    if "easy_math" in name:
        assert all(re.fullmatch(r"-?\d+(\.\d+)?", text) for text in last_messages(raw))
        assert not any(text.endswith(".0") for text in last_messages(raw))


def test_hh_transcripts_become_pairs(shared_data):
    path = shared_data / "preference/hh_harmless_base_test.jsonl.gz"
    raw = load_preference_dataset(DatasetConfig.build(data_path=str(path)))
    with gzip.open(path, "rt") as file:
        lines = [json.loads(line) for line in file]
    assert raw.num_rows == len(lines) == 2312
    assert len(raw.dataset) + len(raw.bad_rows) == 2312 and len(raw.bad_rows) < 60
    first = raw.dataset[0]["pair"]
    for completion, text in zip(first["completions"], (lines[0]["chosen"], lines[0]["rejected"]), strict=True):
        told = "".join(
            f"\n\n{'Human' if m['role'] == 'user' else 'Assistant'}: {m['content']}"
            for m in [*first["context"], *completion["completion"]]
        )
        assert told == text
    assert parse_transcript("\n\nHuman: a\n\nAssistant: b", "x") == [say("user", "a"), say("assistant", "b")]


def test_oasst_trees_become_conversations(shared_data):
    path = str(shared_data / "instruct/oasst_en_100_tree.jsonl.gz")
    raw = load_response_dataset(DatasetConfig.build(dataset_name="open_assistant", data_path=path))
    assert len(raw.dataset) + len(raw.bad_rows) == raw.num_rows == 100
    assert len(raw.dataset) > 90
    for row in raw.dataset:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2) and roles


def test_real_labelled_answers_are_read(shared_data):
    path = str(shared_data / "preference/kto_en_demo.json.gz")
    keys = {"dataset_name": "BinaryFeedbackDataset", "data_path": path, "output_key": "messages"}
    raw = load_feedback_dataset(DatasetConfig.build(**keys))
    assert len(raw.dataset) == raw.num_rows == 300
    rows = [row["feedback"] for row in raw.dataset]
    assert 0 < sum(row["desirable"] for row in rows) < 300
    assert all(row["context"][-1]["role"] == "user" for row in rows)


def last_messages(raw):
    return [row["messages"][-1]["content"] for row in raw.dataset]
