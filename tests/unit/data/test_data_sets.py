"""Arithmetic, splits, mixing, setup, and real files."""

import json
import re
import time

import pytest
from data_helpers import data_config, entry, write_lines

from nemo_rl.config import MathEnvironmentConfig
from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.data.datasets import AllTaskProcessedDataset, MixedDataset, setup_response_data
from nemo_rl.data.datasets.arithmetic import ArithmeticDataset
from nemo_rl.data.datasets.response_datasets import load_response_dataset
from nemo_rl.data.datasets.user_data import GivenRows
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.processors import math_data_processor, math_hf_data_processor
from nemo_rl.utils.errors import ConfigError, DataError

pytestmark = pytest.mark.fast


def operands(rows):
    return [tuple(map(int, row["problem"][:-1].split("+"))) for row in rows]


def test_arithmetic_rows_are_correct_and_deterministic():
    rows = ArithmeticDataset(num_samples=500, seed=3).dataset
    for row in rows:
        assert re.fullmatch(r"[1-9]\d\+[1-9]\d=", row["problem"])
        assert eval(row["problem"][:-1]) == int(row["answer"])
        assert [message["content"] for message in row["messages"]] == [row["problem"], row["answer"]]
    again = ArithmeticDataset(num_samples=500, seed=3).dataset
    other = ArithmeticDataset(num_samples=500, seed=4).dataset
    assert list(rows) == list(again)
    assert [row["problem"] for row in rows] != [row["problem"] for row in other]


@pytest.mark.parametrize("num_operands", [2, 3])
@pytest.mark.parametrize("limits", [(-3, 20), (10, 99), (0, 100_000)])
def test_arithmetic_splits_have_no_common_sum(limits, num_operands):
    seen = {}
    for split, seed in (("train", 1), ("validation", 2)):
        made = ArithmeticDataset(split, 1000, *limits, num_operands=num_operands, seed=seed)
        assert len(made.dataset) == 1000
        rows = operands(made.dataset)
        assert all(limits[0] <= number <= limits[1] for row in rows for number in row)
        seen[split] = {tuple(sorted(row)) for row in rows}
    assert seen["train"].isdisjoint(seen["validation"])


def test_arithmetic_repeats_no_sum_before_all_are_used():
    rows = operands(ArithmeticDataset(num_samples=7000).dataset)
    assert len(set(rows)) == 7000
    share = len(set(operands(ArithmeticDataset("validation", 50_000).dataset))) / 8100
    assert 0.08 < share < 0.12


def test_arithmetic_refuses_impossible_settings():
    for arguments, message in [
        ({"min_operand": 5, "max_operand": 4}, "min_operand=5 is above max_operand=4"),
        ({"num_operands": 4}, "2 or 3 operands"),
        ({"split": "test"}, "no split 'test'"),
        ({"num_samples": 0}, "at least 1"),
        ({"split": "validation", "min_operand": 1, "max_operand": 1}, "leave no sum"),
    ]:
        with pytest.raises((ConfigError, DataError), match=message):
            ArithmeticDataset(**arguments)


def test_arithmetic_validation_of_a_config_uses_other_sums():
    keys = {"dataset_name": "arithmetic", "num_samples": 1000, "min_operand": 10, "seed": 5}
    raw = load_response_dataset(entry(**keys, split_validation_size=0.1))
    assert (len(raw.dataset), len(raw.val_dataset)) == (1000, 100)
    by_role = load_response_dataset(entry(**keys), "validation").dataset
    train = {tuple(sorted(row)) for row in operands(raw.dataset)}
    for rows in (raw.val_dataset, by_role):
        assert train.isdisjoint(tuple(sorted(row)) for row in operands(rows))


