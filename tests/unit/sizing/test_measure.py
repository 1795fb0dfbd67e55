"""The search by real steps: which alternatives there are, and that only what was faster is proposed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from nemo_rl.config import REPOSITORY_ROOT, GRPOMasterConfig, load_config
from nemo_rl.config.loading.algorithms import ALGORITHMS, algorithm_of
from nemo_rl.sizing import measure
from nemo_rl.sizing.measure import Alternative, alternatives, compare, search
from nemo_rl.sizing.trial import Steps, processor_seconds, quiet_overrides, step_seconds, take_steps
from nemo_rl.utils.errors import NemoRLError

CPU = REPOSITORY_ROOT / "examples/configs/grpo_math_cpu.yaml"


def test_alternatives_are_accepted_by_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "usable_cores", lambda: 2)
    kinds = list(alternatives(load_config(CPU, schema=GRPOMasterConfig)))
    names = [[each.what for each in kind] for kind in kinds]
    assert names == [
        ["2 ranks"],
        ["2 engines of their own"],
        ["microbatches / 2", "microbatches / 4"],
        ["1 threads for a rank"],
    ]
    for kind in kinds:
        for each in kind:
            load_config(CPU, each.overrides, schema=GRPOMasterConfig)
    halved = load_config(CPU, kinds[2][0].overrides, schema=GRPOMasterConfig)
    assert halved.policy.sequence_packing.train_mb_tokens == 128 * 64 // 2


def times(table: dict[tuple[str, ...], float], asked: list[tuple[str, ...]]) -> Callable[[Sequence[str]], Steps]:
    def timed(overrides: Sequence[str]) -> Steps:
        asked.append(tuple(overrides))
        return Steps([table[tuple(overrides)]], 1.0)

    return timed


def test_kinds_are_decided_on_top_of_each_other_and_small_gains_do_not_count() -> None:
    kinds = iter([[Alternative("a", ["a"]), Alternative("x", ["x"])], [Alternative("b", ["b"])]])
    asked: list[tuple[str, ...]] = []
    table = {(): 2.0, ("a",): 1.5, ("a", "b"): 1.45}
    found = search(kinds, times(table, asked), lambda overrides: "x" not in overrides, lambda name, steps: None)
    assert found == ["a"], "b gains 3 %, and x is refused"
    assert asked == [(), ("a",), ("a", "b")]


def test_without_a_winner_the_fastest_alternative_is_compared() -> None:
    kinds = iter([[Alternative("a", ["a"]), Alternative("b", ["b"])]])
    table = {(): 2.0, ("a",): 3.0, ("b",): 1.99}
    assert search(kinds, times(table, []), lambda overrides: True, lambda name, steps: None) == ["b"]
    assert compare(["b"], times(table, []), lambda name, steps: None) == []


@pytest.mark.parametrize(("other", "kept"), [(1.0, ["a"]), (1.95, []), (3.0, [])])
def test_the_winner_must_win_again_in_turns(other: float, kept: list[str]) -> None:
    asked: list[tuple[str, ...]] = []
    found = compare(["a"], times({(): 2.0, ("a",): other}, asked), lambda name, steps: None)
    assert found == kept and asked == [(), ("a",)] * 2


def test_an_alternative_that_fails_is_told_and_left_out() -> None:
    kinds = iter([[Alternative("a", ["a"]), Alternative("b", ["b"])]])
    told: list[tuple[str, bool]] = []

    def timed(overrides: Sequence[str]) -> Steps:
        if overrides == ["a"]:
            raise NemoRLError("no memory")
        return Steps([1.0 if overrides else 2.0], 1.0)

    def tell(name: str, result: Steps | NemoRLError) -> None:
        told.append((name, isinstance(result, NemoRLError)))

    assert search(kinds, timed, lambda overrides: True, tell) == ["b"]
    assert told == [("own sizes", False), ("a", True), ("b", False)]
    assert compare(["a"], timed, tell) == [] and told[-1] == ("fastest other, again", True)


def test_without_alternatives_nothing_is_compared() -> None:
    assert compare([], times({}, []), lambda name, steps: None) == []


@pytest.mark.parametrize(
    ("program", "deadline", "message"),
    [
        ("sleep 60", 0.3, "was ended after 0.3 s, with 0 of 3 steps"),
        ("exit 0", 60.0, "took 0 of 3 steps: the run is too short"),
        ("echo some reason; exit 3", 60.0, "ended with exit status 3 after 0 of 3 steps.\nsome reason"),
    ],
)
def test_a_trial_without_times_says_why(
    program: str, deadline: float, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "program"
    script.write_text(f"#!/bin/sh\n{program}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(NemoRLError, match=message):
        take_steps("grpo", CPU, [], 2, deadline)


def test_a_trial_without_its_parent_ends() -> None:
    command = [sys.executable, "-m", "nemo_rl.sizing.trial", "1", "grpo", str(CPU)]
    ended = subprocess.run(command, capture_output=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, b"", b"")


def test_a_signal_removes_the_folder_of_a_trial() -> None:
    program = """
