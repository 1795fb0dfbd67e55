"""Rows with scores and rows with labelled steps: what is read, what is refused, and which tokens count."""

import json

import pytest
import torch
from tiny_models import make_char_tokenizer

from nemo_rl.config import REPOSITORY_ROOT, SupervisedDataConfig
from nemo_rl.data.collate_fn import labelled_steps_collate_fn, scored_collate_fn
from nemo_rl.data.datasets.arithmetic import steps_of
from nemo_rl.data.datasets.rows.scored_answers import ScoreColumns
from nemo_rl.data.datasets.setup import setup_scored_data, setup_step_data
from nemo_rl.data.messages.content import TextRules
from nemo_rl.data.messages.steps import StepForm, ends_of_steps, split_steps
from nemo_rl.data.tokenizer import ensure_distinct_pad_token, get_tokenizer
from nemo_rl.utils.errors import DataError

COLUMNS = ScoreColumns(("helpfulness", "correctness"), 0.0, 4.0)


@pytest.fixture(scope="module")
def chars():
    tokenizer = make_char_tokenizer()
    ensure_distinct_pad_token(tokenizer)
    return tokenizer


def config(train, **values):
    return SupervisedDataConfig.build(train=train, **({"max_input_seq_length": 64} | values))


def written(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def entry_of(path, name="ScoredAnswersDataset", **keys):
    return {"dataset_name": name, "data_path": path, "env_name": None, "processor": "sft_processor", **keys}


def say(role, content):
    return {"role": role, "content": content}


def test_scores_are_columns_or_an_object_and_may_be_missing(chars, tmp_path):
    path = written(
        tmp_path / "rows.jsonl",
        {"prompt": "1+1=", "response": "2", "helpfulness": 4, "correctness": 3.5, "verbosity": 9},
        {"prompt": [say("user", "1+1=")], "response": [say("assistant", "3")], "scores": {"correctness": 0}},
        {"messages": [say("user", "1+2="), say("assistant", "3")], "helpfulness": None, "correctness": 2},
    )
    data = setup_scored_data(chars, config(entry_of(path)), COLUMNS)
    rows = [data.train[index] for index in range(3)]
    assert [row["scores"] for row in rows] == [[4.0, 3.5], [None, 0.0], [None, 2.0]]
    batch = scored_collate_fn(rows, chars, 1)
    assert batch["target_scores"].tolist() == [[4.0, 3.5], [0.0, 0.0], [0.0, 2.0]]
    assert batch["score_mask"].tolist() == [[1, 1], [0, 1], [0, 1]]
    answers = [chars.decode(ids[mask > 0]) for ids, mask in zip(batch["input_ids"], batch["token_mask"], strict=True)]
    assert answers == ["2<|im_end|>", "3<|im_end|>", "3<|im_end|>"]
    ends = batch["input_lengths"] - 1
    assert [chars.decode(batch["input_ids"][row, end]) for row, end in enumerate(ends)] == ["<|im_end|>"] * 3


def test_scores_can_have_a_column_of_another_name(chars, tmp_path):
    path = written(tmp_path / "rows.jsonl", {"prompt": "1+1=", "response": "2", "ratings": {"helpfulness": 1}})
    data = setup_scored_data(chars, config(entry_of(path, scores_key="ratings")), COLUMNS)
    assert data.train[0]["scores"] == [1.0, None]


@pytest.mark.parametrize(
    ("scores", "reason"),
    [
        ({"helpfulness": "4"}, "'helpfulness' is text, not a number"),
        ({"helpfulness": True}, "'helpfulness' is true/false, not a number"),
        ({"helpfulness": [4]}, "'helpfulness' is a list, not a number"),
        ({"correctness": 5}, "'correctness' is 5, not a number from 0 to 4 (rm.min_score, rm.max_score)"),
        ({"correctness": -0.5}, "'correctness' is -0.5, not a number from 0 to 4 (rm.min_score, rm.max_score)"),
        ({"scores": {"correctness": 9}}, "'scores.correctness' is 9, not a number from 0 to 4"),
        ({"verbosity": 2}, "it has none of the scores helpfulness, correctness"),
        ({"scores": {"verbosity": 2}}, "it has none of the scores scores.helpfulness, scores.correctness"),
    ],
)
def test_a_score_that_cannot_be_used_is_an_error_with_row_and_key(chars, tmp_path, scores, reason):
    good = {"prompt": "1+1=", "response": "2", "helpfulness": 4}
    path = written(tmp_path / "rows.jsonl", good, {"prompt": "1+1=", "response": "2", **scores})
    with pytest.raises(DataError) as error:
        setup_scored_data(chars, config(entry_of(path)), COLUMNS)
    assert reason in str(error.value) and f"{path}:2" in str(error.value)


def test_without_limits_a_score_is_any_finite_number(chars, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+1=", "response": "2", "helpfulness": 1e300}\n')
    data = setup_scored_data(chars, config(entry_of(str(path))), ScoreColumns(("helpfulness",)))
    assert data.train[0]["scores"] == [1e300]
    path.write_text('{"prompt": "1+1=", "response": "2", "helpfulness": 1e999}\n')
    with pytest.raises(DataError, match="'helpfulness' is inf, not a finite number"):
        setup_scored_data(chars, config(entry_of(str(path))), ScoreColumns(("helpfulness",)))


def test_generated_answers_have_scores_that_follow_from_their_text(chars):
    entry = entry_of(None, "arithmetic_scores", num_samples=200)
    columns = ScoreColumns(("completeness", "correctness"), 0.0, 4.0)
    data = setup_scored_data(chars, config(entry, max_input_seq_length=128), columns)
    part = data.train.parts[0].parts[0]
    kinds = set()
    for position in range(200):
        scored = part.source(position)["scored"]
        problem, answer = scored["context"][0]["content"], scored["completion"][0]["content"]
        shown = [eval(step.replace("=", "==")) for step in answer.split(";")]
        want = [4 * len(shown) / len(steps_of(problem)), 4 * sum(shown) / len(shown)]
        assert scored["scores"] == pytest.approx(want)
        kinds.add((want[0] == 4, want[1] == 4))
    assert len(kinds) == 4
    with pytest.raises(DataError, match="arithmetic_scores has no score helpfulness.*completeness"):
        setup_scored_data(chars, config(entry), COLUMNS)


def test_the_tokens_of_steps_are_those_of_trl_with_a_chat_template(chars, tmp_path):
    """TRL's PRMTrainer encodes the prompt, and each completion with the separator; labels are at the last tokens."""
    row = {"prompt": "7+8=", "completions": ["7+8=15", "so 15"], "labels": [True, False]}
    path = written(tmp_path / "rows.jsonl", row)
    data = setup_step_data(chars, config(entry_of(path, "LabelledStepsDataset")), "\n")
    datum = data.train[0]
    prompt = chars.apply_chat_template([say("user", "7+8=")], tokenize=False, add_generation_prompt=True)
    parts = [chars(text, add_special_tokens=False)["input_ids"] for text in (prompt, "7+8=15\n", "so 15\n")]
    want = [*parts[0], *parts[1], *parts[2]]
    ends = [len(parts[0]) + len(parts[1]), len(want)]
    ids = torch.cat([message["token_ids"] for message in datum["message_log"]]).tolist()
    assert ids == [*want, chars.pad_token_id] and datum["length"] == len(ids)
    assert (datum["step_ends"], datum["step_labels"]) == (ends, [True, False])
    longer = {**datum, "step_ends": ends[:1], "step_labels": [True]}
    batch = labelled_steps_collate_fn([datum, longer], chars, 8)
    assert batch["token_mask"].nonzero().tolist() == [[0, ends[0]], [0, ends[1]], [1, ends[0]]]
    assert batch["step_labels"].nonzero().tolist() == [[0, ends[0]], [1, ends[0]]]
    assert batch["input_lengths"].tolist() == [len(ids)] * 2


def test_steps_of_a_byte_level_vocabulary_end_with_the_separator():
    tokenizer = get_tokenizer({"name": str(REPOSITORY_ROOT / "examples/assets/tiny-chat")})
    form = StepForm(tokenizer, ";", TextRules(rows=True, tools=True))
    log = form.log([say("user", "37+85=")], ["7+5=12", "30+80=110"])
    ids = torch.cat([entry["token_ids"] for entry in log])
    ends = ends_of_steps(log)
    assert tokenizer.decode(ids[ends - 1]) == ";;" and ends[-1] == len(ids) - 1
    assert tokenizer.decode(ids[: ends[0]]).endswith("7+5=12;")
    once = form.log([say("user", "37+85=")], ["7+5=12"])
    shorter = torch.cat([entry["token_ids"] for entry in once])
    assert torch.equal(ids[: ends[0]], shorter[:-1]), "later steps do not change the tokens of earlier ones"


def test_an_answer_without_text_has_no_steps(chars):
    assert split_steps("a\n\n b\n", "\n") == ["a", " b"] and split_steps(" \n", "\n") == []
    with pytest.raises(DataError, match="the answer has no steps"):
        StepForm(chars, "\n", TextRules()).log([say("user", "1")], [])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"labels": [True]}, "'completions' has 2 steps, and 'labels' has 1 labels"),
        ({"labels": [True, 2]}, "label 1 of 'labels' is 2, neither true nor false"),
        ({"labels": [True, "x"]}, "label 1 of 'labels' is text, neither true nor false"),
        ({"completions": ["a", " "]}, "step 1 of 'completions' is empty"),
        ({"completions": ["a", ["b"]]}, "step 1 of 'completions' is a list, not text or a number"),
        ({"completions": "ab"}, "'completions' is text, not a list"),
        ({"labels": None}, "empty 'labels'"),
    ],
)
def test_a_row_of_steps_that_cannot_be_used_is_an_error_with_row_and_key(chars, tmp_path, change, reason):
    good = {"prompt": "1+1=", "completions": ["a", "b"], "labels": [1.0, 0.0]}
    path = written(tmp_path / "rows.jsonl", good, {**good, **change})
    with pytest.raises(DataError) as error:
        setup_step_data(chars, config(entry_of(path, "LabelledStepsDataset")), "\n")
    assert reason in str(error.value) and f"{path}:2" in str(error.value)


def test_a_row_that_is_too_long_is_left_out(chars, tmp_path):
    good = {"prompt": "1+1=", "completions": ["a"], "labels": [True]}
    path = written(tmp_path / "rows.jsonl", good, {**good, "completions": ["a" * 90]})
    data = setup_step_data(chars, config(entry_of(path, "LabelledStepsDataset"), max_bad_row_share=0.6), "\n")
    assert len(data.train) == 1 and "longer than data.max_input_seq_length=64" in data.bad_rows[0].reason


def test_generated_steps_have_labels_that_follow_from_their_text(chars):
    entry = entry_of(None, "arithmetic_steps", num_samples=100)
    data = setup_step_data(chars, config(entry, max_input_seq_length=128), "\n")
    part = data.train.parts[0].parts[0]
    rows = [part.source(position)["labelled_steps"] for position in range(100)]
    for row in rows:
        assert row["labels"] == [eval(step.replace("=", "==")) for step in row["steps"]]
    labels = [label for row in rows for label in row["labels"]]
    assert 0.25 < labels.count(False) / len(labels) < 0.42 and any(all(row["labels"]) for row in rows)
    assert rows == [part.source(position)["labelled_steps"] for position in range(100)]
