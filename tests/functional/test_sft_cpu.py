"""SFT end to end on the CPU: the validation loss falls, a killed run resumes bit for bit."""

import os
import signal
from pathlib import Path

import pytest
from example_runs import StartExample, interrupted_and_resumed, of_training, read_metrics
from supervised_runs import run_and_resume
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]


def test_sft_learns_and_resumes_bit_for_bit(start_example: StartExample, tmp_path) -> None:
    metrics = run_and_resume(start_example, "sft", 20, tmp_path)
    losses = [metrics["validation", step, "val_loss"] for step in (0, 10, 20)]
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] < 0.5 * losses[0]
    AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoints/step_20/policy/weights/model")


MUON = (
    *("policy.optimizer.name=torch.optim.Muon", "+policy.optimizer.kwargs.adjust_lr_fn=match_rms_adamw"),
    *("~policy.optimizer.kwargs.betas", "~policy.optimizer.kwargs.eps"),
)


@pytest.mark.long
def test_a_killed_run_with_muon_on_two_ranks_resumes_bit_for_bit(start_example: StartExample, tmp_path) -> None:
    ranks = ("cluster.ranks_per_node=2", "cluster.threads_per_rank=1")
    metrics = run_and_resume(start_example, "sft", 20, tmp_path, *MUON, *ranks)
    losses = [metrics["validation", step, "val_loss"] for step in (0, 10, 20)]
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] < 0.7 * losses[0]


@pytest.mark.long
def test_a_run_whose_second_rank_dies_repeats_the_metrics_of_an_undisturbed_run(start_example: StartExample) -> None:
    overrides = ("sft.max_num_steps=8", "sft.val_period=4", "cluster.ranks_per_node=2", "cluster.threads_per_rank=1")
    whole = start_example("run_sft.py", "sft_cpu.yaml", *overrides, "checkpointing.enabled=false", logs="whole")
    assert whole.finish() == 0, whole.log()[-3000:]
    expected = of_training(read_metrics(whole.log_dir))
    assert ("train", 8) in {key[:2] for key in expected}

    run = start_example("run_sft.py", "sft_cpu.yaml", *overrides, "checkpointing.save_period=4")
    run.wait_for("step 4/8")
    ranks = run.processes("ray::PolicyRank", "ray::lm_policy")
    assert len(ranks) == 2
    max(ranks, key=lambda rank: rank.pid).kill()
    assert run.finish() == 0, run.log()[-3000:]
    assert "Restart 1 of 3: the ranks of policy are replaced" in run.log()
    assert of_training(read_metrics(run.log_dir)) == expected
    assert run.survivors() == []


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_all_processes_of_the_terminal_leaves_a_checkpoint(
    start_example: StartExample, tmp_path: Path, number: signal.Signals
) -> None:
    overrides = ("sft.max_num_steps=16", "sft.val_period=8", "data.num_workers=1")

    def send(pid: int) -> str:
        os.killpg(pid, number)
        return number.name

    metrics = interrupted_and_resumed(start_example, "run_sft.py", "sft_cpu.yaml", overrides, tmp_path, send)
    whole = start_example("run_sft.py", "sft_cpu.yaml", *overrides, "checkpointing.enabled=false", logs="whole")
    assert whole.finish() == 0, whole.log()[-3000:]
    assert metrics == of_training(read_metrics(whole.log_dir))


@pytest.mark.long
@pytest.mark.parametrize("pattern", ["Logs of this run", "Ray started"])
def test_a_signal_before_training_ends_the_run_at_once(start_example: StartExample, pattern: str) -> None:
    run = start_example("run_sft.py", "sft_cpu.yaml", process_group=0)
    run.wait_for(pattern)
    run.processes()
    os.killpg(run.process.pid, signal.SIGTERM)
    assert run.finish(5) == 128 + signal.SIGTERM
    assert "SIGTERM: ended immediately" in run.log()
    assert run.survivors() == []
