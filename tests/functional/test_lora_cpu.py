"""GRPO with LoRA end to end on the CPU: it learns, engines and trainer agree, a resumed run is exact."""

import json

import pytest
import torch
from example_runs import Metrics, StartExample, finished, killed_and_resumed, read_metrics
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

CONFIG = "grpo_math_cpu.yaml"
LORA = (
    "policy.dtensor_cfg.lora_cfg.enabled=true",
    "policy.dtensor_cfg.lora_cfg.dim=16",
    "policy.optimizer.kwargs.lr=1e-3",
    "grpo.val_period=2",
    "loss_fn.reference_policy_kl_penalty=0.01",
    "checkpointing.save_period=4",
    "checkpointing.save_consolidated=true",
)


def test_grpo_with_lora_learns(start_example: StartExample, tmp_path) -> None:
    expected = finished(start_example, "run_grpo.py", CONFIG, (*LORA, "grpo.max_num_steps=8"), tmp_path)
    rewards = [expected["train", step, "reward"] for step in range(1, 9)]
    assert sum(rewards[4:]) / 4 > rewards[0] + 0.1, rewards
    assert expected["validation", 8, "accuracy"] > expected["validation", 0, "accuracy"] + 0.1
    assert max(expected["train", step, "token_mult_prob_error"] for step in range(1, 9)) < 1.01
    assert expected["train", 1, "kl_penalty"] == pytest.approx(0.0, abs=1e-6)
    assert expected["train", 8, "kl_penalty"] > 1e-5

    weights = tmp_path / "checkpoints/step_8/policy/weights"
    merged, handed_on = (AutoModelForCausalLM.from_pretrained(weights / f) for f in ("model", "model/consolidated"))
    assert all(torch.equal(merged.get_parameter(name), tensor) for name, tensor in handed_on.named_parameters())
    assert json.loads((weights / "adapter/adapter_config.json").read_text())["r"] == 16


REFITTED = (
    *("policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.dim=16"),
    *("policy.optimizer.kwargs.lr=1e-3", "checkpointing.enabled=false"),
    *("grpo.max_num_steps=2", "grpo.val_at_start=false", "grpo.val_period=2"),
)


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_adapters_alone_train_like_merged_weights(engine: str, start_example: StartExample, tmp_path) -> None:
    """The second step and the validation after it are sampled with adapters that have changed."""
    runs: dict[str, Metrics] = {}
    megabytes: dict[str, float] = {}
    for mode in ("merged", "adapter"):
        keys = (f"policy.generation.backend={engine}", f"policy.generation.lora_refit_mode={mode}")
        run = start_example("run_grpo.py", CONFIG, *REFITTED, *keys, logs=mode)
        assert run.finish() == 0, run.log()[-3000:]
        runs[mode] = read_metrics(run.log_dir)
        megabytes[mode] = runs[mode]["refit", 2, "sync_mb"]
    merged, adapter = runs["merged"], runs["adapter"]
    for step in (1, 2):
        for name in ("reward", "loss", "grad_norm", "mean_gen_tokens_per_sample"):
            assert adapter["train", step, name] == pytest.approx(merged["train", step, name], rel=1e-3), name
        assert adapter["train", step, "token_mult_prob_error"] == pytest.approx(1.0, abs=1e-5)
    assert adapter["validation", 2, "accuracy"] == pytest.approx(merged["validation", 2, "accuracy"], abs=0.02)
    assert megabytes["adapter"] < megabytes["merged"] / 5


ADAPTER_ONLY = ("policy.generation.lora_refit_mode=adapter",)
OF_HF = (*ADAPTER_ONLY, "policy.generation.backend=hf")


@pytest.mark.long
@pytest.mark.parametrize("engines", [(), OF_HF, ADAPTER_ONLY], ids=["merged", "adapter", "vllm adapter"])
def test_a_killed_run_resumes_bit_for_bit(engines: tuple[str, ...], start_example: StartExample, tmp_path) -> None:
    overrides = (*LORA, *engines, "grpo.max_num_steps=8")
    killed_and_resumed(start_example, "run_grpo.py", CONFIG, overrides, tmp_path, steps=8)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_adapters_alone_reach_engines_of_their_own_ahead_and_after_a_death(
    engine: str, start_example: StartExample
) -> None:
    """Two ranks train, and two engines sample ahead. Running answers go on with the new adapter, and an engine dies."""
    run = start_example(
        "run_grpo.py",
        CONFIG,
        *(*REFITTED, *ADAPTER_ONLY, "grpo.max_num_steps=6", "cluster.ranks_per_node=2"),
        f"policy.generation.backend={engine}",
        *("policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.ranks_per_node=2"),
        *("policy.generation.weight_sync.transport=collective", "grpo.overlap.mode=ahead"),
        "grpo.overlap.in_flight_weight_updates=true",
    )
    run.wait_for("step 2/6")
    run.kill(f"ray::{engine}_engine", "ray::GenerationWorker")
    assert run.finish() == 0, run.log()[-3000:]
    assert "restarting it" in run.log()
    metrics = read_metrics(run.log_dir)
    steps = range(1, 7)
    names = [("train", step, "token_mult_prob_error") for step in steps]  # missing if all tokens are of older weights
    errors = [metrics[name] for name in names if name in metrics]
    assert errors and max(errors) < 1.01, errors
    assert all(metrics["train", step, "grad_norm"] > 0 for step in steps)
    assert {metrics["refit", step, "sync_mb"] for step in steps} == {metrics["refit", 1, "sync_mb"]}
    assert metrics["train", 6, "reward"] > metrics["train", 1, "reward"]
