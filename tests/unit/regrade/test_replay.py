"""Stored samples played again: rewards of one and several turns, differences, failures, files."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nemo_rl.commands.regrade.replay import Regraded, replay_all
from nemo_rl.commands.regrade.run import is_changed, refuse_existing, write_file, write_tables
from nemo_rl.commands.regrade.stored_samples import StoredSample, read_samples, sample_files
from nemo_rl.environments.interfaces import EpisodeStart, StepResult
from nemo_rl.utils.errors import ConfigError, DataError


class Guessing:
    """Rewards the last word with 1 if it is the secret; a wrong one may be corrected until `most_turns`."""

    reads_chat = False

    def __init__(self, most_turns=1, opening=None, reads_chat=False):
        self.most_turns, self.opening, self.reads_chat = most_turns, opening, reads_chat
        self.seen, self.num_closed = [], 0

    async def open_episode(self, metadata):
        return EpisodeStart({**metadata, "turns": 0}, self.opening)

    async def step(self, message_log, metadata):
        self.seen.append(message_log)
        said, turns = message_log[-1]["content"], metadata["turns"] + 1
        if said == "break":
            return StepResult.failed("the grader broke", metadata)
        right = said == metadata["ground_truth"]
        return StepResult(
            {"role": "environment", "content": f"turn {turns}: wrong"},
            {**metadata, "turns": turns},
            reward=float(right),
            terminated=right or turns == self.most_turns,
        )

    async def close_episode(self, metadata):
        self.num_closed += 1


def stored(*turns, reward=1.0, **keys):
    content = [{"role": "user", "content": "<user>guess<assistant>"}]
    for number, turn in enumerate(turns):
        content.append({"role": "environment" if number % 2 else "assistant", "content": turn})
    return StoredSample(
        Path("val_data_step3.jsonl"),
        1,
        "validation",
        {"idx": 0, "task_name": "game", "content": content, "rewards": reward, **keys},
    )


def datum(secret="7", text="<user>guess<assistant>"):
    return {
        "message_log": [{"role": "user", "content": text, "token_ids": torch.arange(3)}],
        "extra_env_info": {"ground_truth": secret},
        "chat": {"messages": [{"role": "user", "content": "guess"}], "tools": None},
    }


def replayed(environment, *samples, of=None):
    graded = asyncio.run(replay_all([(sample, of or datum()) for sample in samples], "game", environment))
    assert environment.num_closed == len(samples)
    return graded


def test_a_wrong_reward_is_found():
    right, wrong, wrongly_right = replayed(
        Guessing(), stored("7", reward=1.0), stored("8", reward=0.0), stored("8", reward=1.0)
    )
    assert [each.reward for each in (right, wrong, wrongly_right)] == [1.0, 0.0, 0.0]
    assert [is_changed(each) for each in (right, wrong, wrongly_right)] == [False, False, True]


def test_each_response_is_a_step_and_rewards_add_up():
    environment = Guessing(most_turns=3)
    (graded,) = replayed(environment, stored("5", "turn 1: wrong", "6", "turn 2: wrong", "7"))
    assert graded.reward == 1.0 and graded.diverged is None
    assert [len(log) for log in environment.seen] == [2, 4, 6]
    assert environment.seen[0][0] == {"role": "user", "content": "<user>guess<assistant>"}


def test_a_difference_of_the_episode_is_told():
    earlier, observed = replayed(
        Guessing(most_turns=2),
        stored("5", "turn 1: wrong", "6", "turn 2: wrong", "7"),
        stored("5", "turn 1: try again", "7"),
    )
    assert earlier.diverged == "the episode ends 1 responses earlier than the stored one" and earlier.reward == 0.0
    assert observed.diverged == "an observation differs from the stored one" and observed.reward == 1.0


def test_an_observation_with_an_image_is_compared_as_it_is_stored():
    class Showing(Guessing):
        async def step(self, message_log, metadata):
            shown = [{"type": "image", "image": "board.png"}, {"type": "text", "text": "again"}]
            step = await super().step(message_log, metadata)
            return replace(step, observation={"role": "environment", "content": shown})

    for text, diverged in (("<image>again", None), ("again", "an observation differs from the stored one")):
        (graded,) = replayed(Showing(most_turns=2), stored("8", text, "7"))
        assert (graded.reward, graded.diverged, graded.error) == (1.0, diverged, None)


def test_a_judge_reads_the_chat_and_the_first_observation():
    environment = Guessing(reads_chat=True, opening={"role": "user", "content": "between 1 and 9"})
    replayed(environment, stored("7"))
    assert [message["content"] for message in environment.seen[0]] == ["guess", "between 1 and 9", "7"]


def test_samples_without_a_new_reward_say_why():
    broken, long = replayed(Guessing(), stored("break"), stored(reward=None), of=None)
    assert (broken.reward, broken.error) == (None, "the grader broke") and is_changed(broken)
    assert long.error == "it has no response"
    (other,) = replayed(Guessing(), stored("7"), of=datum(text="another prompt"))
    assert "another prompt than the sample" in other.error


def test_files_are_read_in_the_order_of_their_steps(tmp_path):
    run = tmp_path / "exp_002"
    run.mkdir()
    (tmp_path / "exp_001").mkdir()
    for name in ("val_data_step10", "train_data_step9", "train_data_step10", "train_data_step1x"):
        (run / f"{name}.jsonl").write_text(json.dumps(stored("7").row) + "\n")
    names = [file.name for file in sample_files(tmp_path)]
    assert names == ["train_data_step9.jsonl", "train_data_step10.jsonl", "val_data_step10.jsonl"]
    assert [file.name for file in sample_files(tmp_path, "validation")] == names[2:]
    assert sample_files(run / names[0]) == [run / names[0]]
    (sample,) = read_samples(run / names[2])
    assert (sample.phase, sample.reward, sample.place) == ("validation", 1.0, "val_data_step10.jsonl:1")


@pytest.mark.parametrize(
    ("line", "reason"), [("{", "no JSON object"), ("3", "no JSON object"), ("{}", "lacks content, idx")]
)
def test_a_bad_line_is_named(tmp_path, line, reason):
    file = tmp_path / "train_data_step1.jsonl"
    file.write_text(f"{json.dumps(stored('7').row)}\n{line}\n")
    with pytest.raises(DataError, match=f"train_data_step1.jsonl:2 .*{reason}"):
        list(read_samples(file))


def test_a_folder_without_samples_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"has no samples of validation: no val_data_step<N>.jsonl"):
        sample_files(tmp_path, "validation")


def test_rewards_go_to_a_new_file_only(tmp_path, capsys):
    file = tmp_path / "regraded.jsonl"
    refuse_existing(file)
    samples = [Regraded(stored("8", reward=1.0), "game", 0.0), Regraded(stored("7"), "game").fail("down")]
    write_file(file, samples)
    first, second = [json.loads(line) for line in file.read_text().splitlines()]
    assert (first["stored_reward"], first["reward"], first["environment"]) == (1.0, 0.0, "game")
    assert (second["reward"], second["error"]) == (None, "down")
    with pytest.raises(ConfigError, match="exists, and rewards are only written to a new file"):
        refuse_existing(file)
    write_tables(samples)
    shown = capsys.readouterr().out
    assert "2 of 2 rewards changed." in shown and "down" in shown and "val_data_step3.jsonl:1" in shown
