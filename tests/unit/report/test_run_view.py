"""What the page shows of a run: curves, phases, samples, findings and its end."""

import json
import os
import shutil
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from stored_run import TINY, add_step, row, write_run
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer

from nemo_rl.algorithms.setup.run_record import record_run
from nemo_rl.commands.report.findings import RULES, find
from nemo_rl.commands.report.run_files import RunFiles, find_run, find_runs
from nemo_rl.commands.report.run_state import where_it_failed
from nemo_rl.commands.report.run_view import RunView, TokenTexts
from nemo_rl.commands.report.samples import SampleIndex, SampleQuery
from nemo_rl.config import RunConfig
from nemo_rl.utils.errors import DataError, RunInterruptedError


def viewed(run: Path) -> RunView:
    view = RunView(find_run(run))
    view.read()
    return view


def test_curves_are_read_as_far_as_they_are_written(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=3, loss=[1.0, float("nan"), 3.0])
    view = viewed(tmp_path)
    loss = view.curves.get("train/loss")
    assert (loss.steps, loss.values, loss.times) == ([1, 2, 3], [1.0, None, 3.0], [1010.0, 1020.0, 1030.0])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "prefix": "train", "metrics": {"loss": 4.0}')
    assert not view.read()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('}\n{"step": 3, "prefix": "train", "metrics": {"loss": 2.5}}\nno json\n')
    assert view.read()
    assert (loss.steps, loss.values) == ([1, 2, 3], [1.0, None, 2.5]), "a restart repeats steps"


def test_phases_add_up_to_the_time_of_the_steps_with_their_checkpoints(tmp_path: Path) -> None:
    write_run(tmp_path, steps=2)
    phases = viewed(tmp_path).as_json()["phases"]
    assert phases["total"] == [4.5, 4.5]
    sums = {phase["name"]: phase["sum"] for phase in phases["phases"]}
    assert sums == {"policy_training": 4.0, "generation": 2.0, "the rest": 2.0, "checkpointing": 1.0}
    assert sum(phase["share"] for phase in phases["phases"]) == pytest.approx(1.0)


def test_a_sample_has_the_texts_of_its_tokens(tmp_path: Path) -> None:
    write_run(tmp_path, steps=1)
    view = viewed(tmp_path)
    detail = view.detail(3)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    assert detail["tokens"]["texts"] == {token: tokenizer.decode([token]) for token in (5, 6, 7, 8)}
    assert detail["tokens"]["generation_logprobs"] == [0.0, 0.0, -0.25, -1.5]
    assert detail["tokens"]["values"] == [0.0, 0.0, 0.5, 0.75]
    assert [message["role"] for message in detail["messages"]] == ["user", "assistant"]
    for number in (0, 5):
        with pytest.raises(IndexError):
            view.detail(number)


def test_the_spaces_of_sentencepiece_stay(tmp_path: Path) -> None:
    pieces = ["<unk>", "\u2581the", "\u2581cat", "s", "\u2581"]
    tokenizer = Tokenizer(models.Unigram([(piece, 0.0) for piece in pieces], 0))
    tokenizer.decoder = decoders.Metaspace()
    model = tmp_path / "model"
    model.mkdir()
    tokenizer.save(str(model / "tokenizer.json"))
    write_run(tmp_path, steps=1, config={"policy": {"model_name": str(model)}})
    texts = TokenTexts(find_run(tmp_path)).of([0, 1, 2, 3, 4, 99])
    assert texts == {0: "<unk>", 1: " the", 2: " cat", 3: "s", 4: " ", 99: "[99]"}


SAVING = {"checkpointing": {"enabled": True, "checkpoint_dir": "results/a"}}


def move_times(run: Path, by: float) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(each | {"time": each["time"] + by}) + "\n" for each in rows))


def test_a_run_that_went_on_in_another_folder_is_one_run(tmp_path: Path) -> None:
    write_run(tmp_path, 6, config=SAVING, record={"status": "interrupted"}, loss=[1.0] * 6)
    write_run(tmp_path, 9, number=2, first=5, config=SAVING, record={"started": 4000.0}, loss=[2.0] * 5)
    move_times(tmp_path / "exp_002", 3000.0)
    (tmp_path / "exp_001/val_data_step6.jsonl").write_text(json.dumps(row(6, 0, 0, "taken back")) + "\n")
    for number, seconds in ((1, (10, 20)), (2, (10, 30))):
        with (tmp_path / f"exp_00{number}/metrics.jsonl").open("a") as file:
            for second in seconds:
                file.write(json.dumps({"step": second, "prefix": "ray", "metrics": {"cpu": 1.0}}) + "\n")
    view = viewed(tmp_path)
    loss = view.curves.get("train/loss")
    assert (loss.steps, loss.values) == (list(range(1, 10)), [1.0] * 4 + [2.0] * 5)
    assert loss.times[3:5] == [1040.0, 1110.0], "without the pause from 1060 to 4000"
    assert view.curves.get("ray/cpu").steps == [10, 20, 30, 50]
    assert len(view.samples) == 9 * 4 and {each[2] for each in view.samples.rows_of(range(1, 100))} == set(range(1, 10))
    status = view.as_json()["status"]
    assert [part["name"] for part in status["earlier"]] == ["exp_001"] and status["started"] == 4000.0


