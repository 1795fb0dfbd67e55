"""Levels of effort: drawn by weight and seed, rendered through the chat template, refused where they mean nothing."""

import pickle
from collections import Counter

import pytest

from nemo_rl.config import DataConfig, EffortLevelConfig
from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.data.datasets.processed_dataset import AllTaskProcessedDataset, MixedDataset
from nemo_rl.data.datasets.setup import RunData
from nemo_rl.data.datasets.user_data import GivenRows
from nemo_rl.data.effort_levels import EffortRows, drawn_level, leveled, with_effort_levels
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.messages.encoding import render_chat
from nemo_rl.data.messages.observations import ObservationRenderer
from nemo_rl.data.processors import episode_data_processor, math_data_processor
from nemo_rl.utils.errors import ConfigError, DataError

pytestmark = pytest.mark.fast

LEVELS = {
    "low": EffortLevelConfig(weight=1.0, system_prompt="Be brief."),
    "off": EffortLevelConfig(weight=2.0, chat_template_kwargs={"enable_thinking": False}),
    "high": EffortLevelConfig(weight=1.0),
}


def problems(tokenizer, num_rows=200, *, max_seq_length=None, system=None):
    rows = [{"problem": f"{number} + 1", "expected_answer": str(number + 1)} for number in range(num_rows)]
    spec = TaskDataSpec("math")
    spec.system_prompt = system
    made = AllTaskProcessedDataset(rows, tokenizer, spec, math_data_processor, max_seq_length=max_seq_length)
    return MixedDataset([made])


def shown(tokenizer, row, *, system=None, **variables):
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": f"{row} + 1"})
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)


def test_levels_are_drawn_by_their_weights_and_the_same_again():
    drawn = [drawn_level(LEVELS, 7, "train", row) for row in range(4000)]
    counts = Counter(drawn)
    # Binomial deviations of 4000 draws: 27 for a share of 1/4, 32 for 1/2; four of them.
    assert counts["low"] == pytest.approx(1000, abs=110)
    assert counts["off"] == pytest.approx(2000, abs=127)
    assert drawn == [drawn_level(LEVELS, 7, "train", row) for row in range(4000)]
    assert drawn != [drawn_level(LEVELS, 8, "train", row) for row in range(4000)]
    assert drawn != [drawn_level(LEVELS, 7, "validation", row) for row in range(4000)]


def test_a_prompt_is_rendered_with_what_its_level_says(qwen3):
    rows = EffortRows(problems(qwen3), LEVELS, 7, "train", qwen3)
    texts = {"low": {"system": "Be brief."}, "off": {"enable_thinking": False}, "high": {}}
    for row in range(40):
        datum = rows[row]
        expected = shown(qwen3, row, **texts[datum["effort"]])
        assert datum["effort"] == drawn_level(LEVELS, 7, "train", row)
        assert datum["message_log"][0]["content"] == expected
        assert datum["message_log"][0]["token_ids"].tolist() == qwen3(expected)["input_ids"]
        assert datum["length"] == len(qwen3(expected)["input_ids"])
        assert (datum["idx"], datum["extra_env_info"]) == (row, {"ground_truth": str(row + 1)})
    assert {rows[row]["effort"] for row in range(40)} == set(LEVELS)


def test_the_text_of_a_level_follows_that_of_the_system_message(qwen3):
    levels = {"low": LEVELS["low"]}
    datum = EffortRows(problems(qwen3, system="You add."), levels, 7, "train", qwen3)[3]
    assert datum["message_log"][0]["content"] == shown(qwen3, 3, system="You add.\n\nBe brief.")


def test_processes_that_load_rows_and_batches_get_the_same_levels(qwen3):
    rows = EffortRows(problems(qwen3, 20), LEVELS, 7, "train", qwen3)
    copy = pickle.loads(pickle.dumps(rows))
    assert [copy[row]["effort"] for row in range(20)] == [rows[row]["effort"] for row in range(20)]
    batch = rl_collate_fn([rows[row] for row in range(20)])
    assert batch["effort"] == [rows[row]["effort"] for row in range(20)]


def test_rows_that_are_repeated_have_levels_of_their_own(qwen3):
    part = problems(qwen3, 50).parts[0]
    rows = EffortRows(MixedDataset([part, part]), LEVELS, 7, "train", qwen3)
    assert [rows[row]["effort"] for row in range(50)] != [rows[50 + row]["effort"] for row in range(50)]


def test_a_prompt_that_its_level_makes_too_long_does_not_train(qwen3):
    longest = problems(qwen3, 1)[0]["length"] + 2
    levels = {"low": LEVELS["low"]}
    datum = EffortRows(problems(qwen3, max_seq_length=longest), levels, 7, "train", qwen3, longest)[0]
    assert datum["loss_multiplier"] == 0.0
    assert datum["length"] <= longest
    assert "chat" not in datum


