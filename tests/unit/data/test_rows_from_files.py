"""Rows keep what their files hold: pairs with tools and prompts, nulls, digits, delimiters, lengths."""

import json
import pickle

import datasets
import pytest
from chat_templates import make_tokenizer
from data_helpers import write_lines

from nemo_rl.config import DatasetConfig, SupervisedDataConfig
from nemo_rl.data.collate_fn import feedback_collate_fn, preference_collate_fn
from nemo_rl.data.datasets.preference_datasets import load_feedback_dataset, load_preference_dataset
from nemo_rl.data.datasets.response_datasets import load_response_dataset
from nemo_rl.data.datasets.rows.readers import WrittenFloat, read_file
from nemo_rl.data.datasets.setup import setup_sft_data
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.messages.conversations import feedback_processor, preference_preprocessor, sft_processor
from nemo_rl.utils.errors import DataError

pytestmark = pytest.mark.fast

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ASK = {"role": "user", "content": "2+3?"}
TEXT = {"role": "assistant", "content": "Six."}
RESULT = {"role": "tool", "content": "5"}


def call(number, name="add"):
    function = {"name": name, "arguments": {"a": number}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


@pytest.fixture(scope="module")
def chatml():
    return make_tokenizer("byte_bpe", "chatml")


def load(folder, name, *rows, **keys):
    path = write_lines(folder / "rows.jsonl", *rows)
    read = load_feedback_dataset if name == "BinaryFeedbackDataset" else load_preference_dataset
    return read(DatasetConfig.build(dataset_name=name, data_path=path, **keys))


def counted(tokenizer, row):
    """Return the text of each side of a pair, and the text that counts."""
    datum = preference_preprocessor(row, TaskDataSpec(), tokenizer, None, 0)
    batch = preference_collate_fn([datum], tokenizer, 1, add_loss_mask=True)
    ids, lengths, mask = batch["input_ids"], batch["input_lengths"], batch["token_mask"] > 0
    return [
        (tokenizer.decode(ids[side][: lengths[side]]), tokenizer.decode(ids[side][mask[side]])) for side in range(2)
    ]


class TestPairs:
    @pytest.mark.parametrize(
        ("name", "row"),
        [
            ("BinaryPreferenceDataset", {"prompt": [ASK], "chosen": [call(1)], "rejected": [TEXT]}),
            ("BinaryPreferenceDataset", {"chosen": [ASK, call(1)], "rejected": [ASK, TEXT]}),
            (
                "PreferenceDataset",
                {
                    "context": [ASK],
                    "completions": [{"rank": 0, "completion": [call(1)]}, {"rank": 1, "completion": [TEXT]}],
                },
            ),
        ],
    )
    @pytest.mark.parametrize("as_text", [False, True])
    def test_tools_reach_the_template(self, tmp_path, chatml, name, row, as_text):
        row = {**row, "tools": json.dumps([TOOL]) if as_text else [TOOL]}
        for text, _ in counted(chatml, load(tmp_path, name, row).dataset[0]):
            assert json.dumps(TOOL) in text
        labelled = load_feedback_dataset(DatasetConfig.build(dataset_name=name, data_path=str(tmp_path / "rows.jsonl")))
        datum = feedback_processor(labelled.dataset[0], TaskDataSpec(), chatml, None, 0)
        assert json.dumps(TOOL) in "".join(message["content"] for message in datum["message_log"])

    def test_labelled_answers_have_tools_and_all_their_turns_count(self, tmp_path, chatml):
        row = {"prompt": [ASK], "completion": [call(1), RESULT, TEXT], "label": True, "functions": [TOOL]}
        raw = load(tmp_path, "BinaryFeedbackDataset", row, tool_key="functions")
        datum = feedback_processor(raw.dataset[0], TaskDataSpec(), chatml, None, 0)
        batch = feedback_collate_fn([datum], chatml, 1)
        text = chatml.decode(batch["input_ids"][0][batch["token_mask"][0] > 0])
        assert text.count("<|im_end|>") == 2 and '{"a": 1}' in text and text.endswith("Six.<|im_end|>")
        assert json.dumps(TOOL) in chatml.decode(batch["input_ids"][0])

    @pytest.mark.parametrize("prompt", ["2+3?", [ASK], None])
    @pytest.mark.parametrize("lead", [[], [{"role": "system", "content": "Be brief."}]])
    @pytest.mark.parametrize("key", [None, "prompt"])
    def test_a_prompt_is_asked_once(self, tmp_path, chatml, prompt, lead, key):
        row = {"chosen": [*lead, ASK, {**TEXT, "content": "Five."}], "rejected": [*lead, ASK, TEXT]}
        row |= {} if prompt is None else {"prompt": prompt}
        raw = load(tmp_path, "BinaryPreferenceDataset", row, prompt_key=key)
        if key and prompt is None:
            assert not len(raw.dataset) and "missing 'prompt'" in raw.bad_rows[0].reason
            return
        (text, good), (_, bad) = counted(chatml, raw.dataset[0])
        assert text.count("2+3?") == 1 and text.count("Be brief.") == len(lead)
        assert (good, bad) == ("Five.<|im_end|>", "Six.<|im_end|>")

    def test_all_answers_after_a_prompt_count(self, tmp_path, chatml):
        done = {"role": "assistant", "content": "Done."}
        row = {"prompt": "2+3?", "chosen": [call(1), RESULT, done], "rejected": [call(9), RESULT, done]}
        (text, good), (_, bad) = counted(chatml, load(tmp_path, "BinaryPreferenceDataset", row).dataset[0])
        assert "2+3?" in text
        assert '{"a": 1}' in good and '{"a": 9}' in bad and good.endswith("Done.<|im_end|>") and "5" not in good

    def test_conversations_count_from_where_they_differ(self, tmp_path, chatml):
        same = [ASK, call(1), RESULT]
        row = {"chosen": [*same, TEXT, ASK, TEXT], "rejected": [*same, {**TEXT, "content": "Seven."}, ASK, TEXT]}
        (_, good), (_, bad) = counted(chatml, load(tmp_path, "BinaryPreferenceDataset", row).dataset[0])
        assert (good, bad) == ("Six.<|im_end|>Six.<|im_end|>", "Seven.<|im_end|>Six.<|im_end|>")

    @pytest.mark.parametrize(
        ("row", "reason"),
        [
            ({"prompt": "other", "chosen": [ASK, TEXT], "rejected": [ASK, call(1)]}, "does not repeat the prompt"),
            ({"chosen": [ASK, TEXT], "rejected": [{**ASK, "content": "?"}, TEXT]}, "differ before"),
            ({"chosen": [ASK, TEXT, ASK, TEXT], "rejected": [ASK, TEXT]}, "is the beginning of the other"),
            ({"chosen": [ASK, TEXT], "rejected": [ASK, TEXT]}, "are the same"),
        ],
    )
    def test_pairs_that_cannot_be_told_apart_are_refused(self, tmp_path, row, reason):
        raw = load(tmp_path, "BinaryPreferenceDataset", row)
        assert not len(raw.dataset) and reason in raw.bad_rows[0].reason

    def test_columns_and_keys_that_nothing_reads_are_listed(self, tmp_path):
        completions = [{"rank": 0, "completion": [call(1)], "score": 3}, {"rank": 1, "completion": [TEXT]}]
        row = {"context": [ASK], "completions": completions, "id": 3, "note": "x"}
        raw = load(tmp_path, "PreferenceDataset", {**row, "id": 4}, row)
        assert raw.unused_columns == ("completions.score", "note")


class TestNullsOfArrow:
    def rows(self):
        def row(name, **arguments):
            properties = {key: {"type": "string"} for key in arguments}
            parameters = {"type": "object", "properties": properties, "required": list(arguments)}
            tool = {"type": "function", "function": {"name": name, "parameters": parameters}}
            function = {"name": name, "arguments": arguments}
            turn = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
            return {"messages": [ASK, turn], "tools": [tool]}

        made = [row("add", a="1", b="2"), row("find", query="x"), {"messages": [ASK, TEXT], "tools": []}]
        made[0]["tools"][0]["function"]["parameters"]["properties"]["a"]["default"] = None
        return made

    @pytest.mark.parametrize("suffix", ["parquet", "arrow"])
    def test_rows_of_tables_have_the_text_of_json_lines(self, tmp_path, chatml, suffix):
        rows = self.rows()
        table, path = datasets.Dataset.from_list(rows), tmp_path / f"rows.{suffix}"
        if suffix == "parquet":
            table.to_parquet(path)
        else:
            table.save_to_disk(tmp_path / "saved")
            path = next((tmp_path / "saved").glob("*.arrow"))
        texts = []
        for each in (write_lines(tmp_path / "rows.jsonl", *rows), str(path)):
            raw = load_response_dataset(DatasetConfig.build(dataset_name="openai_format", data_path=each))
            data = [sft_processor(row, TaskDataSpec(), chatml, None, 0) for row in raw.dataset]
            texts.append(["".join(message["content"] for message in datum["message_log"]) for datum in data])
        assert texts[0] == texts[1]
        assert '"default": null' in texts[0][0] and "null" not in texts[0][1]


class TestNumbers:
    @pytest.mark.parametrize(
        ("written", "text"),
        [
            ("0.0000001", "0.0000001"),
            ("1e-7", "0.0000001"),
            ("1.50", "1.50"),
            ("3.14159265358979323846", "3.14159265358979323846"),
            ("43.0", "43"),
            ("1e16", "10000000000000000"),
            ("12345678901234567890", "12345678901234567890"),
            ("1.5e20", "150000000000000000000"),
            ("-0.00001", "-0.00001"),
        ],
    )
    @pytest.mark.parametrize("suffix", ["jsonl", "json"])
    def test_a_truth_keeps_its_digits(self, tmp_path, written, text, suffix):
        row = f'{{"input": "?", "output": {written}}}'
        path = tmp_path / f"rows.{suffix}"
        path.write_text(row if suffix == "jsonl" else f"[{row}]")
        raw = load_response_dataset(DatasetConfig.build(data_path=str(path)))
        assert raw.dataset[0]["messages"][1]["content"] == text

    @pytest.mark.parametrize("written", ["1e999", "1e-999999999"])
    def test_a_number_of_too_many_digits_is_refused(self, tmp_path, written):
        path = tmp_path / "rows.jsonl"
        path.write_text(f'{{"input": "?", "output": {written}}}')
        raw = load_response_dataset(DatasetConfig.build(data_path=str(path)))
        assert not len(raw.dataset) and ("digits" in raw.bad_rows[0].reason or "finite" in raw.bad_rows[0].reason)

    def test_numbers_of_tables_get_no_exponent(self, tmp_path):
        datasets.Dataset.from_list([{"input": "?", "output": 1e-7}]).to_parquet(tmp_path / "rows.parquet")
        raw = load_response_dataset(DatasetConfig.build(data_path=str(tmp_path / "rows.parquet")))
        assert raw.dataset[0]["messages"][1]["content"] == "0.0000001"

    def test_a_written_number_can_travel(self):
        number = pickle.loads(pickle.dumps(WrittenFloat("1.50")))
        assert number == 1.5 and number.text == "1.50" and json.dumps([number]) == "[1.5]"


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_header_of_a_table_of_text_shows_its_delimiter(tmp_path, delimiter):
    path = tmp_path / "rows.csv"
    lines = [delimiter.join(fields) for fields in (['"input;a,b"', "output"], ['"1,5; 2|3"', "2"])]
    path.write_text("\n".join(lines) + "\n")
    assert read_file(str(path)).rows == [{"input;a,b": "1,5; 2|3", "output": "2"}]


def test_a_refusal_for_length_names_the_key_and_the_length_that_keeps_the_rows(tmp_path, chatml):
    rows = [{"messages": [ASK, {"role": "assistant", "content": "x " * count}]} for count in range(1, 41)]
    entry = {"dataset_name": "openai_format", "data_path": write_lines(tmp_path / "rows.jsonl", *rows)}
    with pytest.raises(DataError) as error:
        setup_sft_data(chatml, SupervisedDataConfig.build(train=entry, max_input_seq_length=40))
    lengths = [sft_processor(row, TaskDataSpec(), chatml, None, 0)["length"] for row in rows]
    assert f"{sorted(lengths)[35]} tokens keep 90% of the rows" in str(error.value)
    assert "policy.max_total_sequence_length" in str(error.value)


def text_rows(folder, **keys):
    return load_response_dataset(DatasetConfig.build(dataset_name="arrow_text", **keys))


def test_plain_texts_of_several_files_become_samples_of_a_length(tmp_path):
    datasets.Dataset.from_dict({"body": ["abcdefg", "xy"]}).to_parquet(tmp_path / "one.parquet")
    write_lines(tmp_path / "two.jsonl", {"body": "0123"}, {"body": " "}, {"other": "lost"})
    found = text_rows(tmp_path, data_files=[f"{tmp_path}/*.parquet", f"{tmp_path}/two.*"], text_key="body")
    assert [row["arrow_text"] for row in found.dataset] == ["abcdefg", "xy", "0123"]
    assert (found.num_rows, [bad.line for bad in found.bad_rows]) == (5, [2, 3])
    keys = {"data_files": f"{tmp_path}/one.parquet", "text_key": "body", "characters_per_sample": 3}
    pieces = text_rows(tmp_path, **keys).dataset
    assert [(row["arrow_text"], row["ends"]) for row in pieces] == [
        *(("abc", False), ("def", False), ("g", True)),
        ("xy", True),
    ]
    assert [pieces.place(position)[1] for position in range(4)] == [0, 0, 0, 1]
    with pytest.raises(DataError, match="matches no file"):
        text_rows(tmp_path, data_files=f"{tmp_path}/nothing-*.arrow")


def test_every_token_of_a_plain_text_counts_and_no_template_is_used(chatml, tmp_path):
    text = "The <|im_start|> of it.\n"
    whole, part = ({"arrow_text": text, "ends": ends, "task_name": None} for ends in (True, False))
    for row, end in ((whole, [chatml.eos_token_id]), (part, [])):
        datum = sft_processor(row, TaskDataSpec(), chatml, None, 0)
        (entry,) = datum["message_log"]
        ids = entry["token_ids"].tolist()
        assert ids[len(ids) - len(end) :] == end and entry["counts"] is True
        body = ids[: len(ids) - len(end)]
        assert chatml.decode(body) == text and not set(body) & set(chatml.all_special_ids), "a control token is text"
    plain = sft_processor({"arrow_text": "plain", "ends": False}, TaskDataSpec(), chatml, None, 0)
    assert plain["message_log"][0]["token_ids"].tolist() == chatml("plain", add_special_tokens=False)["input_ids"]


def test_plain_text_trains_through_the_whole_setup(chatml, tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", *({"text": f"text {number}"} for number in range(4)))
    entry = {"dataset_name": "arrow_text", "data_path": path}
    data = setup_sft_data(chatml, SupervisedDataConfig.build(train=entry, max_input_seq_length=64))
    assert [row["length"] for row in data.train] == [len(chatml(f"text {n}")["input_ids"]) + 1 for n in range(4)]