def test_a_split_keeps_the_order_and_every_row(tmp_path):
    path = write_lines(
        tmp_path / "rows.jsonl",
        *({"input": f"q{i}", "output": i} if i % 10 else {"input": "x"} for i in range(100)),
    )
    raw = load_response_dataset(entry(data_path=path, split_validation_size=0.2, seed=1))
    train = [int(row["messages"][1]["content"]) for row in raw.dataset]
    held_out = [int(row["messages"][1]["content"]) for row in raw.val_dataset]
    assert len(held_out) == 18 and len(raw.bad_rows) == 10
    assert train == sorted(train) and held_out == sorted(held_out)
    assert sorted(train + held_out) == [i for i in range(100) if i % 10]
    assert raw.val_dataset.place(0) == (path, held_out[0] + 1)
    again = load_response_dataset(entry(data_path=path, split_validation_size=0.2, seed=1))
    other = load_response_dataset(entry(data_path=path, split_validation_size=0.2, seed=2))
    assert list(again.val_dataset) == list(raw.val_dataset) != list(other.val_dataset)


@pytest.mark.parametrize("name", ["ResponseDataset", "arithmetic"])
def test_max_samples_is_a_seeded_draw_in_file_order(tmp_path, name):
    path = write_lines(tmp_path / "rows.jsonl", *({"input": str(n), "output": str(n)} for n in range(50)))
    where = {"num_samples": 50} if name == "arithmetic" else {"data_path": path}

    def rows(**keys):
        raw = load_response_dataset(entry(dataset_name=name, **where, **keys))
        return [[row["messages"][0]["content"] for row in part or ()] for part in (raw.dataset, raw.val_dataset)]

    everything = rows(seed=1)[0]
    drawn = rows(max_samples=10, seed=1)[0]
    assert len(set(drawn)) == 10 and sorted(drawn, key=everything.index) == drawn
    assert drawn == rows(max_samples=10, seed=1)[0] != everything[:10]
    if name == "ResponseDataset":
        assert set(drawn) != set(rows(max_samples=10, seed=2)[0])
    assert rows(max_samples=1000, seed=1)[0] == everything
    train, held_out = rows(max_samples=10, seed=1, split_validation_size=0.2)
    if name == "ResponseDataset":  # generated sums are held out in addition to those of training
        assert (len(train), len(held_out)) == (8, 2) and {*train, *held_out} == set(drawn)


