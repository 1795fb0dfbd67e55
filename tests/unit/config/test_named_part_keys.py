"""Keys that choose a part of a run by name: built-in names, dotted paths, and arguments of a user's class."""

from pathlib import Path

import pytest

from nemo_rl.config import load_config
from nemo_rl.config.loading.algorithms import ALGORITHMS
from nemo_rl.utils.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
FILES = {
    "grpo": "grpo_math_cpu.yaml",
    "ppo": "ppo_math_cpu.yaml",
    "sft": "sft_cpu.yaml",
    "dpo": "dpo_cpu.yaml",
    "rm": "rm_cpu.yaml",
    "distillation": "distillation_math_cpu.yaml",
}


def load(algorithm: str, *overrides: str):
    return load_config(ROOT / "examples/configs" / FILES[algorithm], overrides, ALGORITHMS[algorithm])


@pytest.mark.parametrize("algorithm", FILES)
def test_every_algorithm_takes_a_loss_by_dotted_path(algorithm):
    config = load(algorithm, "loss_fn.name=my_package.my_loss.MyLoss", "loss_fn.kwargs={scale: 2.0}")
    assert (config["loss_fn"].name, config["loss_fn"].kwargs) == ("my_package.my_loss.MyLoss", {"scale": 2.0})
    assert "loss_fn" in config.named_parts


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [
        *(("grpo", "clipped_pg"), ("ppo", "clipped_pg"), ("sft", "nll"), ("dpo", "dpo"), ("rm", "preference")),
        ("distillation", "distillation"),
    ],
)
def test_every_algorithm_names_its_own_loss(algorithm, name):
    assert load(algorithm)["loss_fn"].name == load(algorithm, f"loss_fn.name={name}")["loss_fn"].name == name


@pytest.mark.parametrize(
    ("algorithm", "override", "message"),
    [
        (
            "grpo",
            "loss_fn.name=nll",
            r"loss_fn.name='nll' .* no such name\. Allowed: clipped_pg or the dotted path",
        ),
        (
            "grpo",
            "grpo.adv_estimator.name=grop",
            r"no such name \(did you mean 'grpo'\?\)\. Allowed: grpo or dr_grpo or",
        ),
        ("grpo", "grpo.rollout_source.name=replay", "Allowed: fresh or dynamic_sampling or the dotted path of a class"),
        (
            "grpo",
            "loss_fn.kwargs={a: 1}",
            "loss_fn.kwargs={'a': 1} are arguments of a class of your own, and loss",
        ),
        ("sft", "loss_fn.kwargs={a: 1}", "loss_fn.kwargs={'a': 1} are arguments of a class of your own"),
        (
            "grpo",
            "policy.generation.engine_kwargs={a: 1}",
            "engine_kwargs={'a': 1} are arguments of an engine of your",
        ),
        ("distillation", "distillation.rollout_source.name=dynamic_sampling", "distillation trains without rewards"),
    ],
)
def test_names_and_arguments_that_do_not_go_together_are_refused(algorithm, override, message):
    with pytest.raises(ConfigError, match=message):
        load(algorithm, override)


def test_dynamic_sampling_has_two_spellings():
    by_name = load("grpo", "grpo.rollout_source.name=dynamic_sampling")
    assert by_name.grpo.use_dynamic_sampling
    assert not load("grpo").grpo.use_dynamic_sampling


def test_arguments_follow_other_keys_by_interpolation():
    config = load(
        "grpo",
        "grpo.adv_estimator.name=my_package.MyEstimator",
        "+grpo.adv_estimator.kwargs.groups=${grpo.num_generations_per_prompt}",
    )
    assert config.grpo.adv_estimator.kwargs == {"groups": config.grpo.num_generations_per_prompt}
