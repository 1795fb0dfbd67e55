"""The PPO configuration: the critic follows the policy where it should, and rules between keys hold."""

import logging
import re
from operator import attrgetter
from pathlib import Path

import pytest
import yaml

from nemo_rl.config import REPOSITORY_ROOT, GRPOMasterConfig, PPOMasterConfig, load_config
from nemo_rl.config.loading.algorithms import algorithm_of
from nemo_rl.config.loading.all_errors import collect_errors
from nemo_rl.utils.errors import ConfigError

CONFIGS = REPOSITORY_ROOT / "examples/configs"
CPU = CONFIGS / "ppo_math_cpu.yaml"
SHAPES = Path(__file__).parent / "nemo_rl"
GSPO = ("loss_fn.sequence_level_importance_ratios=true", "loss_fn.token_level_loss=false")


def load(*overrides: str) -> PPOMasterConfig:
    return load_config(CPU, overrides, schema=PPOMasterConfig)


def test_the_file_of_nemo_rl_has_its_values() -> None:
    config = load_config(CONFIGS / "ppo_math_1B.yaml", schema=PPOMasterConfig)
    assert algorithm_of(CONFIGS / "ppo_math_1B.yaml") == "ppo"
    ppo, estimator = config.ppo, config.ppo.adv_estimator
    assert (ppo.num_prompts_per_step, ppo.num_generations_per_prompt, ppo.ppo_epochs) == (32, 16, 4)
    assert (ppo.max_num_steps, ppo.max_num_epochs, ppo.val_period, ppo.val_at_start) == (100_000, 100_000, 20, True)
    assert (estimator.name, estimator.gae_gamma, estimator.gae_lambda) == ("gae", 1.0, 0.95)
    assert (estimator.gae_lambda_policy, estimator.gae_lambda_value, estimator.length_adaptive_alpha) == (None, None, 0)
    assert (ppo.policy_training_start_step, estimator.normalize_advantages) == (0, True)
    assert (config.value_loss_fn.scale, config.value_loss_fn.cliprange) == (0.4, 0.2)
    assert (type(config.value_loss_fn)().scale, type(config.value_loss_fn)().cliprange) == (1.0, None)


def test_the_critic_follows_the_policy_and_may_differ() -> None:
    config = load(
        "policy.max_total_sequence_length=96", "~value.train_global_batch_size", "~value.train_micro_batch_size"
    )
    value = config.value
    assert (value.model_name, value.precision, value.max_total_sequence_length) == (
        config.policy.model_name,
        "float32",
        96,
    )
    assert value.reward_model_cfg.enabled and value.tokenizer.name == value.model_name
    assert (value.train_global_batch_size, value.train_micro_batch_size) == (64, 64)
    assert {name: role.trains for name, role in config.models.items()} == {"policy": True, "value": True}
    other = load("value.model_name=examples/assets/tiny-teacher", "value.optimizer.kwargs.lr=1.0e-3").value
    assert other.model_name.endswith("tiny-teacher") and other.optimizer is not None
    assert other.optimizer.kwargs["lr"] == 1e-3


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ("value.train_global_batch_size=48", "value.train_micro_batch_size=48"),
            r"16 x ppo.num_generations_per_prompt=4 = 64 samples do not divide .* Nearest values: 32, 64",
        ),
        (("policy.train_global_batch_size=48",), "ppo.num_prompts_per_step=16 x ppo.num_generations_per_prompt=4"),
        (("ppo.policy_training_start_step=30",), "trains only the critic in all of the ppo.max_num_steps=30"),
        (
            ("ppo.adv_estimator.name=raw_reward", "ppo.adv_estimator.bootstrap_truncated=true"),
            "raw_reward uses no values",
        ),
        (
            ("ppo.overlong_filtering=true", "ppo.adv_estimator.bootstrap_truncated=true"),
            "ppo.overlong_filtering=true leaves them out of the loss. Set one of them to false",
        ),
        (GSPO, "only the mean of its advantages would count, but ppo.adv_estimator.name=gae gives each token its own"),
        ((*GSPO, "ppo.adv_estimator.name=raw_reward", "ppo.adv_estimator.gae_gamma=0.9"), "gae_gamma=0.9 gives each"),
        (("ppo.adv_estimator.gae_lambda=1.5",), "gae_lambda"),
        (("loss_fn.force_on_policy_ratio=true",), r"x ppo.ppo_epochs=2 = 2 updates.*and ppo.ppo_epochs=1"),
        (("loss_fn.reference_policy_kl_penalty=0.1",), "ppo.skip_reference_policy_logprobs_calculation=true"),
        (("ppo.reward_scaling.source_max=0.0",), "ppo.reward_scaling.source_min=0 must be below"),
        (
            ("ppo.num_generations_per_prompt=1", "ppo.num_prompts_per_step=64", "ppo.use_dynamic_sampling=true"),
            "ppo.use_dynamic_sampling=true drops all prompts",
        ),
        (("cluster.rollout_runners=1",), "works with GRPO only"),
        (("logger.record_steps=true",), "record_steps"),
        (("value.max_total_sequence_length=64",), "the value could not read the longest answers"),
        (("ppo.adv_estimator.name=vtrace",), "name"),
    ],
)
def test_contradictions_are_refused(overrides: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){told}"):
        load(*overrides)


