"""The command `nemo_rl replay`: its exit status, and when it completes a record."""

import argparse
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl.commands.replay import command, records, run
from nemo_rl.commands.replay.findings import Compared, Comparison, Difference
from nemo_rl.config import GRPOMasterConfig
from nemo_rl.config.loading.load import config_of
from nemo_rl.utils.errors import CheckpointError, ReplayError

LOSS = [Difference("loss", "loss differs: 1 in the run, 2 now", 1.0)]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (AttributeError("no attribute x"), "ReplayError: step 3 cannot be repeated: AttributeError: no attribute x"),
        (CheckpointError("no file"), "ReplayError: step 3 cannot be repeated: CheckpointError: no file"),
        (ReplayError("step 3 was not recorded"), "ReplayError: step 3 was not recorded"),
    ],
)
def test_whatever_ends_a_replay_has_status_2(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*arguments: Any) -> int:
        raise error

    monkeypatch.setattr(run, "replay", fails)
    assert command.main(argparse.Namespace(step=3)) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("differences", "is_exact", "status", "adds"),
    [([], True, 0, True), ([], False, 0, False), (LOSS, True, 1, False)],
)
def test_modules_are_added_only_to_the_record_of_a_step_with_equal_bits(
    differences: list[Difference],
    is_exact: bool,
    status: int,
    adds: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps/step_1.json").touch()
    tree = {"policy": {"model_name": "m"}, "grpo": {}, "cluster": {"optimizations": "none"}}
    result = Comparison(1, [Compared("loss", 1, differences=differences)], is_exact)
    added: list[Any] = []
    monkeypatch.setattr(run, "load_config", lambda *_, **__: config_of(tree, GRPOMasterConfig, check=False))
    monkeypatch.setattr(run, "_repeated", lambda *_: (result, "repeated"))
    monkeypatch.setattr(records, "read_step", lambda *_: SimpleNamespace(file="step_1.json"))
    monkeypatch.setattr(records, "add_modules", lambda recorded, repeated: added.append(repeated))
    arguments = argparse.Namespace(folder=tmp_path, step=1, overrides=[], json=False, add_modules=True)
    assert run.replay(arguments, io.StringIO()) == status
    assert bool(added) == adds
    assert ("is not equal bit for bit, so the outputs of its modules are not added" in caplog.text) == (not adds)
