"""GRPO end to end on the CPU: Ray, FSDP2 worker, vLLM, environment, weight sync, checkpoints."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import ray
import torch
from example_runs import (
    REPOSITORY,
    GRPOExample,
    StartExample,
    interrupted_and_resumed,
    of_training,
    read_metrics,
    run_eval,
    run_script,
)
from tiny_models import make_char_tokenizer, save_tiny_checkpoint
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from nemo_rl.algorithms.grpo import grpo_train, setup
from nemo_rl.config import load_config
from nemo_rl.models.policy.weight_stream import PolicyWeightStream
from nemo_rl.utils.errors import WeightSyncError
from nemo_rl.weight_sync.buckets import Bucket, view_of
from nemo_rl.weight_sync.transport import map_memory

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

CONFIG = "grpo_math_cpu.yaml"


def test_grpo_learns_and_a_killed_run_repeats_its_metrics_bit_for_bit(grpo_example: GRPOExample) -> None:
    metrics = grpo_example.metrics
    assert metrics["validation", 8, "accuracy"] > metrics["validation", 0, "accuracy"] + 0.15
    errors = [v for (_, _, name), v in metrics.items() if name == "token_mult_prob_error"]
    assert len(errors) == 8
    assert max(errors) < 1.01


def test_the_console_of_a_run_has_short_lines(grpo_example: GRPOExample) -> None:
    assert len(grpo_example.longest_line) <= 160, grpo_example.longest_line


def test_a_trained_checkpoint_is_exported_and_evaluated(grpo_example: GRPOExample, tmp_path: Path) -> None:
    step = grpo_example.checkpoint
    status, output = run_script(
        tmp_path,
        "converters/convert_dcp_to_hf.py",
        f"--config={step}/config.yaml",
        f"--dcp-ckpt-path={step}/policy/weights",
        "--hf-ckpt-path=hf",
        "--verify",
    )
    assert status == 0, output[-3000:]
    assert float(output.split("log-probabilities: ")[1].split()[0]) <= 1e-6

    status, output = run_eval(tmp_path, "generation.model_name=hf", "eval.save_path=exported")
    assert status == 0, output[-3000:]
    assert json.loads((tmp_path / "exported/results.json").read_text())["score"]["value"] > 0.5


@pytest.mark.long
def test_a_run_stopped_by_sigterm_resumes_bit_for_bit(
    start_example: StartExample, grpo_example: GRPOExample, tmp_path: Path
) -> None:
    overrides = ("grpo.max_num_steps=8", "checkpointing.save_period=100", "grpo.val_period=2")

    def terminate(pid: int) -> str:
        os.kill(pid, signal.SIGTERM)
        return "SIGTERM"

    metrics = interrupted_and_resumed(start_example, "run_grpo.py", CONFIG, overrides, tmp_path, terminate)
    assert metrics == grpo_example.metrics


ENVIRONMENT = """
from nemo_rl.environments.interfaces import EnvironmentInterface

class NoGrader(EnvironmentInterface):
    def __init__(self, cfg): pass
    def step(self, message_log_batch, metadata): raise RuntimeError("no grader today")
    def global_post_process_and_metrics(self, batch): return batch, {}