def test_a_split_with_an_empty_side_is_refused(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", {"input": "q", "output": "1"})
    with pytest.raises(DataError, match=r"split_validation_size=0\.5 of 1 rows"):
        load_response_dataset(entry(data_path=path, split_validation_size=0.5))


@pytest.fixture
def two_files(tmp_path):
    one = write_lines(
        tmp_path / "one.jsonl",
        {"q": "1+1=", "a": 2},
        {"q": "1+2="},
        {"q": "1+3=", "a": 4},
        {"q": "1" * 50, "a": 5},
    )
    two = write_lines(tmp_path / "two.jsonl", {"input": "2+2=", "output": "4", "note": "kept"})
    (tmp_path / "prompt.txt").write_text("0+{}")
    return [
        {"data_path": one, "input_key": "q", "output_key": "a", "env_name": "math"},
        {"data_path": two, "env_name": "other", "prompt_file": str(tmp_path / "prompt.txt")},
    ]


def test_setup_mixes_data_sets(bare_tokenizer, two_files, caplog):
    config = data_config(train=two_files, validation=two_files[1], max_input_seq_length=20, max_bad_row_share=0.5)
    data = setup_response_data(bare_tokenizer, config, ["math", "other"])
    assert [data.train[i]["message_log"][0]["content"] for i in (0, 1, 3)] == [
        "1+1=", "1+3=", "0+2+2=",
    ]  # fmt: skip
    assert [data.train[i]["task_name"] for i in range(4)] == ["math"] * 3 + ["other"]
    assert [data.train[i]["idx"] for i in range(4)] == [0, 1, 2, 3]
    assert [data.train[i]["loss_multiplier"] for i in range(4)] == [1, 1, 0, 1]
    assert data.train[3]["extra_env_info"] == {"ground_truth": "4"}
    assert data.train.place(2) == (two_files[0]["data_path"], 4)
    assert data.train.place(3) == (two_files[1]["data_path"], 1)
    assert len(data.validation) == 1
    assert data.task_env == {"math": "math", "other": "other"}
    assert [(str(row), row.reason) for row in data.bad_rows] == [(f"{two_files[0]['data_path']}:2", "missing 'a'")]
    assert "1 of 4 rows cannot be used" in caplog.text
    with pytest.raises(IndexError):
        data.train[4]


def test_repeated_rows_come_in_whole_rounds(bare_tokenizer, two_files):
    validation = [two_files[0] | {"repeat": 3}, two_files[1]]
    train = {"dataset_name": "arithmetic", "num_samples": 20, "split_validation_size": 4, "repeat": 2}
    config = data_config(train=train, validation=validation, max_input_seq_length=20, max_bad_row_share=0.5)
    data = setup_response_data(bare_tokenizer, config, ["math", "other"])
    rows = [data.validation[i] for i in range(len(data.validation))]
    train_questions = [data.train[i]["message_log"][0]["content"] for i in range(len(data.train))]
    assert len(train_questions) == 40 and train_questions[:20] == train_questions[20:]
    assert len(rows) == 4 + 3 * 3 + 1, "rows set aside come once"
    assert [row["idx"] for row in rows] == list(range(14))
    questions = [row["message_log"][0]["content"] for row in rows]
    assert questions[4:7] == questions[7:10] == questions[10:13] and len(set(questions[4:7])) == 3
    assert data.validation.place(8) == data.validation.place(5) == (two_files[0]["data_path"], 3)
    assert len(data.bad_rows) == 1, "a bad row is reported once"


def test_answers_end_at_the_stop_strings_of_their_environment(bare_tokenizer, two_files):
    config = data_config(train=two_files, max_input_seq_length=20, max_bad_row_share=0.5)
    environments = {"math": MathEnvironmentConfig(stop_strings=["</answer>"]), "other": {"stop_strings": ["own"]}}
    data = setup_response_data(bare_tokenizer, config, environments)
    batch = rl_collate_fn([data.train[i] for i in range(4)])
    assert batch["stop_strings"] == [["</answer>"]] * 3 + [None]


def test_setup_joins_held_out_rows_and_validation_entries(bare_tokenizer):
    train = {"dataset_name": "arithmetic", "num_samples": 100, "split_validation_size": 0.1}
    validation = {"dataset_name": "arithmetic", "num_samples": 7, "env_name": "math"}
    data = setup_response_data(bare_tokenizer, data_config(train=train, validation=validation))
    assert (len(data.train), len(data.validation)) == (100, 17)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"env_name": "mth"}, r"data\.train\.env_name='mth'.*Did you mean 'math'"),
        ({"processor": "math_prozessor"}, "processor 'math_prozessor' is unknown"),
        ({"prompt_file": "none.txt"}, "prompt_file 'none.txt' cannot be read"),
        ({"data_path": "none.jsonl"}, "data_path 'none.jsonl' does not exist"),
        ({"input_key": "question"}, "(?s)no usable row.*missing 'question'.*columns q, a"),
        ({}, r"25\.0% of its rows cannot be used, more than data\.max_bad_row_share=0\.1"),
    ],
)
def test_setup_refuses_bad_data_before_training(bare_tokenizer, two_files, change, message):
    config = data_config(train=two_files[0] | change)
    with pytest.raises((ConfigError, DataError), match=message):
        setup_response_data(bare_tokenizer, config, ["math"])


def test_setup_needs_training_data(bare_tokenizer):
    with pytest.raises(DataError, match="data.train is empty"):
        setup_response_data(bare_tokenizer, data_config(), ["math"])


def test_setup_tries_the_first_row(bare_tokenizer, two_files, tmp_path):
    (tmp_path / "bad.txt").write_text("nothing")
    entry_keys = two_files[1] | {"prompt_file": str(tmp_path / "bad.txt")}
    with pytest.raises(DataError, match="no {} placeholder"):
        setup_response_data(bare_tokenizer, data_config(train=entry_keys), ["other"])


