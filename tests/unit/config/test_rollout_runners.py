"""The rules on `cluster.rollout_runners`: what needs tokens in the driver is refused."""

from pathlib import Path

import pytest

from nemo_rl.config import DistillationMasterConfig, EvalMasterConfig, SFTMasterConfig, load_config
from nemo_rl.utils.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[3] / "examples/configs"
ONE = "cluster.rollout_runners=1"


@pytest.mark.parametrize(
    "override",
    [
        "grpo.overlap.mode=none",
        "grpo.overlap.mode=ahead",
        "grpo.use_dynamic_sampling=true",
        "grpo.max_rollout_turns=3",
        "grpo.adv_estimator.name=rloo",
        "policy.train_global_batch_size=32",
        "grpo.seq_logprob_error_threshold=2.0",
        "loss_fn.reference_policy_kl_penalty=0.1",
        "reward_penalties.penalize_empty_final_answer=true",
        "effort_levels={low: {system_prompt: Be brief., max_thinking_tokens: 9}}",
    ],
)
def test_runners_are_accepted(override: str) -> None:
    assert load_config(CONFIGS / "grpo_math_cpu.yaml").cluster.rollout_runners == 0
    assert load_config(CONFIGS / "grpo_math_cpu.yaml", [ONE, override]).cluster.rollout_runners == 1


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "gdpo"])
def test_advantages_of_tokens_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"keeps tokens out of the driver, but.*{name} may need them"):
        load_config(CONFIGS / "grpo_math_cpu.yaml", [ONE, f"grpo.adv_estimator.name={name}"])


@pytest.mark.parametrize("key", ["invalid_tool_call_advantage", "malformed_thinking_advantage"])
def test_fixed_advantages_of_tokens_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is an advantage of tokens. Use 0."):
        load_config(CONFIGS / "grpo_math_cpu.yaml", [ONE, f"grpo.{key}=-1"])


def test_engines_of_a_runner_do_not_leave() -> None:
    with pytest.raises(ConfigError, match="none can leave or join"):
        load_config(CONFIGS / "grpo_math_cpu.yaml", [ONE, "policy.generation.num_engines_file=engines.txt"])


@pytest.mark.parametrize(
    ("file", "schema"),
    [
        ("distillation_math_cpu.yaml", DistillationMasterConfig),
        ("sft_cpu.yaml", SFTMasterConfig),
        ("evals/eval_cpu.yaml", EvalMasterConfig),
    ],
)
def test_only_grpo_has_runners(file: str, schema: type[DistillationMasterConfig]) -> None:
    with pytest.raises(ConfigError, match=r"cluster.rollout_runners=1 works with GRPO only. Use 0."):
        load_config(CONFIGS / file, [ONE], schema=schema)