@pytest.mark.parametrize(
    ("config", "first", "steps", "number_of_runs"),
    [
        (SAVING, 7, 8, 1),
        (SAVING, 1, 8, 2),
        (SAVING, 1, 0, 1),  # it failed before its first step
        ({"checkpointing": {"enabled": True, "checkpoint_dir": "results/b"}}, 7, 8, 2),
        ({"checkpointing": {"enabled": False, "checkpoint_dir": "results/a"}}, 7, 8, 2),
    ],
)
def test_only_runs_of_one_checkpoint_folder_are_joined(
    config: dict[str, object], first: int, steps: int, number_of_runs: int, tmp_path: Path
) -> None:
    write_run(tmp_path, 6, config=SAVING, record={"status": "killed"})
    write_run(tmp_path, steps, number=2, first=first, config=config)
    assert len(find_runs(tmp_path)) == number_of_runs


def test_all_runs_of_a_folder_and_of_folders_are_found(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for number in (2, 10, 1):
            write_run(tmp_path / name, 1, number=number)
    (tmp_path / "a/exp_004").mkdir()
    names = [run.name for run in find_runs(tmp_path)]
    assert names == [f"{name}/exp_{number:03d}" for name in ("a", "b") for number in (1, 2, 10)]
    assert [run.name for run in find_runs(tmp_path / "a/exp_002")] == ["a/exp_002"]
    assert find_run(tmp_path / "b").name == "b/exp_010"
    write_run(tmp_path / "c/deep", 1)
    assert [run.name for run in find_runs(tmp_path)] == [*names, "deep/exp_001"]


def test_a_failure_names_worker_phase_and_the_line_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "traceback.txt").write_text(
        'Traceback (most recent call last):\n  File "/home/me/run.py", line 3, in <module>\n    grpo_train(run)\n'
        '  File "/work/nemo_rl/algorithms/grpo.py", line 9, in grpo_train\n    step()\n           ^^^^^^\n'
        '  File "/home/me/my_loss.py", line 22, in __call__\n    return weights * logprobs\n'
        '  File "/venv/lib/python3.12/site-packages/torch/mul.py", line 4, in mul\nRuntimeError: sizes\n'
    )
    message = "Worker lm_policy-0-1 (rank 1, node n, pid 8) failed during 'train': RuntimeError: sizes"
    assert where_it_failed(tmp_path, message) == {
        "worker": "lm_policy-0-1 (rank 1, node n, pid 8)",
        "phase": "train",
        "place": "/home/me/my_loss.py:22 in __call__",
        "source": "return weights * logprobs",
    }
    (tmp_path / "traceback.txt").unlink()
    assert where_it_failed(tmp_path, "ValueError: no") == {}


def test_lines_that_are_no_samples_are_counted_and_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=1)
    good = json.dumps(row(2, 0, 0, "text", reward=None)) + "\n"
    (run / "train_data_step2.jsonl").write_text('[]\n{"content": 5}\n' + good + '{"content": [')
    index = SampleIndex(RunFiles(run))
    assert index.read() and not index.read()
    assert (len(index), index.num_damaged) == (5, 3)
    assert index.detail(5)["messages"][1]["content"] == "text"


def test_a_reading_of_a_few_files_says_that_there_are_more(tmp_path: Path) -> None:
    index = SampleIndex(RunFiles(write_run(tmp_path, steps=3)))
    assert index.read(2) and index.has_more
    assert index.read(2) and not index.has_more
    assert not index.read(2) and not index.has_more


def test_whole_groups_are_chosen_evenly_over_the_steps(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=10)
    index = SampleIndex(RunFiles(run))
    index.read()
    chosen = index.chosen(10)
    groups = {tuple(each[1:4]) for each in index.rows_of(chosen)}
    assert len(chosen) == 10 and len(groups) == 5
    assert {step for _, step, _ in groups} == {1, 3, 5, 7, 9}
    assert index.chosen(1000) == list(range(1, 41)) and index.chosen(0) == []
    assert set(index.chosen(4, among=chosen)) <= set(chosen) and len(index.chosen(4, among=chosen)) == 4


