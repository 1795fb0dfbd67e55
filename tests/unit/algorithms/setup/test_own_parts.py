"""Losses, estimators and sources of a user's own in a recipe, which starts nothing."""

from pathlib import Path

import pytest

from nemo_rl.algorithms import distillation, dpo, grpo, rm, sft
from nemo_rl.algorithms.rollout.source import DynamicSampling, drawn_prompts
from nemo_rl.algorithms.start import source_of
from nemo_rl.config import load_config
from nemo_rl.config.loading.algorithms import ALGORITHMS
from nemo_rl.utils.errors import ConfigError

ROOT = Path(__file__).resolve().parents[4]
HERE = __name__
FILES = {"grpo": "grpo_math_cpu.yaml", "sft": "sft_cpu.yaml", "dpo": "dpo_cpu.yaml", "rm": "rm_cpu.yaml"}
MODULES = {"grpo": grpo, "sft": sft, "dpo": dpo, "rm": rm, "distillation": distillation}


class ScaledLoss:
    def __init__(self, scale: float = 1.0):
        self.scale = scale

    def __call__(self, model_output, data, global_valid_seqs, global_valid_toks):
        return self.scale * model_output.sum(), {}


class TopEstimator:
    needs_logprobs = True

    def __init__(self, share: float):
        self.share = share

    def compute_advantage(self, prompt_ids, rewards, mask, **extras):
        return mask * self.share


class WrappingSource:
    def __init__(self, inner, depth: int = 1):
        self.inner, self.depth = inner, depth

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Inner:
    max_staleness = 0
    metrics: dict[str, float] = {}


def config_of(algorithm: str, *overrides: str):
    return load_config(ROOT / "examples/configs" / FILES[algorithm], overrides, ALGORITHMS[algorithm])


def recipe(algorithm: str, *overrides: str):
    return MODULES[algorithm].recipe(config_of(algorithm, *overrides))


@pytest.mark.parametrize(("algorithm", "rows_per_unit"), [("grpo", 1), ("sft", 1), ("dpo", 2), ("rm", 2)])
def test_a_loss_by_dotted_path_is_what_a_run_trains_on(algorithm, rows_per_unit):
    made = recipe(algorithm, f"loss_fn.name={HERE}.ScaledLoss", "loss_fn.kwargs={scale: 3}")
    assert isinstance(made.loss_fn, ScaledLoss)
    assert (made.loss_fn.scale, made.loss_fn.rows_per_unit) == (3.0, rows_per_unit)


def test_an_estimator_by_dotted_path_is_in_the_recipe():
    made = recipe("grpo", f"grpo.adv_estimator.name={HERE}.TopEstimator", "grpo.adv_estimator.kwargs={share: 0.1}")
    assert made.roles["policy"].keeps_reference, "the estimator needs log-probabilities of the reference"
    *_, credit = made.stages({"policy": None})
    assert credit.needs_logprobs


@pytest.mark.parametrize(("wraps_dynamic", "inner"), [("false", Inner), ("true", DynamicSampling)])
def test_a_source_by_dotted_path_wraps_the_configured_one(wraps_dynamic, inner):
    own = [f"grpo.rollout_source.name={HERE}.WrappingSource", "grpo.rollout_source.kwargs={depth: 2}"]
    source = source_of(config_of("grpo", *own, f"grpo.use_dynamic_sampling={wraps_dynamic}"), Inner())
    assert (type(source), source.depth, source.max_staleness) == (WrappingSource, 2, 0)
    assert type(source.inner) is inner


def test_dynamic_sampling_draws_more_prompts():
    more = ["grpo.num_prompts_per_step=8", "grpo.batch_multiplier=1.5", "policy.train_global_batch_size=8"]
    for switch, drawn in (("false", 8), ("true", 12)):
        assert drawn_prompts(config_of("grpo", *more, f"grpo.use_dynamic_sampling={switch}").grpo) == drawn


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"loss_fn.name={HERE}.WrappingSource", "is not a loss: it lacks the methods __call__ of"),
        (
            f"grpo.rollout_source.name={HERE}.ScaledLoss",
            "is not a rollout source: it lacks the methods next_groups",
        ),
        (f"grpo.adv_estimator.name={HERE}.ScaledLoss", "is not an advantage estimator: it lacks the methods compute_a"),
        (f"grpo.adv_estimator.name={HERE}.TopEstimator", "kwargs.share has no value, and TopEstimator needs it"),
        ("loss_fn.name=my_package.MyLoss", r"loss_fn.name='my_package.MyLoss' cannot be imported \(No module"),
    ],
)
def test_a_class_of_another_kind_is_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        recipe("grpo", override)


@pytest.mark.parametrize(
    ("part", "name", "kwargs", "message"),
    [
        (
            "loss_fn",
            "ScaledLoss",
            "{scal: 1}",
            "loss_fn.kwargs.scal is no argument of ScaledLoss. Did you mean 'scale'",
        ),
        ("grpo.adv_estimator", "TopEstimator", "{share: big}", "kwargs.share='big' does not fit TopEstimator"),
        ("grpo.rollout_source", "WrappingSource", "{deep: 1}", "kwargs.deep is no argument of WrappingSource"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(part, name, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        recipe("grpo", f"{part}.name={HERE}.{name}", f"{part}.kwargs={kwargs}")
