"""Runs with `policy.zero_mismatch`: the engine's log-probabilities are the policy's, bit for bit, in every step."""

from itertools import pairwise
from pathlib import Path

import pytest
from example_runs import Metrics, StartExample, finished, killed_and_resumed
from tiny_models import save_mixture

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]

STEPS = 3
OVERRIDES = (
    *("policy.zero_mismatch=true", f"grpo.max_num_steps={STEPS}", "grpo.val_at_start=false", "grpo.val_period=0"),
    "checkpointing.enabled=false",
)
BACKENDS = {
    "vllm": ("policy.generation.backend=vllm",),
    "vllm-bfloat16": ("policy.generation.backend=vllm", "policy.precision=bfloat16"),
    "packed": ("policy.generation.backend=hf",),
    "padded-bfloat16": (
        *("policy.generation.backend=hf", "policy.precision=bfloat16", "policy.sequence_packing.enabled=false"),
    ),
    "two-ranks": (
        *("policy.generation.backend=hf", "cluster.ranks_per_node=2", "policy.dtensor_cfg.tensor_parallel_size=2"),
        "policy.dtensor_cfg.sequence_parallel=true",
    ),
    "two-ranks-vllm": (
        *("policy.generation.backend=vllm", "cluster.ranks_per_node=2", "policy.dtensor_cfg.tensor_parallel_size=2"),
        "policy.precision=bfloat16",
    ),
    "megatron": (
        *("policy.generation.backend=megatron", "policy.megatron_cfg.enabled=true"),
        "policy.dtensor_cfg.enabled=false",
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_engine_and_policy_compute_the_same_bits(backend: str, start_example: StartExample, tmp_path: Path) -> None:
    metrics = finished(start_example, "run_grpo.py", "grpo_math_cpu.yaml", (*OVERRIDES, *BACKENDS[backend]), tmp_path)
    require_equal(metrics)
    assert all(metrics["train", step, "grad_norm"] > 0 for step in range(1, STEPS + 1))


@pytest.mark.vllm
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_vllm_and_policy_compute_the_same_bits_of_experts(
    precision: str, start_example: StartExample, tmp_path: Path
) -> None:
    """Also if the policy uses the experts that vLLM's routers chose. The model gets no reward; its weights decay."""
    save_mixture(tmp_path / "model")
    asked = (f"policy.model_name={tmp_path / 'model'}", f"policy.precision={precision}", *BACKENDS["vllm"])
    more = ("policy.router_replay.enabled=true", "policy.optimizer.kwargs.weight_decay=3000")
    metrics = finished(start_example, "run_grpo.py", "grpo_math_cpu.yaml", (*OVERRIDES, *asked, *more), tmp_path)
    require_equal(metrics)
    entropies = [metrics["train", step, "approx_entropy"] for step in range(1, STEPS + 1)]
    assert all(later > earlier + 0.05 for earlier, later in pairwise(entropies)), "the engine gets the new weights"
    assert all(0.9 < metrics["train", step, "moe/replayed_token_share"] < 1 for step in range(1, STEPS + 1))


@pytest.mark.parametrize("backend", ["vllm-bfloat16", "packed"])
def test_a_resumed_run_has_the_same_bits(backend: str, start_example: StartExample, tmp_path: Path) -> None:
    without_checkpoints = "checkpointing.enabled=false"
    overrides = (*(each for each in OVERRIDES if each != without_checkpoints), *BACKENDS[backend])
    overrides += ("grpo.max_num_steps=8", "checkpointing.save_period=4", "logger.tensorboard_enabled=false")
    metrics = killed_and_resumed(start_example, "run_grpo.py", "grpo_math_cpu.yaml", overrides, tmp_path, 8)
    require_equal(metrics, 8)


def require_equal(metrics: Metrics, steps: int = STEPS) -> None:
    """Check that all log-probabilities of all steps have the same bits."""
    for step in range(1, steps + 1):
        assert metrics["train", step, "token_mult_prob_error"] == 1.0
        assert metrics["train", step, "gen_kl_error"] == 0.0