def test_groups_of_different_sizes_are_added_until_there_is_no_room(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=2)
    sizes = [9, *[2] * 10]
    rows = [row(3, group, sample, "x") for group, size in enumerate(sizes) for sample in range(size)]
    rows += [row(3, 0, 0, "x") | {"group": None} for _ in range(3)]
    (run / "train_data_step3.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    index = SampleIndex(RunFiles(run))
    index.read()
    for most in range(1, 9):
        chosen = index.rows_of(index.chosen(most))
        assert len(chosen) == most, "a sample without a group fills the room"
        counts = Counter((each[2], each[3]) for each in chosen if each[3] is not None)
        assert set(counts.values()) <= {2}
    assert len(index.chosen(len(index) - 1)) >= len(index) - 2
    only = index.chosen(4, among=[each[0] for each in index.rows_of(range(1, 100)) if each[2:4] == [3, 0]])
    assert len(only) == 4 and {each[3] for each in index.rows_of(only)} == {0}


@pytest.fixture
def odd_samples(tmp_path: Path) -> SampleIndex:
    run = write_run(tmp_path, steps=3)
    rows = [
        row(4, 0, 0, "Größe \ud800 100%", reward=None) | {"idx": 2**70},
        row(4, 1, 0, "a_b", reward=0.5) | {"idx": ["a", 1], "group": None, "task_name": "code"},
    ]
    (run / "val_data_step4.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    index = SampleIndex(RunFiles(run))
    index.read()
    return index


@pytest.mark.parametrize(
    ("parameters", "places"),
    [
        ({"phase": "validation"}, [(4, 0), (4, None)]),
        ({"step": "2", "group": "1"}, [(2, 1), (2, 1)]),
        ({"step_from": "3", "step_to": "3", "length_to": "2"}, [(3, 0), (3, 1)]),
        ({"reward_to": "0.9"}, [(4, None)]),
        ({"text": "GRÖSSE", "phase": "validation"}, []),
        ({"text": "größe"}, [(4, 0)]),
        ({"text": "%"}, [(4, 0)]),
        ({"text": "_"}, [(4, None)]),
        ({"task": "code"}, [(4, None)]),
        ({"outcome": "reward_error"}, [(4, 0)]),
        ({"phase": "train", "idx": "100", "first_of_step": "1"}, [(1, 0), (2, 0), (3, 0)]),
        ({"sort": "reward", "limit": "2"}, [(4, None), (1, 0)]),
        ({"sort": "step", "descending": "1", "offset": "1", "limit": "2"}, [(4, None), (3, 0)]),
        ({"sort": "reward", "descending": "1", "offset": "13", "limit": "5"}, [(4, 0)]),
    ],
)
def test_samples_are_selected(
    parameters: dict[str, str], places: list[tuple[int, int | None]], odd_samples: SampleIndex
) -> None:
    found = odd_samples.select(SampleQuery.of(parameters))
    assert [(each[2], each[3]) for each in found["rows"]] == places
    assert (found["known"], found["choices"]["task"]) == (14, ["code", "math"])
    assert json.dumps(found, allow_nan=False).encode()


@pytest.mark.parametrize(
    "parameters",
    [
        {"step_from": "x"},
        {"step_from": "nan"},
        {"sort": "number; DROP TABLE samples"},
        {"limit": "0"},
        {"limit": "1000"},
        {"offset": "-1"},
        {"offset": "1e40"},
        {"descending": "yes"},
        {"where": "1"},
    ],
)
def test_a_query_that_cannot_be_answered_is_refused(parameters: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=next(iter(parameters))):
        SampleQuery.of(parameters)


CASES = {
    "engine_mismatch": ("token_mult_prob_error", [1.0] * 11 + [1.2], [1.0] * 12),
    "skipped_updates": ("skipped_updates", [0.0] * 11 + [1.0], [0.0] * 12),
    "skipped_updates of the critic": ("critic/skipped_updates", [0.0] * 11 + [1.0], [0.0] * 12),
    "reward_errors": ("num_reward_errors", [0.0] * 11 + [2.0], [0.0] * 12),
    "entropy_collapse": ("approx_entropy", [1.0] * 6 + [0.01] * 6, [1.0] * 6 + [0.5] * 6),
    "kl_spike": ("kl_penalty", [0.01] * 11 + [0.5], [0.01] * 12),
    "gradient_spike": ("grad_norm", [0.1] * 11 + [9.0], [0.1] * 11 + [0.9]),
    "useless_critic": ("critic/explained_var", [-0.1, 0.05] * 6, [-0.1, 0.4] + [0.0] * 10),
    "truncation": ("truncation_rate", [0.0] * 6 + [0.5] * 6, [0.1] * 12),
    "no_progress": ("reward", [0.5, 0.6] * 12, [step / 24 for step in range(24)]),
}


@pytest.mark.parametrize("rule", CASES)
def test_each_finding_has_a_run_that_shows_it_and_one_that_does_not(rule: str, tmp_path: Path) -> None:
    name, bad, good = CASES[rule]
    for column, expected in ((bad, 1), (good, 0)):
        folder = tmp_path / str(expected)
        write_run(folder, steps=len(column), **{name: column})
        curves = viewed(folder).curves
        found = [each for each in RULES if each.__name__ == rule.split()[0] and each(curves) is not None]
        assert len(found) == expected
        titles = [finding.metric for finding in find(curves)]
        assert (f"train/{name}" in titles) == bool(expected)


def test_numbers_that_are_not_finite_and_stale_answers_are_told_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "bad", steps=3, loss=[1.0, float("inf"), 1.0])
    (found,) = find(viewed(tmp_path / "bad").curves)
    assert (found.level, found.metric, found.steps) == ("problem", "train/loss", (2, 2))
    write_run(tmp_path / "old", steps=2, token_mult_prob_error=[1.3, 1.3], max_trajectory_age=[1.0, 1.0])
    assert find(viewed(tmp_path / "old").curves) == []


def test_rewards_say_nothing_about_distillation(tmp_path: Path) -> None:
    equal = [0.0] * 24
    write_run(tmp_path, steps=24, reward=equal, min_total_reward=equal, max_total_reward=equal)
    curves = viewed(tmp_path).curves
    assert len(find(curves, "grpo")) == 2 and find(curves, "distillation") == []


def test_samples_of_a_step_that_is_trained_again_replace_the_earlier_ones(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=2)
    view = viewed(tmp_path)
    (run / "train_data_step1.jsonl").write_text(json.dumps(row(1, 0, 0, "again, and longer")) + "\n")
    assert view.read() and len(view.samples) == 5
    assert view.detail(9)["messages"][1]["content"] == "again, and longer"


def test_steps_that_a_recovered_run_takes_back_are_not_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=6)
    (run / "val_data_step6.jsonl").write_text(json.dumps(row(6, 0, 0, "validation")) + "\n")
    with (run / "metrics.jsonl").open("a") as file:
        for step, prefix in ((4, "validation"), (6, "validation"), (600, "ray"), (3, "idle"), (6, "new")):
            file.write(json.dumps({"step": step, "prefix": prefix, "metrics": {"value": 1.0}}) + "\n")
    for path in run.glob("train_data_step*"):
        os.utime(path, (1000.0, 1000.0))  # before the metrics
    view = viewed(tmp_path)
    assert (view.curves.last_step, len(view.samples)) == (6, 25)
    written = [json.loads(line) for line in (run / "train_data_step3.jsonl").read_text().splitlines()]
    (run / "train_data_step3.jsonl").write_text(
        "".join(json.dumps(each | {"outcome": "cut"}) + "\n" for each in written)
    )
    with (run / "metrics.jsonl").open("a") as file:
        for step, prefix in ((3, "idle"), (3, "train"), (601, "ray")):
            line = {"step": step, "prefix": prefix, "metrics": {"value": 2.0}, "time": 2000.0}
            file.write(json.dumps(line) + "\n")
    assert view.read()
    steps = {name: curve.steps for name, curve in view.curves.by_name.items()}
    assert (view.curves.last_step, steps["train/reward"], steps["train/value"]) == (3, [1, 2], [3])
    assert steps["timing/train/generation"] == [1, 2] and "validation/value" not in steps and "new/value" not in steps
    assert view.curves.get("idle/value").values == [2.0] and steps["ray/value"] == [600, 601]
    found = view.samples.select(SampleQuery.of({"sort": "step", "descending": "1"}))
    assert [each[2] for each in found["rows"]] == [6, *[3] * 4, *[2] * 4, *[1] * 4] and found["known"] == 13
    assert found["total"] == 13 and found["choices"]["outcome"] == ["cut", "finished"]
    assert len(view.samples_as_json(100, 0)["rows"]) == 13
    add_step(run, 4, {"reward": 1.0}, "again")
    assert view.read() and len(view.samples) == 17