def test_observations_are_rendered_with_the_variables_of_the_prompt(qwen3):
    chat = leveled({"messages": [{"role": "user", "content": "Hi"}], "tools": None}, LEVELS["off"])
    said = {"role": "environment", "content": "And now?"}
    first = ObservationRenderer(qwen3, None, chat["template_kwargs"]).first_of_prompt(chat, said)
    assert first["content"].endswith("<think>\n\n</think>\n\n")
    log = [first, {"role": "assistant", "content": "4", "token_ids": first["token_ids"][:1]}]
    for variables, ends_thinking in ((chat["template_kwargs"], True), ({}, False)):
        ids = ObservationRenderer(qwen3, None, variables).token_ids(said, log, len(first["token_ids"]))
        assert qwen3.decode(ids).endswith("</think>\n\n") == ends_thinking


def test_an_episode_whose_first_message_comes_from_the_environment_has_a_level(qwen3):
    rows = [{"messages": [], "extra_env_info": {"deck": 1}}]
    made = AllTaskProcessedDataset(rows, qwen3, TaskDataSpec("game"), episode_data_processor)
    datum = EffortRows(MixedDataset([made]), {"low": LEVELS["low"]}, 7, "train", qwen3)[0]
    said = {"role": "environment", "content": "Deal"}
    text = ObservationRenderer(qwen3).first_of_prompt(datum["chat"], said)["content"]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Deal"}]
    assert text == render_chat(messages, qwen3, add_generation_prompt=True)


def run_data(rows):
    return RunData(train=rows, validation=rows, bad_rows=[])


def test_training_and_validation_have_levels_and_a_run_without_levels_is_unchanged(qwen3):
    data = run_data(problems(qwen3, 30))
    assert with_effort_levels(data, {}, 7, qwen3, DataConfig.build()) is data
    leveled_data = with_effort_levels(data, LEVELS, 7, qwen3, DataConfig.build())
    trained = [leveled_data.train[row]["effort"] for row in range(30)]
    validated = [leveled_data.validation[row]["effort"] for row in range(30)]
    assert trained != validated
    assert "effort" not in data.train[0]


def test_levels_leave_names_of_data_sets_and_joined_validation_sets_as_they_are(qwen3):
    parts = [problems(qwen3, count).parts[0] for count in (3, 4)]
    plain = RunData(MixedDataset(parts, ["sums", "more"]), problems(qwen3, 2), [], {"hard": problems(qwen3, 5)})
    data = with_effort_levels(plain, LEVELS, 7, qwen3, DataConfig.build())
    assert data.train.rows_by_name == {"sums": range(3), "more": range(3, 7)}
    assert [data.train[row]["effort"] for row in range(7)] == [drawn_level(LEVELS, 7, "train", r) for r in range(7)]
    expected = [drawn_level(LEVELS, 7, "validation", row) for row in range(2)]
    expected += [drawn_level(LEVELS, 7, "hard", row) for row in range(5)]
    assert data.all_validation is not None
    assert [data.all_validation[row]["effort"] for row in range(7)] == expected
    assert data.all_validation.first_rows(4)[3]["effort"] == expected[3]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"enable_thinkin": False}, "does not read 'enable_thinkin'"),
        ({"tokenize": True}, "tokenize is set by the library"),
        ({"messages": []}, "messages is set by the library"),
    ],
)
def test_variables_that_the_template_does_not_read_are_refused(qwen3, variables, message):
    levels = {"low": EffortLevelConfig(chat_template_kwargs=variables)}
    with pytest.raises(ConfigError, match=message):
        with_effort_levels(run_data(problems(qwen3, 2)), levels, 7, qwen3, DataConfig.build())


def test_data_without_messages_is_refused_where_a_level_changes_the_prompt(qwen3):
    datum = {key: value for key, value in problems(qwen3, 1)[0].items() if key != "chat"}
    rows = MixedDataset([GivenRows([datum])])
    with pytest.raises(DataError, match="row 0 has no `chat`"):
        EffortRows(rows, {"low": LEVELS["low"]}, 7, "train", qwen3)
    assert EffortRows(rows, {"high": LEVELS["high"]}, 7, "train", qwen3)[0]["effort"] == "high"
    with_inputs = MixedDataset([GivenRows([problems(qwen3, 1)[0] | {"row_inputs": None}])])
    with pytest.raises(DataError, match="row 0 has inputs next to its tokens"):
        EffortRows(with_inputs, {"low": LEVELS["low"]}, 7, "train", qwen3)