def test_one_answer_per_prompt_is_enough() -> None:
    config = load("ppo.num_prompts_per_step=64", "ppo.num_generations_per_prompt=1")
    assert config.updates_per_step == 2


def test_the_section_of_nemo_rl_lets_sampling_run_ahead() -> None:
    asked = ("ppo.async_ppo.enabled=true", "ppo.async_ppo.max_trajectory_age_steps=2")
    overlap = load(*asked, "ppo.async_ppo.in_flight_weight_updates=true").ppo.overlap
    assert (overlap.mode, overlap.max_age_steps, overlap.in_flight_weight_updates) == ("ahead", 2, True)
    assert load().ppo.overlap.mode == "none"


def test_gspo_works_where_all_tokens_of_an_answer_have_one_advantage() -> None:
    assert load(*GSPO, "ppo.adv_estimator.name=raw_reward").loss_fn.sequence_level_importance_ratios


RAW, ALPHA, OF_POLICY, OF_CRITIC = (
    f"ppo.adv_estimator.{text}"
    for text in ("name=raw_reward", "length_adaptive_alpha=0.05", "gae_lambda_policy=0.9", "gae_lambda_value=1")
)
NO_LAMBDA = "name=raw_reward has no lambda of the policy"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ((ALPHA, OF_POLICY), {"gae_lambda_policy": "length_adaptive_alpha sets the policy's lambda"}),
        ((RAW, ALPHA, OF_POLICY), {"length_adaptive_alpha": NO_LAMBDA, "gae_lambda_policy": NO_LAMBDA}),
        *(
            ((own, OF_CRITIC), {"gae_lambda": "policy and critic have lambdas of their own"})
            for own in (OF_POLICY, ALPHA, RAW)
        ),
        ((OF_POLICY,), {}),
        ((OF_CRITIC,), {}),
        ((RAW,), {}),
    ],
)
def test_keys_without_effect_are_told(
    overrides: tuple[str, ...], told: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "nemo_rl.config"):
        load("ppo.adv_estimator.gae_lambda=0.9", *overrides)
    assert dict(re.findall(r"ppo\.adv_estimator\.(\w+) \(([^)]*)\)", caplog.text)) == told


def test_dynamic_sampling_may_be_named() -> None:
    assert load("ppo.rollout_source.name=dynamic_sampling").ppo.use_dynamic_sampling


WANTED = {
    "a small model for mathematics": {"ppo.ppo_epochs": 4, "cluster.gpus_per_node": 8},
    "a larger model on two nodes": {"value.dtensor_cfg.tensor_parallel_size": 4},
    "Megatron for both models": {"value.megatron_cfg.optimizer.lr": 5e-6, "value.backend_key": "megatron_cfg"},
    "pipelines of Megatron without packing": {"value.megatron_cfg.pipeline_model_parallel_size": 2},
    "asynchronous with engines of their own": {"ppo.overlap.mode": "ahead", "ppo.overlap.max_age_steps": 1},
    "asynchronous with truncated weights and a critic that starts first": {"ppo.overlap.max_age_steps": 4},
    "raw rewards": {"ppo.adv_estimator.name": "raw_reward", "value_loss_fn.cliprange": None},
    "VAPO": {"ppo.adv_estimator.length_adaptive_alpha": 0.05, "ppo.policy_training_start_step": 50},
    "a game of several turns": {"ppo.max_rollout_turns": 50},
    "dynamic sampling with a KL penalty and a critic from a reward model": {"value.model_name": "a/reward-model"},
}


@pytest.mark.parametrize("shape", WANTED)
def test_a_shape_of_nemo_rls_configurations_loads(shape: str, tmp_path: Path) -> None:
    changes = yaml.safe_load((SHAPES / "ppo_shapes.yaml").read_text())
    assert changes.keys() == WANTED.keys()
    path = tmp_path / "shape.yaml"
    path.write_text(yaml.safe_dump({"defaults": str(SHAPES / "ppo.yaml")} | changes[shape]))
    assert collect_errors(path, algorithm_of(path)) == []
    config = load_config(path, schema=PPOMasterConfig)
    assert {key: attrgetter(key)(config) for key in WANTED[shape]} == WANTED[shape]


def test_a_program_for_grpo_refuses_the_sections_of_ppo() -> None:
    with pytest.raises(ConfigError, match="unknown key 'ppo'"):
        load_config(CPU, schema=GRPOMasterConfig)