def test_the_samples_of_a_step_that_fails_are_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=2)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] == 1))
    assert len(viewed(tmp_path).samples) == 8
    os.utime(run / "train_data_step2.jsonl", (1005.0, 1005.0))  # before the metrics of step 1, at 1010
    assert len(viewed(tmp_path).samples) == 4
    (run / "metrics.jsonl").write_text("")
    assert len(viewed(tmp_path).samples) == 8, "no step is logged yet"


def test_equal_rewards_idle_parts_and_preemptions_are_found(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=4, min_total_reward=[0.0] * 4, max_total_reward=[1.0, 0.0, 0.0, 1.0])
    with (run / "metrics.jsonl").open("a") as file:
        for step in range(1, 5):
            for prefix, metrics in (
                ("idle", {"trainer": 0.8, "engines": 0.7}),
                ("generation", {"num_preemptions": 1.0}),
            ):
                file.write(json.dumps({"step": step, "prefix": prefix, "metrics": metrics}) + "\n")
    found = {finding.metric: finding for finding in find(viewed(tmp_path).curves)}
    assert "In 2 of 4 steps" in found["train/reward"].text and found["train/reward"].steps == (2, 3)
    assert found["idle/trainer"].title.startswith("The trainer is idle") and "generation/num_preemptions" in found


