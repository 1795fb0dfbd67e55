"""GRPO with rewards of a reward model with several scores, and of one that scores steps, on the CPU."""

import json

import pytest
from example_runs import StartExample, finished

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

GRPO = ("grpo.max_num_steps=2", "grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false")
TRAINED = ("rm.max_num_steps=20", "rm.val_period=20", "checkpointing.save_period=20")
KINDS = {
    "regression": (
        "env.reward_model.attribute_weights={correctness: 1.0, completeness: 0.5}",
        "grpo.adv_estimator.name=gdpo",
    ),
    "each step": (
        "env.reward_model.reward_model_cfg.reward_model_type=process",
        "env.reward_model.step_separator=','",  # as the tiny chat model writes its steps
        "env.reward_model.step_reward=each",
        "grpo.adv_estimator.credit=step_rewards",
        "grpo.use_leave_one_out_baseline=false",
    ),
    "process": (
        "env.reward_model.reward_model_cfg.reward_model_type=process",
        "env.reward_model.step_separator=';'",
        "env.reward_model.step_reward=mean",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_grpo_is_rewarded_by_every_kind_of_scores(kind: str, start_example: StartExample, tmp_path) -> None:
    config = "rm_regression_cpu.yaml" if kind == "regression" else "rm_process_cpu.yaml"
    finished(start_example, "run_rm.py", config, TRAINED, tmp_path / "rm")
    checkpoint = f"env.reward_model.checkpoint_path={tmp_path}/rm/checkpoints/step_20"
    metrics = finished(
        start_example, "run_grpo.py", "grpo_rm_cpu.yaml", (*GRPO, *KINDS[kind], checkpoint), tmp_path / "grpo"
    )
    reward = metrics["train", 2, "reward"]
    if kind == "process":
        assert 0 < reward < 1
    elif kind == "each step":
        assert reward > 0 and metrics["train", 2, "grad_norm"] > 0
        (file,) = (tmp_path / "logs").rglob("train_data_step2.jsonl")
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        assert max(len(sample["step_rewards"][0]) for sample in samples) > 1
        assert max(len(set(sample["advantages"]) - {0.0}) for sample in samples) > 1
    else:
        parts = [metrics["train", 2, name] for name in ("correctness", "completeness")]
        assert reward == pytest.approx(sum(parts), rel=1e-4)
    assert metrics["train", 2, "num_reward_errors"] == 0