import tempfile, time
from nemo_rl.host.stop_signals import leave_by_unwinding
leave_by_unwinding()
with tempfile.TemporaryDirectory() as folder:
    print(folder, flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert folder.is_dir()
        for _ in range(2):  # as `timeout` and `uv run` do
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    assert not folder.exists()


def test_a_trial_logs_elsewhere_and_its_overrides_are_accepted(tmp_path: Path) -> None:
    on = ["logger.wandb_enabled=true", "logger.trackio_enabled=true", "logger.prometheus.enabled=true"]
    config = load_config(CPU, [*on, *quiet_overrides("grpo", 3, tmp_path)], schema=GRPOMasterConfig)
    assert config.grpo.max_num_steps == 3 and not config.checkpointing.enabled
    logger = config.logger
    assert logger.log_dir == str(tmp_path)
    trackers = {name: on for name, on in logger.items() if name.endswith("_enabled")}
    assert len(trackers) >= 5 and not any(trackers.values())
    assert not (logger.prometheus.enabled or logger.record_steps or logger.record_modules or logger.monitor_gpus)


@pytest.mark.parametrize("file", ["sft_cpu", "dpo_cpu", "rm_cpu", "distillation_math_cpu", "grpo_math_cpu"])
def test_every_algorithm_takes_quiet_overrides(file: str, tmp_path: Path) -> None:
    path = REPOSITORY_ROOT / f"examples/configs/{file}.yaml"
    algorithm = algorithm_of(path)
    load_config(path, quiet_overrides(algorithm, 2, tmp_path), schema=ALGORITHMS[algorithm])


def test_steps_are_read_from_complete_lines(tmp_path: Path) -> None:
    folder = tmp_path / "exp_001"
    folder.mkdir()
    rows = [{"prefix": "timing/train", "metrics": {"total_step_time": value}} for value in (3.0, 2.0)]
    rows.insert(1, {"prefix": "train", "metrics": {"loss": 1.0}})
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"prefix": "timing/tr'
    (folder / "metrics.jsonl").write_text(text)
    assert step_seconds(tmp_path) == [3.0, 2.0]


def test_processor_seconds_count_work_not_sleep() -> None:
    before, end = processor_seconds(os.getpid())[os.getpid()], time.process_time() + 0.2
    while time.process_time() < end:
        pass
    time.sleep(0.2)
    assert processor_seconds(os.getpid())[os.getpid()] - before == pytest.approx(0.2, abs=0.1)


def test_processor_seconds_are_those_of_each_process_below() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time\nwhile time.process_time() < 60: pass"]) as child:
        try:
            time.sleep(1.0)
            assert processor_seconds(os.getpid())[child.pid] > 0.1
        finally:
            child.kill()