@pytest.mark.parametrize(
    ("cluster", "own", "idle", "is_told"),
    [
        ({"device": "cpu"}, None, (0.25, 0.75), False),
        ({"device": "cpu"}, {"ranks_per_node": 1}, (0.75, 0.25), False),
        ({"device": "cpu"}, None, (0.7, 0.7), True),
        ({"device": "cpu", "num_nodes": 2}, {"num_nodes": 1}, (0.25, 0.75), True),
        ({"device": "other"}, {"gpus_per_node": 1}, (0.25, 0.75), True),
        ({"device": "other"}, None, (0.25, 0.75), False),
    ],
)
def test_idle_parts_are_told_only_where_a_setting_helps(
    cluster: dict[str, Any], own: dict[str, int] | None, idle: tuple[float, float], is_told: bool, tmp_path: Path
) -> None:
    placement = {"enabled": own is None, "resources": own or {}}
    run = write_run(tmp_path, 4, config={"cluster": cluster, "policy": {"generation": {"colocated": placement}}})
    with (run / "metrics.jsonl").open("a") as file:
        for step in range(1, 5):
            metrics = dict(zip(("trainer", "engines"), idle, strict=True))
            file.write(json.dumps({"step": step, "prefix": "idle", "metrics": metrics}) + "\n")
    found = [finding for finding in find(viewed(tmp_path).curves) if finding.metric.startswith("idle/")]
    assert len(found) == is_told
    assert not found or ("Neither" in found[0].text) == (sum(idle) > 1.2)


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, "finished"), (ValueError("wrong"), "failed"), (RunInterruptedError("SIGTERM"), "interrupted")],
)
def test_a_run_records_how_it_ended(error: Exception | None, status: str, tmp_path: Path) -> None:
    run = RunFiles(tmp_path)
    try:
        with ExitStack() as resources:
            record_run(tmp_path, RunConfig(), resources)
            started = run.record()
            if error is not None:
                raise error
    except Exception as raised:  # what was raised above
        assert raised is error
    assert started["status"] == "running" and started["command"] == sys.argv and started["pid"] == os.getpid()
    ended = run.record()
    assert ended["status"] == status and ended["ended"] >= ended["started"]
    assert ended.get("error") == (None if error is None else f"{type(error).__name__}: {error}")


def test_a_run_whose_process_is_gone_was_killed(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    record = {"status": "running", "host": os.uname().nodename, "pid": 2**22 + 1, "pid_started": 5}
    (run / "run.json").write_text(json.dumps(record))
    assert viewed(tmp_path).as_json()["status"]["status"] == "killed"
    (run / "run.json").write_text("[")
    assert viewed(tmp_path).as_json()["status"]["status"] == "unknown"


def test_missing_files_cost_only_their_part(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=2)
    for name in ("config.yaml", "run.json"):
        (run / name).unlink()
    view = viewed(run)
    assert view.as_json()["config"] == {} and len(view.samples) == 8
    assert view.detail(1)["tokens"]["texts"][5] == "[5]"
    shutil.rmtree(run)
    with pytest.raises(DataError, match="no log folder of a run"):
        find_run(tmp_path)
