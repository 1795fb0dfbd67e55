"""Files with broken rows: each is reported with its place, all others are kept."""

import gzip
import logging

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from data_helpers import entry, pairs, write_lines

from nemo_rl.data.bad_rows import BadRow, report_bad_rows, summarize_bad_rows
from nemo_rl.data.datasets.response_datasets import (
    DATASET_REGISTRY,
    load_response_dataset,
)
from nemo_rl.data.datasets.rows.readers import read_file
from nemo_rl.utils.errors import DataError

pytestmark = pytest.mark.fast


def load(path, **keys):
    keys = {"input_key": "q", "output_key": "a"} | keys
    return load_response_dataset(entry(data_path=str(path), **keys))


def reasons(raw):
    return {row.line: row.reason for row in raw.bad_rows}


JSON_LINES = [
    b'\xef\xbb\xbf{"q": "one", "a": "1"}',  # 1: byte order mark
    b'{"q": "caf\xe9", "a": "2"}',  # 2: Latin-1
    b"",  # 3: blank
    b'{"q": "three", "a": "3"',  # 4: cut off
    b'{"q": "four"}',  # 5: no answer
    b'{"q": "five", "a": "  "}',  # 6: blank answer
    b'{"q": "six", "a": null}',  # 7: null
    b'{"q": ["seven"], "a": "7"}',  # 8: list
    b'["eight", "8"]',  # 9: not an object
    b'{"q": "nine", "a": true}',  # 10: true
    b'{"q": "ten", "a": NaN}',  # 11: not a number
    b'{"q": "\\ud83d", "a": "11"}',  # 12: half of a surrogate pair
    '{"q": "zwölf\u2028", "a": 12.0}\r'.encode(),  # 13: valid, and no line end inside
    b'{"q": "", "a": "13"}',  # 14
    b'{"q": "last", "a": -1.5}',  # 15: no newline at the end
]
JSON_REASONS = {
    2: "not valid UTF-8",
    4: "not valid JSON",
    5: "missing 'a'",
    6: "empty 'a'",
    7: "empty 'a'",
    8: "'q' is a list, not text or a number",
    9: "not a JSON object",
    10: "'a' is true/false, not text or a number",
    11: "'a' is not a finite number",
    12: "'q' is not valid Unicode (lone surrogate)",
    14: "empty 'q'",
}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.json", "rows.ndjson"])
def test_bad_json_lines_are_skipped_and_named(tmp_path, name):
    content = b"\n".join(JSON_LINES)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    raw = load(tmp_path / name)
    assert pairs(raw) == [("one", "1"), ("zwölf\u2028", "12"), ("last", "-1.5")]
    assert reasons(raw) == JSON_REASONS
    assert {row.file for row in raw.bad_rows} == {str(tmp_path / name)}
    assert raw.num_rows == 14
    assert raw.dataset.place(1) == (str(tmp_path / name), 13)


def test_bad_entries_of_a_json_array_are_skipped_and_named(tmp_path):
    path = tmp_path / "rows.json"
    path.write_bytes(b'[\n {"q": "one",\n  "a": "1"},\n {"q": "b\xe9", "a": "2"}, 3,\n\n {"q": "four", "a": 4}\n]\n')
    raw = load(path)
    assert pairs(raw) == [("one", "1"), ("four", "4")]
    assert sorted((row.line, row.reason) for row in raw.bad_rows) == [
        (4, "not a JSON object"),
        (4, "not valid UTF-8"),
    ]
    assert [raw.dataset.place(i)[1] for i in range(2)] == [2, 6]


@pytest.mark.parametrize(("text", "place"), [('[{"q": 1}\n{"q": 2}]', "line 2"), ('[\n{"q": 1},\n{"q"', "line 3")])
def test_a_broken_json_array_is_refused_with_its_position(tmp_path, text, place):
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(DataError, match=place):
        load(tmp_path / "rows.json")


def test_an_empty_json_array_is_refused(tmp_path):
    (tmp_path / "rows.json").write_text("[ ]")
    assert load(tmp_path / "rows.json").num_rows == 0


