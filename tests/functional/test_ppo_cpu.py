"""PPO with a critic end to end on the CPU: it learns, its options work together, and it resumes bit for bit."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from example_runs import REPOSITORY, StartExample, finished, killed_and_resumed, read_metrics
from ppo_runs import CONFIG, SCRIPT, SMALL_HF
from transformers import AutoTokenizer

from nemo_rl.models.huggingface.load import load_scoring_model

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

STEPS = 6
OVERRIDES = (f"ppo.max_num_steps={STEPS}", f"ppo.val_period={STEPS}", f"checkpointing.save_period={STEPS}")


def test_policy_and_critic_learn(start_example: StartExample, tmp_path: Path) -> None:
    metrics = finished(start_example, SCRIPT, CONFIG, OVERRIDES, tmp_path)
    assert metrics["validation", STEPS, "accuracy"] > metrics["validation", 0, "accuracy"] + 0.25

    def mean(name: str, *steps: int) -> float:
        return sum(metrics["train", step, name] for step in steps) / len(steps)

    assert mean("critic/explained_var", 4, 5) > mean("critic/explained_var", 1, 2) + 0.15
    assert mean("critic/loss", 5, 6) < 0.7 * mean("critic/loss", 1, 2)
    saved = tmp_path / f"checkpoints/step_{STEPS}"
    for model in ("policy", "value"):
        assert {part.name for part in (saved / model).iterdir()} == {"weights", "optimizer", "tokenizer"}


def test_options_work_together(start_example: StartExample) -> None:
    """Sampling ahead, a KL penalty in the reward, steps of the critic alone, and several updates in each epoch."""
    run = start_example(
        SCRIPT,
        CONFIG,
        *SMALL_HF,
        *("ppo.max_num_steps=4", "ppo.val_period=0", "checkpointing.enabled=false", "ppo.ppo_epochs=3"),
        *("ppo.async_ppo.enabled=true", "ppo.policy_training_start_step=2", "policy.generation.max_new_tokens=3"),
        *("ppo.skip_reference_policy_logprobs_calculation=false", "loss_fn.reference_policy_kl_penalty=0.05"),
        *("loss_fn.use_kl_in_reward=true", "ppo.adv_estimator.bootstrap_truncated=true"),
        *("ppo.adv_estimator.length_adaptive_alpha=0.5", "ppo.adv_estimator.gae_lambda_value=1.0"),
        "loss_fn.positive_example_nll_weight=0.1",
    )
    assert run.finish() == 0, run.log()[-3000:]
    metrics = read_metrics(run.log_dir)
    for step in (1, 2, 3, 4):
        assert metrics["train", step, "critic/num_updates"] == 2 * 3
        assert (("train", step, "loss") in metrics) == (step > 2)
        assert metrics["train", step, "global_valid_seqs"] <= 16
    assert metrics["train", 3, "num_updates"] == metrics["train", 4, "num_updates"] == 2 * 3


@pytest.mark.long
def test_a_killed_run_resumes_bit_for_bit(start_example: StartExample, tmp_path: Path) -> None:
    overrides = (*SMALL_HF, "ppo.max_num_steps=8", "ppo.val_period=8", "checkpointing.save_period=4")
    metrics = killed_and_resumed(start_example, SCRIPT, CONFIG, overrides, tmp_path, steps=8)
    assert len({metrics["train", step, "critic/loss"] for step in range(1, 9)}) == 8


LORA = "{enabled: true, dim: 8, alpha: 16}"


@pytest.fixture
def reward_model(tmp_path: Path) -> Path:
    """A reward model with one score and a head of random numbers."""
    model = load_scoring_model(str(REPOSITORY / "examples/assets/tiny-chat"))
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(3))
    model.save_pretrained(tmp_path / "rm")
    AutoTokenizer.from_pretrained(REPOSITORY / "examples/assets/tiny-chat").save_pretrained(tmp_path / "rm")
    return tmp_path / "rm"


@pytest.mark.long
def test_adapters_a_reward_model_as_critic_and_rewards_of_steps_resume_bit_for_bit(
    reward_model: Path, start_example: StartExample, tmp_path: Path
) -> None:
    shutil.copy(Path(__file__).with_name("rewarded_steps.py"), tmp_path)
    own = "rewarded_steps.RewardedSteps"
    overrides = (
        *(*SMALL_HF, "ppo.max_num_steps=8", "ppo.val_period=0", "ppo.val_at_end=false", "checkpointing.save_period=4"),
        *(f"policy.dtensor_cfg.lora_cfg={LORA}", f"value.dtensor_cfg.lora_cfg={LORA}"),
        *(f"value.model_name={reward_model}", "ppo.overlap.mode=ahead", "ppo.reward_scaling.enabled=false"),
        "ppo.adv_estimator.gae_lambda_value=1.0",
        *(f"data.default.env_name={own}", f"++env={{{own}: {{}}}}"),
    )
    metrics = killed_and_resumed(start_example, SCRIPT, CONFIG, overrides, tmp_path, steps=8)
    assert all(metrics["train", step, "critic/grad_norm"] > 0 for step in range(1, 9))
    files = sorted((tmp_path / "logs").rglob("train_data_step*.jsonl"))
    samples = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert max(len(sample["step_rewards"][0]) for sample in samples) > 2
    for sample in samples:
        _check_returns(sample)


def _check_returns(sample: dict[str, Any]) -> None:
    """Compare the return of the first token, with gamma and lambda 1, with the reward of the sample."""
    first = sample["token_loss_mask"].index(1)
    assert sample["returns"][first] == pytest.approx(sample["rewards"], abs=1e-4)
