"""GRPO with a tiny mixture of experts in bfloat16, end to end on the CPU, with router replay and without."""

import importlib.util
from pathlib import Path

import pytest
from example_runs import StartExample, of_training, read_metrics
from tiny_models import save_mixture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra cpu or vllm"),
]

STEPS = (1, 2)
COMMON = (
    "grpo.max_num_steps=2",
    "grpo.val_at_start=false",
    "grpo.val_period=0",
    "checkpointing.enabled=false",
    "policy.precision=bfloat16",
    "policy.generation.weight_sync.max_mult_prob_error=null",
    "loss_fn.reference_policy_kl_penalty=0.01",
)
REPLAY = "policy.router_replay.enabled=true"


@pytest.mark.parametrize("more", [(), ("cluster.rollout_runners=1",)], ids=["driver", "runner"])
def test_replay_makes_engine_and_trainer_agree(
    start_example: StartExample, tmp_path: Path, more: tuple[str, ...]
) -> None:
    """Through a rollout runner, whose tokens and experts stay in the object store, as through the driver."""
    save_mixture(tmp_path / "model")
    model = f"policy.model_name={tmp_path / 'model'}"
    found = {}
    for name, overrides in (("replayed", (REPLAY,)), ("routed", ())):
        run = start_example("run_grpo.py", "grpo_math_cpu.yaml", model, *COMMON, *more, *overrides, logs=name)
        assert run.finish() == 0, run.log()[-3000:]
        found[name] = of_training(read_metrics(run.log_dir))
    errors = {
        name: [metrics["train", step, "token_mult_prob_error"] - 1 for step in STEPS] for name, metrics in found.items()
    }
    assert max(errors["replayed"]) < 0.5 * min(errors["routed"]), errors
    replayed = found["replayed"]
    shares = [replayed["train", step, "moe/replayed_token_share"] for step in STEPS]
    assert all(0.9 < share < 1.0 for share in shares), "all tokens but the last of each answer"
    assert [replayed["train", step, "moe/fallback_token_share"] for step in STEPS] == pytest.approx(
        [1 - share for share in shares]
    )
    assert ("train", 1, "moe/replayed_token_share") not in found["routed"]
    assert replayed["train", 1, "kl_penalty"] == pytest.approx(0.0, abs=1e-6), "the reference replays them too"
