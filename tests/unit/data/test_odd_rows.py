"""One odd row never ends a run: it is skipped with its place and a reason, at the start or when it is drawn."""

import copy
import json
import logging
import os
import time
from functools import partial

import pytest
import torch
from data_helpers import data_config, entry, write_lines
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import make_char_tokenizer

from nemo_rl.config import DatasetConfig, SupervisedDataConfig
from nemo_rl.config.schema.algorithms.evaluation import EvalDataConfig
from nemo_rl.data.bad_rows import RowError
from nemo_rl.data.collate_fn import feedback_collate_fn, preference_collate_fn, rl_collate_fn, sft_collate_fn
from nemo_rl.data.datasets import processed_dataset, setup_response_data
from nemo_rl.data.datasets.registry import own_messages
from nemo_rl.data.datasets.response_datasets import load_response_dataset
from nemo_rl.data.datasets.rows.readers import read_file
from nemo_rl.data.datasets.setup import setup_feedback_data, setup_preference_data, setup_sft_data
from nemo_rl.data.loader import build_loader
from nemo_rl.data.messages.encoding import encode_text
from nemo_rl.data.tokenizer import PASSTHROUGH_TEMPLATE
from nemo_rl.evals.prompts import EvalPrompts
from nemo_rl.utils.errors import DataError

DIGITS = "7" * 5000


@pytest.fixture(scope="module")
def chars():
    return make_char_tokenizer()


def say(role, text):
    return {"role": role, "content": text}


TALK = {"messages": [say("user", "1+1="), say("assistant", "2")], "tools": None}
PAIR = {"prompt": [say("user", "1+1=")], "chosen": "2", "rejected": [say("assistant", "3")]}
RANKED = {
    "context": [say("user", "1+1=")],
    "completions": [{"rank": rank, "completion": [say("assistant", str(rank))]} for rank in (0, 1)],
}
FEEDBACK = {"prompt": [say("user", "1+1=")], "completion": [say("assistant", "2")], "label": True}
PROMPT = {"input": "1+1=", "output": "2"}
CHOICE = {"question": "1+1=?", "options": ["1", "2"], "answer": "B", "subject": "sums"}


def supervised(setup, name, collate, path, chars, **keys):
    entry = {"dataset_name": name, "data_path": path}
    data = setup(chars, SupervisedDataConfig.build(train=entry, max_input_seq_length=200, **keys))
    return data.train, data.bad_rows, partial(collate, tokenizer=chars, make_sequence_length_divisible_by=1)


def prompts(name, path, chars, **keys):
    entry = {"dataset_name": name, "data_path": path, "env_name": "math"}
    data = setup_response_data(chars, data_config(train=entry, max_input_seq_length=200, **keys), ["math"])
    return data.train, data.bad_rows, rl_collate_fn


KINDS = {
    "sft": (TALK, partial(supervised, setup_sft_data, "openai_format", sft_collate_fn)),
    "pairs": (
        PAIR,
        partial(
            supervised,
            setup_preference_data,
            "BinaryPreferenceDataset",
            partial(preference_collate_fn, add_loss_mask=True),
        ),
    ),
    "ranked": (
        RANKED,
        partial(
            supervised, setup_preference_data, "PreferenceDataset", partial(preference_collate_fn, add_loss_mask=True)
        ),
    ),
    "feedback": (FEEDBACK, partial(supervised, setup_feedback_data, "BinaryFeedbackDataset", feedback_collate_fn)),
    "prompts": (PROMPT, partial(prompts, "ResponseDataset")),
    "chat prompts": (TALK, partial(prompts, "openai_format")),
}


def changed(row, *path_and_value):
    """Return a copy of a row with the value at a path replaced; with Ellipsis the key is removed."""
    *path, key, value = path_and_value
    odd = copy.deepcopy(row)
    place = odd
    for step in path:
        place = place[step]
    if value is ...:
        del place[key]
    else:
        place[key] = value
    return odd


def with_user_content(kind, row, value):
    key = {"sft": "messages", "chat prompts": "messages", "ranked": "context"}.get(kind, "prompt")
    return changed(row, "input", value) if kind == "prompts" else changed(row, key, 0, "content", value)


def places(bad_rows):
    return {row.line: row.reason for row in bad_rows}


