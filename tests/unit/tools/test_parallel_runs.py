"""The comparison of meshes finds losses that differ from one rank's, and runs that did not continue."""

import json
from pathlib import Path
from types import ModuleType

import pytest
from tool_loading import TOOLS, load_tool

from nemo_rl.config import load_config
from nemo_rl.config.loading.algorithms import ALGORITHMS


@pytest.fixture
def parallel_runs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    return load_tool("parallel_runs")


def write(folder: Path, losses: dict[int, float], start: int = 1) -> Path:
    """Write a run's metrics; `start` numbers the experiment."""
    path = folder / f"logs/exp_{start:03}/metrics.jsonl"
    path.parent.mkdir(parents=True)
    rows = [{"prefix": "train", "step": step, "metrics": {"loss": loss}} for step, loss in losses.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize(
    ("algorithm", "losses", "holds"),
    [
        ("sft", {1: 2.00001, 2: 1.0}, True),
        ("sft", {1: 2.0, 2: 1.001}, False),
        ("sft", {1: 2.0}, False),
        ("grpo", {1: 2.0, 2: 1.1}, True),  # its samples may diverge
        ("grpo", {1: 2.1, 2: 1.0}, False),
    ],
)
def test_losses_that_diverge_are_reported(parallel_runs, tmp_path, capsys, algorithm, losses, holds):
    ours, one = write(tmp_path / "tp2", losses), write(tmp_path / "1", {1: 2.0, 2: 1.0})
    assert parallel_runs.report(parallel_runs.Run(algorithm, "tp2"), ours, one) == holds
    assert ("DIFFERS" in capsys.readouterr().out) == (not holds)


def test_a_run_that_started_over_is_found(parallel_runs, tmp_path):
    write(tmp_path / "a", {1: 2.0, 2: 1.0})
    assert parallel_runs.went_on(write(tmp_path / "a", {3: 0.5, 4: 0.3}, start=2), half=2)
    write(tmp_path / "b", {1: 2.0, 2: 1.0})
    assert not parallel_runs.went_on(write(tmp_path / "b", {1: 2.0, 2: 1.0, 3: 0.5, 4: 0.3}, start=2), half=2)


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "eval"])
def test_megatron_core_has_the_optimizer_and_mesh_of_the_native_run(parallel_runs, algorithm):
    schema = ALGORITHMS[algorithm]
    example = TOOLS.parent / "examples/configs" / parallel_runs.CASES[algorithm].config
    native = load_config(example, schema=schema).policy.optimizer.kwargs
    run = parallel_runs.Run(algorithm, "tp2", backend="megatron")
    policy = load_config(example, [*run.overrides(None), "policy.scheduler=null"], schema).policy
    ours, schedule = policy.megatron_cfg.optimizer, policy.megatron_cfg.scheduler
    assert policy.megatron_cfg.enabled
    assert not policy.dtensor_cfg.enabled
    assert (policy.megatron_cfg.tensor_model_parallel_size, policy.megatron_cfg.sequence_parallel) == (2, True)
    assert (ours.lr, ours.adam_eps, (ours.adam_beta1, ours.adam_beta2)) == (
        *(native["lr"], native["eps"]),
        tuple(native["betas"]),
    )
    assert {schedule.start_weight_decay, schedule.end_weight_decay} == {native["weight_decay"]}
    assert (schedule.lr_decay_style, schedule.lr_warmup_iters) == ("constant", 0)
