"""The search by real steps: which alternatives there are, and that only what was faster is proposed."""

import json
import os
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
from nemo_rl.sizing.trial import Steps, processor_seconds, quiet_overrides, step_seconds

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


def test_a_trial_logs_elsewhere_and_its_overrides_are_accepted(tmp_path: Path) -> None:
    config = load_config(CPU, quiet_overrides("grpo", 3, tmp_path), schema=GRPOMasterConfig)
    assert config.grpo.max_num_steps == 3 and not config.checkpointing.enabled
    assert config.logger.log_dir == str(tmp_path) and not config.logger.tensorboard_enabled


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
