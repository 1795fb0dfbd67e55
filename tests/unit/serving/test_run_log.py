"""Each model of the training service is a run that the report reads."""

import pytest
from fake_models import FakeModels
from running import Raw, config_in, service

from nemo_rl.commands.report.run_files import RunFiles, find_runs

ROWS = [[1, 2, 3, 4], [4, 3, 2]]
SHORT = [[5, 6]]


def lines(run: RunFiles) -> list[tuple[int, str, dict[str, float]]]:
    return [(row["step"], row["prefix"], dict(row["metrics"])) for row, _ in run.metric_rows()]


def test_updates_of_each_model_are_lines_of_its_run(tmp_path):
    config = config_in(tmp_path / "state", log_dir=str(tmp_path / "logs"))
    adam = {"learning_rate": 0.5}
    with service(FakeModels(), config) as url:
        client = Raw(url)
        session = client.session()
        model, other = client.model(session), client.model(session, number=1)
        sums = [client.output(client.submit_pass(model, 1, ROWS)["request_id"])[1]["loss:sum"]]
        sums.append(client.output(client.submit_pass(model, 2, SHORT)["request_id"])[1]["loss:sum"])
        client.result(client.ok("optim_step", model_id=model, seq_id=3, adam_params=adam)["request_id"])
        client.result(client.ok("optim_step", model_id=other, seq_id=1, adam_params=adam)["request_id"])
    with service(FakeModels(), config) as url:
        client = Raw(url)
        last = client.output(client.submit_pass(model, 4, SHORT)["request_id"])[1]["loss:sum"]
        client.result(client.ok("optim_step", model_id=model, seq_id=5, adam_params=adam)["request_id"])
    of_model, of_other = (lines(run) for run in find_runs(tmp_path / "logs"))
    assert [(step, prefix) for step, prefix, _ in of_model] == [(1, "train"), (2, "train")]
    assert of_model[0][2]["num_tokens"] == 6
    assert of_model[0][2]["loss"] == pytest.approx(sum(sums) / 6)
    assert of_model[1][2]["loss"] == pytest.approx(last)
    assert of_model[0][2]["lr"] == 0.5
    assert set(of_model[0][2]) == {"loss", "lr", "grad_norm", "num_tokens", "num_sequences"}
    assert of_other[0][:2] == (1, "train")
    assert "loss" not in of_other[0][2]