"""


def test_an_environment_that_always_raises_ends_the_run(start_example: StartExample, tmp_path: Path) -> None:
    (tmp_path / "no_grader.py").write_text(ENVIRONMENT)
    config = tmp_path / "no_grader.yaml"
    config.write_text(f"defaults: {REPOSITORY}/examples/configs/{CONFIG}\nenv:\n  no_grader.NoGrader: {{}}\n")
    run = start_example(
        "run_grpo.py",
        str(config),
        "grpo.max_num_steps=9",
        "grpo.max_idle_steps=2",
        "grpo.val_at_start=false",
        f"checkpointing.checkpoint_dir={tmp_path}/checkpoints",
        "data.default.env_name=no_grader.NoGrader",
        "policy.generation.backend=hf",
    )
    assert run.finish() == 1, run.log()[-3000:]
    assert "NothingToLearnError: Step 2 trained nothing" in run.log()
    assert "(reward_error_rate=1). Weights and optimizer are as they were" in run.log()
    metrics = read_metrics(run.log_dir)
    assert [metrics["train", step, "skipped_updates"] for step in (1, 2)] == [1.0, 1.0]
    assert ("train", 1, "loss") not in metrics
    assert not list((tmp_path / "checkpoints").glob("step_*"))


@pytest.mark.long
def test_two_ranks_survive_the_death_of_one_of_two_separate_engines(
    start_example: StartExample, grpo_example: GRPOExample
) -> None:
    apart = start_example(
        "run_grpo.py",
        CONFIG,
        "grpo.max_num_steps=4",
        "checkpointing.enabled=false",
        "grpo.val_at_start=false",
        "cluster.ranks_per_node=2",
        "policy.generation.colocated.enabled=false",
        "policy.generation.colocated.resources.ranks_per_node=2",
        "policy.generation.weight_sync.transport=collective",
    )
    apart.wait_for("step 2/4")
    apart.kill("ray::vllm_engine", "ray::GenerationWorker")
    assert apart.finish() == 0, apart.log()[-3000:]
    assert "Generation engine" in apart.log()
    assert "restarting it" in apart.log()
    metrics, expected = read_metrics(apart.log_dir), grpo_example.metrics
    for step in range(1, 5):
        assert metrics["train", step, "reward"] == expected["train", step, "reward"]
        assert metrics["train", step, "loss"] == pytest.approx(expected["train", step, "loss"], abs=1e-4)


@pytest.mark.long
def test_a_dead_environment_is_replaced_and_a_dead_policy_rank_ends_the_run(
    start_example: StartExample,
) -> None:
    run = start_example(
        "run_grpo.py",
        CONFIG,
        "grpo.max_num_steps=500",
        "checkpointing.enabled=false",
        "grpo.val_at_start=false",
        "grpo.val_period=0",
    )
    run.wait_for("step 2/500")
    run.kill("ray::EnvironmentActor")
    run.wait_for("The actor of environment 'math' ended")
    run.wait_for("step 6/500")
    run.processes()
    pid = run.kill("ray::PolicyRank")
    assert run.finish(timeout_s=60) == 1
    assert f"WorkerDiedError: Worker lm_policy-0-0 (rank 0, node 127.0.0.1, pid {pid}) died" in run.log()
    assert run.survivors() == []


def test_a_run_whose_policy_rank_dies_repeats_the_metrics_of_an_undisturbed_run(
    start_example: StartExample, grpo_example: GRPOExample
) -> None:
    """The rank dies in step 5 or 6, after the checkpoint of step 4; engines and environments stay."""
    run = start_example(
        "run_grpo.py", CONFIG, "grpo.max_num_steps=8", "checkpointing.save_period=4", "grpo.val_period=2"
    )
    run.wait_for("step 4/8")
    others = {p.pid for p in run.processes("ray::vllm_engine", "ray::GenerationWorker", "ray::EnvironmentActor")}
    assert len(others) == 2
    pid = run.kill("ray::PolicyRank", "ray::lm_policy")
    run.wait_for("Restart 1 of 3: the ranks of policy are replaced and continue from .*step_4; engines")
    run.wait_for("step 7/8")
    still = {p.pid for p in run.processes("ray::vllm_engine", "ray::GenerationWorker", "ray::EnvironmentActor")}
    assert still == others
    assert run.finish() == 0, run.log()[-3000:]
    assert f"Worker lm_policy-0-0 (rank 0, node 127.0.0.1, pid {pid}) died" in run.log()
    metrics = read_metrics(run.log_dir)
    assert of_training(metrics) == grpo_example.metrics
    assert metrics["performance", 8, "num_run_restarts"] == 1.0
    assert ("performance", 4, "num_run_restarts") not in metrics
    assert run.survivors() == []


@pytest.mark.long
@pytest.mark.parametrize("victim", ["gcs_server", "raylet"])
def test_a_dead_ray_process_ends_the_run_and_is_named(start_example: StartExample, victim: str) -> None:
    run = start_example(
        "run_grpo.py", CONFIG, "grpo.max_num_steps=500", "checkpointing.enabled=false", "grpo.val_at_start=false"
    )
    run.wait_for("step 3/500")
    daemon = next(process for process in run.processes() if process.name() == victim)
    daemon.kill()
    killed_at = time.monotonic()
    assert run.finish(timeout_s=60) == 1
    print(f"{victim}: {time.monotonic() - killed_at:.1f} s from its death to the end of the run")
    assert re.search(rf"The .* of this run's Ray \({victim}, pid {daemon.pid}\) was killed by SIGKILL", run.log())
    assert run.survivors() == []


def test_a_full_memory_of_the_machine_is_one_message(start_example: StartExample) -> None:
    full = {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "250"}
    run = start_example("run_grpo.py", CONFIG, "grpo.max_num_steps=1", "checkpointing.enabled=false", environment=full)
    assert run.finish() == 1
    log = run.log()
    assert re.search(r"WorkerDiedError: Worker .* died during .*: the memory of the machine 127.0.0.1 was full, ", log)
    assert "Traceback" not in log and "Top 10" not in log and len(log.splitlines()) < 40


@pytest.mark.long
def test_the_hugging_face_engine_runs_with_dynamic_batching(start_example: StartExample) -> None:
    run = start_example(
        "run_grpo.py",
        CONFIG,
        "grpo.max_num_steps=2",
        "checkpointing.enabled=false",
        "grpo.val_at_start=false",
        "policy.generation.backend=hf",
        "policy.sequence_packing.enabled=false",
        "policy.dynamic_batching.enabled=true",
        "policy.train_micro_batch_size=8",
        "loss_fn.reference_policy_kl_penalty=0.01",
        "policy.train_global_batch_size=32",
    )
    assert run.finish() == 0, run.log()[-3000:]
    metrics = read_metrics(run.log_dir)
    assert metrics["train", 1, "token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
    # The second of the step's two updates is off-policy and away from the reference, but not far.
    assert metrics["train", 1, "probs_ratio_max"] > 1.0
    assert 0.0 < metrics["train", 1, "kl_penalty"] < 0.2
    assert 0.1 < metrics["train", 1, "reward"] < 0.7


@pytest.mark.long
def test_a_corrupted_bucket_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = [f"logger.log_dir={tmp_path}", "checkpointing.enabled=false"]
    config = load_config(REPOSITORY / "examples/configs" / CONFIG, overrides)
    run = setup(config)
    try:
        pack = PolicyWeightStream.next_weight_buckets

        def pack_and_corrupt(stream: PolicyWeightStream) -> list[Bucket]:
            (bucket,) = pack(stream)
            (handle,) = bucket.handles.values()
            victim = bucket.slots[3]
            with Path(handle.path).open("r+b") as file:
                file.seek(victim.offset + 5)
                flipped = file.read(1)[0] ^ 1
                file.seek(victim.offset + 5)
                file.write(bytes([flipped]))
            names.append(victim.name)
            return [bucket]

        names: list[str] = []
        monkeypatch.setattr(PolicyWeightStream, "next_weight_buckets", pack_and_corrupt)
        with pytest.raises(WeightSyncError, match="content differs in") as error:
            grpo_train(run)
        assert names[0] in str(error.value)
    finally:
        run.close()
        ray.shutdown()


def test_a_wrong_layer_with_a_correct_checksum_stops_the_run_before_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without checksums no transport check sees the changed bytes; the first batch does."""
    monkeypatch.chdir(tmp_path)
    overrides = [
        f"logger.log_dir={tmp_path}",
        "checkpointing.enabled=false",
        "grpo.val_at_start=false",
        "policy.generation.weight_sync.verify=false",
    ]
    run = setup(load_config(REPOSITORY / "examples/configs" / CONFIG, overrides))
    pack = PolicyWeightStream.next_weight_buckets

    def pack_and_negate(stream: PolicyWeightStream) -> list[Bucket]:
        (bucket,) = pack(stream)
        (handle,) = bucket.handles.values()
        for slot in bucket.slots:
            if slot.name == "model.layers.2.mlp.down_proj.weight":
                view_of(map_memory(handle), slot).neg_()
        return [bucket]

    monkeypatch.setattr(PolicyWeightStream, "next_weight_buckets", pack_and_negate)
    try:
        with pytest.raises(WeightSyncError, match=r"Engine 0: model\.layers\.2 is suspect"):
            grpo_train(run)
        assert run.policy.weight_version == 0
    finally:
        run.close()
        ray.shutdown()


def test_a_mixture_of_experts_on_two_ranks_and_two_engines_samples_from_the_policy(
    start_example: StartExample, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=264,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        max_position_embeddings=512,
        initializer_range=0.25,
        pad_token_id=256,
        eos_token_id=258,
        bos_token_id=None,
    )
    save_tiny_checkpoint(tmp_path / "mixture", AutoModelForCausalLM.from_config(config), make_char_tokenizer())
    run = start_example(
        "run_grpo.py",
        CONFIG,
        f"policy.model_name={tmp_path}/mixture",
        "grpo.max_num_steps=3",
        "checkpointing.enabled=false",
        "grpo.val_at_start=false",
        "grpo.val_period=0",
        "cluster.ranks_per_node=2",
        "policy.generation.colocated.enabled=false",
        "policy.generation.colocated.resources.ranks_per_node=2",
        "policy.generation.weight_sync.transport=collective",
    )
    assert run.finish() == 0, run.log()[-3000:]
    metrics = read_metrics(run.log_dir)
    assert max(metrics["train", step, "token_mult_prob_error"] for step in (1, 2, 3)) < 1.001
