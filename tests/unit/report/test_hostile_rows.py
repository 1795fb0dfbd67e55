"""Rows with values of a wrong kind, and files that cannot be read, cost only themselves."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from stored_run import row, write_run

from nemo_rl.commands.report.page import as_json
from nemo_rl.commands.report.run_files import RunFiles, find_run
from nemo_rl.commands.report.run_view import RunView
from nemo_rl.commands.report.samples import SampleIndex, SampleQuery
from nemo_rl.commands.report.server import RunServer

HUGE = 10**400
ODD_ROWS: list[dict[str, Any]] = [
    {"rewards": HUGE, "response_length": HUGE, "idx": HUGE, "turn_rewards": [HUGE, "x", 1.5]},
    {"rewards": 2**64, "response_length": 2**63, "group": 2**63, "sample": -(2**63)},
    {"rewards": "much", "response_length": "long", "turn_rewards": 3, "reward_components": [1], "penalties": "none"},
    {"rewards": "@inf", "idx": "@inf", "turn_rewards": ["@inf"], "error": {"deep": "@inf"}, "answer": ["@inf"]},
    {"generation_logprobs": [None, "x", "@inf", [1]], "prev_logprobs": "none", "token_loss_mask": 5},
    {"token_ids": ["5", 6], "weight_versions": [[1]]},
    {"token_ids": [5, -6, 7]},
    {"token_ids": [5, 2**70, 7, True]},
    {"token_ids": [5, 2**70, 7, 8], "weight_versions": [2, "x"]},
    {"reward_components": {"a": HUGE, "b": 0.5}, "penalties": {"a": None, "b": [1]}, "branch": {"a": 1}},
    {"idx": 2**53 + 1},
    {"idx": "1e999"},
    {"task_name": ["a"], "outcome": {"b": None}, "content": [{"role": 5, "content": {"a": "@inf"}}, {}]},
]


def write_odd(run: Path) -> Path:
    """Write a file of samples with odd values; the text `@inf` stands for a number that is too large for a float."""
    path = run / "train_data_step2.jsonl"
    lines = [json.dumps(row(2, 0, place, "text") | odd) for place, odd in enumerate(ODD_ROWS)]
    path.write_text("".join(line.replace('"@inf"', "1e999") + "\n" for line in lines))
    return path


def values_of(view: RunView, name: str) -> list[Any]:
    found = view.samples.select(SampleQuery.of({"step": "2"}))
    return [each[found["columns"].index(name)] for each in found["rows"]]


def test_values_of_a_wrong_kind_are_left_out(tmp_path: Path) -> None:
    write_odd(write_run(tmp_path, steps=2))
    view = RunView(find_run(tmp_path))
    assert view.read() and (len(view.samples), view.samples.num_damaged) == (4 + len(ODD_ROWS), 0)
    assert values_of(view, "reward") == [None, float(2**64), None, None, *[1.0] * 9]
    assert values_of(view, "length") == [0, 0, 0, *range(5, 15)]
    assert values_of(view, "idx")[10:12] == [str(2**53 + 1), None]
    (same,) = view.samples.select(SampleQuery.of({"idx": str(2**53 + 1)}))["rows"]
    assert same[0] == 15
    details = [view.detail(number) for number in range(5, 5 + len(ODD_ROWS))]
    assert json.loads(as_json(details)) and view.samples_as_json(100, 100)["details"].keys() == set(
        map(str, range(1, 5 + len(ODD_ROWS)))
    )
    assert [detail["turn_rewards"] for detail in details[:4]] == [[None, None, 1.5], [1.0], [], [None]]
    assert details[4]["tokens"]["generation_logprobs"] == [None] * 4
    assert details[4]["tokens"]["mask"] == [] and "prev_logprobs" not in details[4]["tokens"]
    assert [detail["tokens"] for detail in details[5:8]] == [{}, {}, {}]
    assert details[8]["tokens"]["texts"][2**70] == f"[{2**70}]" and details[8]["tokens"]["versions"] == []
    assert (details[9]["reward_components"], details[9]["penalties"]) == ({"a": None, "b": 0.5}, {"b": [1]})


def test_metrics_and_settings_that_are_no_numbers_of_json_are_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=2)
    with (run / "metrics.jsonl").open("a") as file:
        for step, value, time in (
            ("3", "1e999", "5"),
            ("4", str(HUGE), "1e999"),
            (str(HUGE), "1", "5"),
            ("5", "7", '"x"'),
        ):
            file.write(f'{{"step": {step}, "prefix": "train", "metrics": {{"loss": {value}}}, "time": {time}}}\n')
    with (run / "config.yaml").open("a") as file:
        file.write("loss_fn: {ratio_clip: .inf}\n")
    view = RunView(find_run(tmp_path))
    view.read()
    shown = json.loads(as_json(view.as_json()))
    assert shown["curves"]["train/loss"] == {
        "steps": [3, 4, 5],
        "values": [None, None, 7.0],
        "times": [5.0, None, None],
    }
    assert shown["config"]["loss_fn.ratio_clip"] == "inf"


def test_a_file_that_cannot_be_read_is_tried_again_and_costs_no_other(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=3)
    (run / f"train_data_step{10**18}.jsonl").write_text("a name that is no step's")
    index = SampleIndex(RunFiles(run))
    assert index.read() and len(index) == 12 and index.error is None
    first, last = run / "train_data_step1.jsonl", run / "train_data_step3.jsonl"
    good = first.read_text()
    first.unlink()
    first.symlink_to("/proc/self/mem")  # can be opened, and the first read fails
    assert not index.read() and (len(index), index.num_damaged) == (12, 0)
    assert index.error is not None and first.name in index.error
    last.write_text(good + "[]\n")
    assert index.read(most=1) and (len(index), index.num_damaged) == (12, 1)
    last.write_text(good + "[]\n[]\n")
    assert index.read() and index.num_damaged == 2, "lines of a file count once"
    first.unlink()
    first.write_text(good + good)
    assert index.read() and index.error is None and len(index) == 16 and not index.read()


def test_a_file_that_was_written_again_shows_no_other_sample(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=1)
    view = RunView(find_run(tmp_path))
    view.read()
    path = run / "train_data_step1.jsonl"
    path.write_text(path.read_text().replace("an answer", "a longer answer"))
    with pytest.raises(ValueError, match="written again"):
        view.detail(1)
    assert view.samples_as_json(4, 4)["details"] == {}
    assert view.read() and view.detail(5)["messages"][1]["content"] == "a longer answer"


@pytest.mark.asyncio
async def test_the_server_tells_what_it_cannot_read_and_goes_on(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=3)
    path = write_odd(run)
    server = RunServer(find_run(tmp_path))
    application = server.application()
    async with (
        application.router.lifespan_context(application),
        httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://run") as client,
    ):

        async def ask(path: str) -> Any:
            answer = await client.get(f"/{server.key}/{path}")
            assert answer.status_code == 200, path
            return answer.json()

        async def news_until(condition: Any) -> dict[str, Any]:
            news: dict[str, Any] = {"version": 0}
            async with asyncio.timeout(20):
                while "run" not in news or not condition(news):
                    news = await ask(f"news?after={news['version']}")
            return news

        await news_until(lambda news: len(server._view.samples) == 8 + len(ODD_ROWS))
        for each in (await ask("samples?limit=100"))["rows"]:
            await ask(f"samples/{each[0]}")
        path.unlink()
        path.symlink_to("/proc/self/mem")
        assert path.name in (await news_until(lambda news: news["error"]))["error"]
        path.unlink()
        assert (await news_until(lambda news: not news["error"]))["error"] is None