@pytest.mark.parametrize("kind", KINDS)
def test_each_odd_content_is_skipped_and_named(chars, tmp_path, kind):
    good, load = KINDS[kind]
    odd = [None, ..., True, {"text": "1"}, [{"type": "image_url", "image_url": "x"}], ["1"], "\ud800", float("nan")]
    fine = [7, 7.0, "1+1="]
    rows = [with_user_content(kind, good, value) for value in odd + fine]
    path = write_lines(tmp_path / "rows.jsonl", *rows)
    data, bad, collate = load(path, chars, max_bad_row_share=1.0)
    assert sorted(places(bad)) == list(range(1, len(odd) + 1))
    assert not [row for row in bad if row.reason.startswith("cannot be read")]
    assert len(collate([data[i] for i in range(len(data))])["idx"]) >= len(fine)


@pytest.mark.parametrize("kind", ["sft", "chat prompts"])
def test_text_parts_are_joined_and_other_parts_refused_by_name(chars, tmp_path, kind):
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]
    image = [*parts, {"type": "image_url", "image_url": {"url": "x"}}]
    good, load = KINDS[kind]
    rows = [with_user_content(kind, good, value) for value in (parts, image)]
    data, bad, _ = load(write_lines(tmp_path / "rows.jsonl", *rows), chars, max_bad_row_share=0.5)
    assert "1+1=" in data[0]["message_log"][0]["content"]
    assert list(places(bad)) == [2]
    assert places(bad)[2].startswith("the content of message 0 has parts that are not text: image_url; the processors")
    with pytest.raises(DataError, match="parts that are not text: image_url"):
        load(write_lines(tmp_path / "images.jsonl", *rows[1:]), chars, max_bad_row_share=0.5)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_number_with_thousands_of_digits_skips_its_row(tmp_path, name):
    rows = ['{"a": 1}', f'{{"a": {DIGITS}}}', f'{{"a": {{"b": [-{DIGITS}]}}}}', '{"a": 2}']
    joined = "\n".join(rows) if name.endswith("l") else f"[{','.join(rows)}]"
    (tmp_path / name).write_text(joined)
    table = read_file(str(tmp_path / name))
    assert [row["a"] for row in table.rows] == [1, 2]
    assert {row.reason for row in table.bad_rows} == {"a number has more digits than Python reads"}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_an_object_with_a_repeated_key_skips_its_row(tmp_path, name):
    rows = ['{"a": 1, "a": 2}', '{"a": 1, "b": [{"c": 1, "c": 1}]}', '{"a": 3}']
    path = tmp_path / name
    path.write_text("\n".join(rows) if name.endswith("l") else f"[{','.join(rows)}]")
    table = read_file(str(path))
    assert list(table.rows) == [{"a": 3}]
    assert [row.reason for row in table.bad_rows] == [f"the key '{key}' occurs twice in one object" for key in "ac"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b,a\n1,2,3\n", "has the column 'a' twice"),
        ('"a\n1\n', "which names the columns, is not valid CSV"),
    ],
)
def test_a_table_with_ambiguous_columns_is_refused(tmp_path, content, message):
    path = tmp_path / "rows.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        read_file(str(path))
    path.write_text("a,,\n1,2,3\n")  # columns without a name belong to no key
    assert read_file(str(path)).rows[0]["a"] == "1"


def test_a_pipe_is_refused_by_its_kind(tmp_path):
    path = tmp_path / "rows.jsonl"
    os.mkfifo(path)
    with pytest.raises(DataError, match="is a pipe, a socket or a device"):
        read_file(str(path))


class TakesNothing:
    dataset = ()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("os.path", r"is a module, not an object in one\. Add the object's name: os\.path\.<name>"),
        ("os.sep", "is a str, not a class"),
        ("..", r"cannot be imported \(not a dotted path"),
        (f"{__name__}.TakesNothing", "does not take the keys of its entry: .*It is called with"),
    ],
)
def test_a_data_set_class_without_rows_is_refused(name, message):
    with pytest.raises(DataError, match=message):
        load_response_dataset(entry(dataset_name=name))


def test_a_row_that_never_ends_is_named(chars, tmp_path, monkeypatch):
    monkeypatch.setattr(processed_dataset, "ROW_LIMIT_S", 0.3)
    chars = copy.deepcopy(chars)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    chars.chat_template = "{% if messages[0]['content'] == 'b' %}" + endless + "{% endif %}" + PASSTHROUGH_TEMPLATE
    path = write_lines(tmp_path / "rows.jsonl", *({"input": text, "output": "1"} for text in "ab"))
    with pytest.raises(DataError, match=r"rows\.jsonl:2: making a prompt of the row .* takes longer than 0\.3 s"):
        setup_response_data(chars, data_config(train={"data_path": path}), ["math"])


def test_rows_of_a_user_class_may_have_text_parts():
    row = {"messages": [say("user", [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]), say("a", 2)]}
    assert own_messages(row) == [say("user", "1+1="), say("a", "2")]
    with pytest.raises(RowError, match="content of message 0 has parts that are not text: image"):
        own_messages({"messages": [say("user", [{"type": "image", "image": None}]), say("assistant", "2")]})


