"""The rules on `cluster.rollout_runners`: what needs tokens in the driver is refused."""

from pathlib import Path

import pytest

from nemo_rl.config import DistillationMasterConfig, load_config
from nemo_rl.utils.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[3] / "examples/configs"
ONE = "cluster.rollout_runners=1"


def test_the_driver_plays_rollouts_unless_asked_and_one_runner_is_accepted() -> None:
    assert load_config(CONFIGS / "grpo_math_cpu.yaml").cluster.rollout_runners == 0
    for mode in ("none", "stream"):
        assert load_config(CONFIGS / "grpo_math_cpu.yaml", [ONE, f"grpo.overlap.mode={mode}"])


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("grpo.overlap.mode=ahead", "stores groups in checkpoints"),
        ("policy.train_global_batch_size=32", "several updates of the 64 answers"),
        ("grpo.adv_estimator.name=reinforce_plus_plus", "has advantages of tokens"),
        ("grpo.seq_logprob_error_threshold=2.0", "needs log-probabilities"),
        ("loss_fn.reference_policy_kl_penalty=0.1", "needs log-probabilities"),
    ],
)
def test_what_needs_tokens_in_the_driver_is_refused(override: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)cluster.rollout_runners=1 keeps tokens out.*{reason}"):
        load_config(CONFIGS / "grpo_math_cpu.yaml", [ONE, override])


def test_engines_of_a_runner_do_not_leave() -> None:
    with pytest.raises(ConfigError, match="none can leave or join"):
        load_config(CONFIGS / "grpo_math_cpu.yaml", [ONE, "policy.generation.num_engines_file=engines.txt"])


def test_distillation_has_no_runners() -> None:
    with pytest.raises(ConfigError, match="works with GRPO only"):
        load_config(CONFIGS / "distillation_math_cpu.yaml", [ONE], schema=DistillationMasterConfig)
