"""Keys of reward models: types, attributes, data sets of each type, adapters, and the environment's keys."""

import pytest

from nemo_rl.config import GRPOMasterConfig, PPOMasterConfig, RMMasterConfig, load_config
from nemo_rl.utils.errors import ConfigError

CPU = "examples/configs/rm_cpu.yaml"
REGRESSION = ("policy.reward_model_cfg.reward_model_type=regression", "policy.reward_model_cfg.attributes=[a, b]")
SCORED = (
    *REGRESSION,
    "data.train.dataset_name=arithmetic_scores",
    "data.validation.dataset_name=arithmetic_scores",
)
STEPS = (
    "policy.reward_model_cfg.reward_model_type=process",
    "data.train.dataset_name=arithmetic_steps",
    "data.validation.dataset_name=arithmetic_steps",
)


def loaded(*overrides, file=CPU):
    return load_config(file, overrides, schema=RMMasterConfig)


def test_each_type_has_its_rows_and_data():
    assert loaded().rows_of("policy") == 2
    scored = loaded(*SCORED, "rm.attribute_weights={b: 0.5}", "rm.min_score=0", "rm.max_score=4")
    assert scored.rows_of("policy") == 1 and scored.head.attributes == ["a", "b"]
    assert loaded(*STEPS, "rm.step_separator=' => '").rm.step_separator == " => "


@pytest.mark.parametrize("key", ["policy.dtensor_cfg.lora_cfg", "policy.megatron_cfg.peft"])
def test_reward_models_have_adapters(key):
    megatron = ("policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true")
    config = loaded(f"{key}.enabled=true", *(megatron if "megatron" in key else ()))
    assert config.policy.adapter_keys == [key.removeprefix("policy.")]


def test_critics_have_adapters():
    overrides = ("value.dtensor_cfg.lora_cfg.enabled=true",)
    config = load_config("examples/configs/ppo_math_cpu.yaml", overrides, schema=PPOMasterConfig)
    assert config.value.adapter_keys == ["dtensor_cfg.lora_cfg"]
    attributes = ("value.reward_model_cfg.attributes=[a, b]",)
    config = load_config("examples/configs/ppo_math_cpu.yaml", attributes, schema=PPOMasterConfig)
    assert config.value.reward_model_cfg.attributes == []


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (REGRESSION, "arithmetic_preference"),
        (STEPS[:1], "arithmetic_preference"),
        (("policy.reward_model_cfg.attributes=[a]",), r"are scores of reward_model_type=regression, not of bradley_te"),
        ((*SCORED, "policy.reward_model_cfg.attributes=[]"), "attributes is empty"),
        ((*SCORED, "policy.reward_model_cfg.attributes=[a, a]"), "names a twice"),
        ((*SCORED, "policy.reward_model_cfg.attributes=[a, b_max]"), "would be taken for a minimum or maximum"),
        ((*SCORED, "policy.reward_model_cfg.attributes=['a b']"), "attributes.0"),
        ((*SCORED, "rm.attribute_weights={helpful: 1}"), r"rm.attribute_weights.helpful is the weight of no score"),
        ((*SCORED, "rm.attribute_weights={a: 0, b: 0}"), "the weight 0 for every score"),
        ((*SCORED, "rm.attribute_weights={a: -1}"), "greater than or equal to 0"),
        ((*SCORED, "rm.min_score=4", "rm.max_score=4"), "rm.min_score=4 is not less than rm.max_score=4"),
        (
            (*SCORED, "rm.margin=0.5"),
            "rm.margin=0.5 belongs to policy.reward_model_cfg.reward_model_type=bradley_terry",
        ),
        ((*SCORED, "rm.step_separator=x"), "rm.step_separator='x' belongs to"),
        ((*STEPS, "rm.max_score=4"), "rm.max_score=4.0 belongs to .*regression, and this run has process"),
        (("rm.attribute_weights={a: 1}",), "belongs to .*regression, and this run has bradley_terry"),
        ((*STEPS, "data.train.margin_key=m"), "margin_key=m has no meaning"),
        ((*STEPS, "data.add_eos=false"), "data.add_eos=false has no meaning"),
        (("policy.reward_model_cfg.enabled=false",), "run_rm.py trains a head for scores"),
        (("policy.reward_model_cfg.reward_model_type=ranking",), "reward_model_type"),
    ],
)
def test_keys_that_do_not_fit_the_type_are_refused(overrides, reason):
    with pytest.raises(ConfigError, match=reason):
        loaded(*overrides)


ENVIRONMENT = ("data.default.env_name=reward_model",)


def environment(**keys):
    given = {"model_name": "examples/assets/tiny-chat", "max_model_len": 32, "batch_size": 3, **keys}
    shown = ", ".join(f"{key}: {value}" for key, value in given.items())
    section = f"env.reward_model={{{shown}}}"
    overrides = (section, *ENVIRONMENT)
    return load_config("examples/configs/grpo_math_cpu.yaml", overrides, schema=GRPOMasterConfig).reward_model


def test_the_environment_packs_passes_or_gives_them_a_budget():
    section = environment().as_policy()
    assert section.sequence_packing.enabled and section.sequence_packing.logprob_mb_tokens == 96
    padded = environment(sequence_packing="{enabled: false}").as_policy()
    assert not padded.sequence_packing.enabled and padded.logprob_batch_size == 3
    budget = environment(sequence_packing="{enabled: false}", dynamic_batching="{enabled: true}").as_policy()
    assert budget.dynamic_batching.enabled and budget.dynamic_batching.logprob_mb_tokens == 96
    small = environment(sequence_packing="{logprob_mb_tokens: 40, share_prompts: false}").as_policy()
    assert small.sequence_packing.logprob_mb_tokens == 40 and not small.sequence_packing.share_prompts


def test_the_environment_can_use_megatron_core():
    section = environment(dtensor_cfg="{enabled: false}", megatron_cfg="{enabled: true}").as_policy()
    assert section.backend_key == "megatron_cfg"


def test_the_policy_section_of_the_environment_has_as_many_scores_as_the_model():
    section = environment()
    assert section.as_policy().reward_model_cfg.attributes == []
    assert section.as_policy(3).reward_model_cfg.attributes == ["LABEL_0", "LABEL_1", "LABEL_2"]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (
            {"reward_model_cfg": "{reward_model_type: process}", "attribute_weights": "{a: 1}"},
            "attribute_weights belong",
        ),
        ({"reward_model_cfg": "{reward_model_type: process}", "too_long": "keep_end"}, "would cut off steps"),
        ({"step_reward": "max"}, "step_reward"),
        ({"sequence_packing": "{enabled: true}", "dynamic_batching": "{enabled: true}"}, "exclude each other"),
        ({"megatron_cfg": "{enabled: true}"}, "megatron_cfg"),
    ],
)
def test_contradictions_of_the_environment_are_refused(keys, reason):
    with pytest.raises(ConfigError, match=reason):
        environment(**keys)