def test_tool_arguments_with_thousands_of_digits_are_refused_by_name(chars, tmp_path):
    call = {"function": {"name": "add", "arguments": f'{{"a": {DIGITS}}}'}}
    odd = changed(TALK, "messages", 1, {"role": "assistant", "content": "2", "tool_calls": [call]})
    _, bad, _ = KINDS["sft"][1](write_lines(tmp_path / "rows.jsonl", TALK, odd), chars, max_bad_row_share=0.5)
    assert places(bad) == {2: "the tool arguments of message 1 is not valid JSON"}


def paths_into(row):
    """Yield every path to a value of a row."""
    items = row.items() if isinstance(row, dict) else enumerate(row) if isinstance(row, list) else ()
    for key, value in items:
        yield (key,)
        yield from ((key, *rest) for rest in paths_into(value))


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=4)
    | st.sampled_from(["\ud800", "system", "assistant", "text", "{}", "{% x %}", "<|im_end|>", ...]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "rank", "name"]), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_odd_row_ends_a_run(chars, tmp_path, kind, data):
    good, load = KINDS[kind]
    rows = []
    for path in data.draw(st.lists(st.sampled_from(list(paths_into(good))), min_size=5, max_size=15)):
        value = data.draw(ODD)
        rows.append(changed(good, *path, value if value is ... else json.loads(json.dumps(value, default=str))))
    path = write_lines(tmp_path / "rows.jsonl", good, *rows, good)
    train, bad, collate = load(path, chars, max_bad_row_share=1.0)
    assert len(train) + len(bad) == len(rows) + 2
    assert {1, len(rows) + 2}.isdisjoint(places(bad))
    unforeseen = [row.reason for row in bad if row.reason.startswith("cannot be read")]
    assert not [reason for reason in unforeseen if "OverflowError" not in reason]
    loader = build_loader(train, 4, shuffle=False, seed=0, drop_last=False, collate_fn=collate, max_bad_row_share=1.0)
    assert sum(len(set(batch["idx"])) for batch in loader) == len(train)


PICKY = PASSTHROUGH_TEMPLATE.replace(
    "{% endfor %}", "{% if message['content'] == '13' %}{{ 1 / 0 }}{% endif %}{% endfor %}"
)


@pytest.fixture
def picky(chars):
    """Make a template that fails on the content `13`, with an error that is not jinja's."""
    tokenizer = copy.deepcopy(chars)
    tokenizer.chat_template = PICKY
    return tokenizer


def content_13(kind, row):
    return with_user_content(kind, row, "13")


def look(batch):
    return {
        key: value.tolist() if isinstance(value, torch.Tensor) else value
        for key, value in batch.items()
        if key != "message_log"
    }


@pytest.mark.parametrize(("kind", "workers"), [*((kind, 0) for kind in KINDS), ("pairs", 2)])
def test_rows_that_fail_when_drawn_do_not_train(monkeypatch, picky, tmp_path, caplog, kind, workers):
    for place in ("setup.CHECKED_ROWS", "setup.TRIED_ROWS"):
        monkeypatch.setattr(f"nemo_rl.data.datasets.{place}", 3)
    good, load = KINDS[kind]
    rows = [good] * 2 + [content_13(kind, good)] + [good] * 6 + [content_13(kind, good)] + [good] * 3
    path = write_lines(tmp_path / "rows.jsonl", *rows)
    train, bad, collate = load(path, picky, max_bad_row_share=0.2)
    (line,) = places(bad)
    assert line == 3 and "ZeroDivisionError" in places(bad)[3]

    def make():
        return build_loader(
            train, 4, shuffle=True, seed=1, num_workers=workers, collate_fn=collate, max_bad_row_share=0.2
        )

    with caplog.at_level(logging.WARNING):
        whole = [look(batch) for batch in make()]
    assert f"{path}:10: ZeroDivisionError: division by zero; kept with loss_multiplier 0." in caplog.text
    weights = {i: w for batch in whole for i, w in zip(batch["idx"], batch["loss_multiplier"], strict=True)}
    assert [i for i, weight in weights.items() if weight == 0] == [8]
    assert not any("fault" in batch for batch in whole)
    started, resumed = make(), make()
    next(iter(started))
    resumed.load_state_dict(started.state_dict())
    assert [look(batch) for batch in resumed] == whole[1:]