def test_many_rows_load_quickly(bare_tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {"input": "What is it? " * 20, "output": "42"}
    path.write_text((json.dumps(row) + "\n") * 20_000)
    started = time.process_time()
    data = setup_response_data(bare_tokenizer, data_config(train={"data_path": str(path)}), ["math"])
    assert len(data.train) == 20_000
    assert time.process_time() - started < 3


def test_a_processed_dataset_chooses_the_processor_by_task(bare_tokenizer, tmp_path):
    rows = [
        {"task_name": "raw", "problem": "1+1=", "expected_answer": "2"},
        {"task_name": "chat", "n": 3},
    ]
    (tmp_path / "p.txt").write_text("0+{}")
    dataset = AllTaskProcessedDataset(
        rows,
        bare_tokenizer,
        TaskDataSpec(prompt_file=tmp_path / "p.txt"),
        {
            "raw": (TaskDataSpec("raw"), math_data_processor),
            "chat": (TaskDataSpec("chat"), math_hf_data_processor),
        },
        {"chat": lambda row: row | {"messages": [{"role": "user", "content": "3"}] * 2}},
        max_seq_length=99,
    )
    assert [dataset[i]["message_log"][0]["content"] for i in range(2)] == ["0+1+1=", "0+3"]
    rows.append({"task_name": "none"})
    with pytest.raises(DataError, match="task 'none', for which there is no processor"):
        dataset[2]


class NoRows:
    """A user's data set class whose rows are gone."""

    def __init__(self, **keys):
        self.dataset = []


def test_training_rows_have_the_names_of_their_entries(bare_tokenizer, two_files):
    first = {"dataset_name": "arithmetic", "num_samples": 20, "split_validation_size": 4, "repeat": 2, "name": "sums"}
    config = data_config(train=[first, two_files[1]], validation=[two_files[1], two_files[1] | {"name": "twice"}])
    data = setup_response_data(bare_tokenizer, config, ["math", "other"])
    assert data.train.rows_by_name == {"sums": range(40), "other": range(40, 41)}
    assert [data.train.name_of(row) for row in (0, 39, 40)] == ["sums", "sums", "other"]
    assert (len(data.validation), len(data.named_validation["sums"]), len(data.named_validation["twice"])) == (1, 4, 1)
    names = [data.all_validation.name_of(row) for row in range(6)]
    assert names == [None, "sums", "sums", "sums", "sums", "twice"]
    assert [data.all_validation[row]["idx"] for row in range(6)] == list(range(6))


def test_a_data_set_without_rows_is_refused(bare_tokenizer, two_files):
    rowless = {"dataset_name": f"{__name__}.NoRows", "env_name": "math", "weight": 1.0}
    config = data_config(train=[two_files[1] | {"weight": 2.0}, rowless])
    with pytest.raises(DataError, match=r"data set .*NoRows has no rows\."):
        setup_response_data(bare_tokenizer, config, ["math", "other"])


@pytest.mark.parametrize(
    ("limit", "counts"),
    [(9, [3, 3, 3]), (10, [3, 3, 4]), (2, [0, 1, 1]), (20, [3, 8, 9]), (25, [3, 8, 14]), (99, [3, 8, 40])],
)
def test_the_first_rows_are_equally_many_of_each_part(limit, counts):
    sizes = (3, 8, 40)
    mixed = MixedDataset([GivenRows([{}] * size) for size in sizes], ["a", "b", "c"])
    rows = mixed.first_rows(limit)
    starts = (0, 3, 11)
    assert rows.rows == [start + n for start, count in zip(starts, counts, strict=True) for n in range(count)]
    assert [rows[position]["idx"] for position in range(len(rows))] == rows.rows
    assert [mixed.name_of(row) for row in (0, 2, 3, 10, 11, 50)] == ["a", "a", "b", "b", "c", "c"]
    assert rows.place(12) == ("list", 1)
