"""GRPO that trains a draft model for its engines' speculative decoding, end to end on the CPU."""

import importlib.util
from pathlib import Path

import pytest
from example_runs import StartExample, read_metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra cpu or vllm"),
]

COMMON = (
    "grpo.val_at_start=false",
    "grpo.val_period=0",
    "policy.draft.enabled=true",
    "+policy.generation.vllm_kwargs.speculative_config={method: eagle3, num_speculative_tokens: 2}",
)
TWO_RANKS = ("cluster.ranks_per_node=2", "policy.generation.engine.tensor_parallel_size=2")
MEGATRON = (
    "policy.dtensor_cfg.enabled=false",
    "policy.megatron_cfg.enabled=true",
    "policy.megatron_cfg.tensor_model_parallel_size=2",
    "policy.megatron_cfg.optimizer.lr=1.0e-3",
    "policy.megatron_cfg.optimizer.min_lr=1.0e-3",
)


@pytest.mark.long
def test_a_resumed_run_continues_with_its_draft_model(start_example: StartExample, tmp_path: Path) -> None:
    """More and more proposals are accepted; a checkpoint's head also serves another run from its first step."""
    checkpoints = f"checkpointing.checkpoint_dir={tmp_path / 'checkpoints'}"
    found = {}
    for name, last in (("first", 8), ("resumed", 10)):
        steps = f"grpo.max_num_steps={last}"
        run = start_example("run_grpo.py", "grpo_math_cpu.yaml", *COMMON, checkpoints, steps, logs=name)
        assert run.finish() == 0, run.log()[-3000:]
        assert "has no draft model" not in run.log()
        found |= read_metrics(run.log_dir)
    rates = [found["generation", step, "spec_acceptance_rate"] for step in range(1, 11)]
    assert rates[0] < 0.01 < 0.03 < rates[7] and rates[9] > 0.75 * rates[7], rates
    losses = [found["train", step, "draft_loss"] for step in range(1, 11)]
    assert all(later < earlier + 0.02 for earlier, later in zip(losses, losses[1:], strict=False)), losses
    assert all(found["train", step, "token_mult_prob_error"] < 1.001 for step in range(1, 11))
    head = tmp_path / "checkpoints" / "step_10" / "policy" / "weights" / "draft"
    started = start_example(
        "run_grpo.py",
        "grpo_math_cpu.yaml",
        *COMMON,
        f"policy.draft.model_name={head}",
        "grpo.max_num_steps=1",
        "checkpointing.enabled=false",
        logs="from a file",
    )
    assert started.finish() == 0, started.log()[-3000:]
    metrics = read_metrics(started.log_dir)
    assert metrics["generation", 1, "spec_acceptance_rate"] > 0.5 * rates[7]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), id="one rank"),
        pytest.param(TWO_RANKS, id="two ranks", marks=pytest.mark.long),
        pytest.param((*TWO_RANKS, *MEGATRON), id="two ranks of megatron", marks=pytest.mark.long),
    ],
)
def test_more_and_more_proposals_are_accepted(
    start_example: StartExample, tmp_path: Path, more: tuple[str, ...]
) -> None:
    run = start_example(
        "run_grpo.py", "grpo_math_cpu.yaml", *COMMON, *more, "grpo.max_num_steps=6", "checkpointing.enabled=false"
    )
    assert run.finish() == 0, run.log()[-3000:]
    metrics = read_metrics(run.log_dir)
    rates = [metrics["generation", step, "spec_acceptance_rate"] for step in (1, 6)]
    assert rates[1] > 5 * rates[0] and rates[1] > 0.02, rates
    agreement = [metrics["train", step, "draft_agreement"] for step in (1, 6)]
    assert agreement[1] > 5 * agreement[0], agreement