def test_too_many_rows_that_fail_when_drawn_end_the_run(monkeypatch, picky, tmp_path):
    monkeypatch.setattr("nemo_rl.data.datasets.setup.CHECKED_ROWS", 3)
    rows = [TALK] * 10 + [content_13("sft", TALK)] * 10
    train, _, collate = KINDS["sft"][1](write_lines(tmp_path / "rows.jsonl", *rows), picky, max_bad_row_share=0.1)
    loader = build_loader(train, 4, shuffle=False, seed=1, collate_fn=collate, max_bad_row_share=0.1)
    with pytest.raises(
        DataError, match=r"6 of 20 training rows could not be used, more than data.max_bad_row_share=0.1"
    ):
        list(loader)


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_that_fails_on_every_row_is_refused_at_start(chars, tmp_path, kind):
    tokenizer = copy.deepcopy(chars)
    tokenizer.chat_template = "{{ raise_exception('no such chat') }}"
    good, load = KINDS[kind]
    with pytest.raises(DataError, match=r"(?s)no row can be used.*no such chat"):
        load(write_lines(tmp_path / "rows.jsonl", *[good] * 3), tokenizer, max_bad_row_share=1.0)


@pytest.mark.parametrize(
    ("good", "name", "odd"),
    [
        (PROMPT, None, [("input", None), ("output", [1]), ("input", "13")]),
        (CHOICE, "mmlu", [("options", {"a": 1}), ("answer", 7), ("question", ...)]),
    ],
)  # fmt: skip
def test_odd_problems_of_an_evaluation_are_skipped_and_counted(picky, tmp_path, good, name, odd):
    path = write_lines(tmp_path / "rows.jsonl", good, *(changed(good, key, value) for key, value in odd), good)
    config = EvalDataConfig.build(dataset_name=name, data_path=path, prompt_file=None, max_bad_row_share=0.9)
    problems = EvalPrompts(config, picky)
    assert (len(problems), problems.num_bad_rows) == (2, 3)
    assert problems.batch(0, 2)["loss_multiplier"].tolist() == [1, 1]


@given(text=st.text(alphabet="ab1 \n", max_size=900), longest=st.integers(1, 40), scale=st.sampled_from([1, 30]))
@settings(max_examples=60, deadline=None)
def test_a_limited_encoding_is_too_long_exactly_if_the_whole_is(text, longest, scale):
    tokenizer = make_char_tokenizer()
    whole = encode_text(text * scale, tokenizer)
    encoded = encode_text(text * scale, tokenizer, longest)
    assert (len(encoded) > longest) == (len(whole) > longest)
    if len(whole) <= longest:
        assert torch.equal(encoded, whole)


@pytest.mark.parametrize("kind", ["sft", "prompts"])
def test_megabytes_of_text_become_a_stub_quickly(chars, tmp_path, kind):
    good, load = KINDS[kind]
    rows = [good, with_user_content(kind, good, "1 + 2 = 3, " * 500_000), good]
    path = write_lines(tmp_path / "rows.jsonl", *rows)
    started = time.process_time()
    train, bad, _ = load(path, chars, max_bad_row_share=0.5)
    assert time.process_time() - started < 2
    if kind == "sft":
        assert places(bad) == {2: "longer than data.max_input_seq_length=200 tokens"}
    else:
        assert (train[1]["loss_multiplier"], train[1]["length"], len(train[1]["message_log"][0]["content"])) == (
            0,
            4,
            4,
        )


class OwnRows:
    """A class with its own validation rows."""

    def __init__(self, **_keys):
        self.dataset = [TALK] * 5
        self.val_dataset = [changed(TALK, "messages", 1, "content", str(i)) for i in range(3)]


@pytest.mark.parametrize("sides", [["train"], ["train", "validation"]])
def test_validation_rows_of_a_class_are_validated_once(chars, sides):
    entry = DatasetConfig.build(dataset_name=f"{__name__}.OwnRows", env_name="math")
    other = DatasetConfig.build(dataset_name="arithmetic", num_samples=2, env_name="math")
    keys = {"train": entry, "validation": [entry, other]} if "validation" in sides else {"train": entry}
    for data in (
        setup_response_data(chars, data_config(**keys), ["math"]),
        setup_sft_data(chars, SupervisedDataConfig.build(**keys)),
    ):
        assert len(data.train) == 5
        assert len(data.validation) == (5 if "validation" in sides else 3)


def test_a_hundred_thousand_conversations_are_checked_in_seconds(chars, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text((json.dumps(TALK) + "\n") * 100_000)
    tokenizer = copy.deepcopy(chars)
    tokenizer.chat_template = PASSTHROUGH_TEMPLATE
    started = time.process_time()
    train, _, _ = KINDS["sft"][1](str(path), tokenizer)
    assert len(train) == 100_000
    assert time.process_time() - started < 10