def test_bad_csv_rows_are_skipped_and_named(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(
        b"q,a\r\n"
        b'"two\nlines",1\n'  # 2 and 3
        b"short\n"  # 4
        b"caf\xe9,5\n"  # 5
        b'un"quoted,6\n'  # 6: a quote inside is text
        b'"open,7\n'  # 7: never closed
        + "separator\u2028,8\n".encode()  # 8
        + b"\n"  # 9: blank
        b"empty,\n"  # 10
        b'"a ""b""",11\n'  # 11
    )
    raw = load(path)
    assert pairs(raw) == [
        ("two\nlines", "1"),
        ('un"quoted', "6"),
        ("separator\u2028", "8"),
        ('a "b"', "11"),
    ]
    found = reasons(raw)
    assert found.pop(7).startswith("not valid CSV")
    assert found == {
        4: "1 fields where the header has 2",
        5: "not valid UTF-8",
        10: "empty 'a'",
    }


def test_parquet_and_arrow_files_are_read(tmp_path):
    columns = {"q": ["one", None, "three"], "a": [1.0, 2.0, 3.5], "other": [[1], [], [2]]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    raw = load(tmp_path / "rows.parquet")
    assert pairs(raw) == [("one", "1"), ("three", "3.5")]
    assert reasons(raw) == {1: "empty 'q'"}
    assert raw.dataset[1]["other"] == [2]
    with pyarrow.ipc.new_stream(tmp_path / "rows.arrow", pyarrow.table(columns).schema) as stream:
        stream.write_table(pyarrow.table(columns))
    assert pairs(load(tmp_path / "rows.arrow")) == pairs(raw)


def test_parquet_text_that_is_not_utf8_is_skipped(tmp_path):
    text = pyarrow.array([b"good", b"caf\xe9"], pyarrow.binary()).cast(pyarrow.string(), safe=False)
    table = pyarrow.table({"q": text, "a": ["1", "2"]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    raw = load(tmp_path / "rows.parquet")
    assert pairs(raw) == [("good", "1")]
    assert reasons(raw) == {1: "not valid UTF-8"}


def test_damaged_and_missing_files_are_refused(tmp_path):
    whole = gzip.compress(b'{"q": "1", "a": "1"}\n' * 1000)
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-20])
    (tmp_path / "no.parquet").write_bytes(b"PAR1 not really")
    (tmp_path / "rows.xlsx").write_bytes(b"")
    (tmp_path / "folder.jsonl").mkdir()
    for name, message in [
        ("cut.jsonl.gz", "cannot be read"),
        ("no.parquet", "cannot be read as .parquet"),
        ("rows.xlsx", r"an unknown kind; allowed: \*\.jsonl"),
        ("cutt.jsonl.gz", r"does not exist.*Did you mean cut\.jsonl\.gz"),
        ("none/rows.jsonl", "Neither does its folder"),
        ("folder.jsonl", "is a folder, though it is named like a file"),
    ]:
        with pytest.raises(DataError, match=message):
            read_file(str(tmp_path / name))


def test_the_summary_counts_bad_rows_by_reason():
    bad = [BadRow("f", line, "empty 'a'") for line in range(1, 8)] + [BadRow("f", 9, "x")]
    summary = summarize_bad_rows(bad, 100).splitlines()
    assert summary[0].startswith("8 of 100 rows")
    assert summary[1].strip() == "7 x empty 'a': f:1, f:2, f:3, f:4, f:5 and 2 more"
    assert summary[2].strip() == "1 x x: f:9"


def test_too_many_bad_rows_are_refused(caplog):
    bad = [BadRow("f", 1, "empty 'a'")]
    with pytest.raises(DataError, match=r"(?s)11\.1% .*max_bad_row_share=0\.1 .*f:1"):
        report_bad_rows("f", bad, 9, 0.1)
    with caplog.at_level(logging.WARNING):
        report_bad_rows("f", bad, 10, 0.1)
    assert "1 of 10 rows" in caplog.text
    with pytest.raises(DataError, match="no usable row"):
        report_bad_rows("f", bad, 1, 1.0)
    with pytest.raises(DataError, match="first row has the columns q, b; choose"):
        report_bad_rows("f", bad, 1, 1.0, ["q", "b"])
    with pytest.raises(DataError, match="has no rows"):
        report_bad_rows("f", [], 0, 1.0)


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(DataError, match="Did you mean 'OpenMathInstruct-2'"):
        load_response_dataset(entry(dataset_name="OpenMathInstruct2"))
    with pytest.raises(DataError, match="cannot be imported"):
        load_response_dataset(entry(dataset_name="no_such_package.Dataset"))
    with pytest.raises(DataError, match="names no data"):
        load_response_dataset(entry())
    with pytest.raises(DataError, match="needs data_path"):
        load_response_dataset(entry(dataset_name="ResponseDataset"))


def test_the_registry_has_the_documented_names():
    assert set(DATASET_REGISTRY) >= {
        "OpenMathInstruct-2", "DeepScaler", "DAPOMath17K", "DAPOMathAIME2024", "AIME2024",
        "AIME2025", "gsm8k", "GSM8K", "NuminaMath-1.5", "OpenR1-Math-220k", "squad",
        "ResponseDataset", "arithmetic",
    }  # fmt: skip


def test_nested_columns_of_named_data_sets_are_read(tmp_path):
    good = {"prompt": [{"role": "user", "content": "Q"}], "reward_model": {"ground_truth": "7"}}
    bad = good | {"prompt": "Q"}
    path = write_lines(tmp_path / "dapo.jsonl", good, bad, good | {"prompt": []})
    raw = load_response_dataset(entry(dataset_name="DAPOMath17K", data_path=path))
    assert pairs(raw) == [("Q", "7")]
    assert reasons(raw) == {2: "'prompt' is text, not a list of messages", 3: "empty 'prompt'"}

    good = {"context": "C", "question": "Q", "answers": {"text": ["A", "B"]}}
    bad = good | {"answers": {"text": []}}
    path = write_lines(tmp_path / "squad.jsonl", good, bad)
    raw = load_response_dataset(entry(dataset_name="squad", data_path=path))
    assert [m["role"] for m in raw.dataset[0]["messages"]] == ["system", "user", "assistant"]
    assert pairs(raw) == [("C", "A")] and reasons(raw) == {2: "empty 'answers'"}


def test_data_sets_are_found_in_mirror_folders(tmp_path):
    rows = datasets.Dataset.from_dict({"question": ["Q"], "answer": ["so\n#### 1,234"]})
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "both")
    for folder in ("one", "both"):
        raw = load_response_dataset(entry(dataset_name="gsm8k", data_path=str(tmp_path / folder)))
        assert pairs(raw) == [("Q", "1234")]
    with pytest.raises(DataError, match="split 'nope'"):
        load_response_dataset(entry(dataset_name="gsm8k", data_path=str(tmp_path / "both"), split="nope"))


def test_a_local_copy_of_a_hub_repository_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    (mirror / "README.md").write_text(
        "---\nconfigs:\n"
        "- config_name: AIME2025-I\n  data_files:\n  - {split: test, path: one.jsonl}\n"
        "- config_name: AIME2025-II\n  data_files:\n  - {split: test, path: two.jsonl}\n---\n"
    )
    write_lines(mirror / "one.jsonl", {"question": "Q1", "answer": "1"})
    second = [{"question": "Q2", "answer": "2"}, {"question": " ", "answer": "3"}]
    write_lines(mirror / "two.jsonl", *second)
    keys = {"dataset_name": "AIME2025", "data_path": str(mirror)}
    raw = load_response_dataset(entry(**keys))
    assert pairs(raw) == [("Q1", "1"), ("Q2", "2")]
    assert raw.bad_rows == [BadRow(str(mirror), 2, "empty 'question'")]
    assert pairs(load_response_dataset(entry(**keys, subset="AIME2025-II"))) == [("Q2", "2")]
    with pytest.raises(DataError, match="split 'train'.*folder must belong together"):
        load_response_dataset(entry(**keys, split="train"))


def test_hub_data_sets_without_network_are_refused_with_advice(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    message = r"'absent/nothing' .*cannot be loaded.*set data\.train\.data_path to a local copy"
    with pytest.raises(DataError, match=message):
        load_response_dataset(entry(data_path="absent/nothing"))


class OwnDataset:
    """Found by its dotted path in the test below."""

    def __init__(self, data_path, seed, **kwargs):
        chat = [{"role": "user", "content": data_path}, {"role": "assistant", "content": str(seed)}]
        self.dataset = [{"messages": chat}, {"messages": chat[:1]}]


def test_a_user_class_is_loaded_by_its_path():
    name = f"{OwnDataset.__module__}.OwnDataset"
    raw = load_response_dataset(entry(dataset_name=name, data_path="x", seed=3))
    assert pairs(raw) == [("x", "3")]
    assert reasons(raw) == {1: "'messages' is not a list of at least two messages"}
