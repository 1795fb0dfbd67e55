"""From files to typed sections: unknown keys, types, features that do not exist yet, building in code."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from config_helpers import with_values

from nemo_rl.config import (
    REPOSITORY_ROOT,
    RESPONSE_DATASET_NAMES,
    ClippedPGLossConfig,
    ClusterConfig,
    DataConfig,
    GenerationConfig,
    GRPOConfig,
    GRPOMasterConfig,
    MathEnvironmentConfig,
    PolicyConfig,
    SchedulerConfig,
    SchedulerMilestones,
    Section,
    SFTMasterConfig,
    find_path,
    load_config,
    save_resolved,
)
from nemo_rl.config.schema.model.parallel import DTensorConfig
from nemo_rl.utils.errors import ConfigError


def test_importing_config_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys, nemo_rl.config, nemo_rl.utils.config\n"
        "assert not {'torch', 'ray', 'transformers', 'datasets', 'numpy'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY_ROOT, check=True)


@pytest.mark.parametrize(
    ("content", "near"),
    [
        (with_values(grpo={"num_prompt_per_step": 4}), "Did you mean 'grpo.num_prompts_per_step'?"),
        (with_values(polcy={"precision": "float32"}), "'polcy'. Did you mean 'policy'?"),
        (with_values(grpo={"max_total_sequence_length": 4}), "Did you mean 'policy.max_total_sequence_length'?"),
        (with_values(env={"math": {"num_worker": 4}}), "Did you mean 'env.math.num_workers'?"),
        (with_values(data={"train": [{"dataset_name": "gsm8k", "splitt": "x"}]}), "Did you mean 'data.train.0.split'?"),
        (with_values(cluster={"zzzzzz": 1}), "'cluster.zzzzzz'. Keys of cluster: agent_endpoint, device"),
    ],
)  # fmt: skip
def test_unknown_keys_name_file_key_and_nearest(write_yaml, content: dict, near: str) -> None:
    path = write_yaml("typo.yaml", content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(path) in str(caught.value) and near in str(caught.value)


def test_an_unknown_key_names_the_file_that_holds_it_not_its_child(write_yaml) -> None:
    parent = write_yaml("parent.yaml", with_values(grpo={"sed": 1}))
    child = write_yaml("child.yaml", {"defaults": "parent.yaml"})
    with pytest.raises(ConfigError) as caught:
        load_config(child)
    assert str(parent) in str(caught.value) and str(child) not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("dataset_name", "data.train.dataset_name"),
        ("prompt_file", "data.default.prompt_file"),
        ("val_dataset_name", "data.validation.dataset_name"),
        ("train_data_path", "data.train.data_path"),
    ],
)
def test_flat_data_keys_are_refused_with_their_new_path(write_yaml, key: str, place: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.{key}.*write {place}"):
        # next to data.train a name has no effect, in NeMo RL too
        train = {"train": None} if key == "dataset_name" else {}
        load_config(write_yaml("old.yaml", with_values(data={key: "x", **train})))


@pytest.mark.parametrize(
    "override",
    [
        "policy.megatron_cfg.peft.lora_B_init_method=xavier",
        "policy.megatron_cfg.fp8_cfg.fp8_param=true",
        "policy.megatron_cfg.moe_token_dispatcher_type=flex",
        "policy.megatron_cfg.scheduler.lr_decay_style=WSD",
        "policy.megatron_cfg.distributed_data_parallel_config.use_custom_fsdp=true",
        "policy.generation.backend=trtllm",
        "policy.precision=fp8",
        "data.use_multiple_dataloader=true",
        "checkpointing.model_save_format=torch_save",
    ],
)
def test_features_that_do_not_exist_are_refused(minimal: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="not built yet") as caught:
        load_config(minimal, [override])
    assert override.partition("=")[0].lstrip("+").removesuffix(".enabled") in str(caught.value)


@pytest.mark.parametrize("name", ["gae", "raw", "raw_reward"])
def test_estimators_of_ppo_are_no_estimators_of_grpo(minimal: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"adv_estimator.name=.*no such name\. Allowed: grpo or"):
        load_config(minimal, [f"grpo.adv_estimator.name={name}"])


def test_a_dual_clip_without_a_ratio_gives_a_notice(minimal: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "nemo_rl.config"):
        load_config(minimal, ["loss_fn.disable_ppo_ratio=true", "loss_fn.ratio_clip_c=3"])
    assert "loss_fn.ratio_clip_c (only with disable_ppo_ratio=false)" in caplog.text


def test_disabled_features_and_meaningless_keys_are_accepted(write_yaml) -> None:
    content = with_values(
        grpo={"async_grpo": {"enabled": False, "max_trajectory_age_steps": 1}},
        policy={
            "megatron_cfg": {
                "enabled": False,
                "tensor_model_parallel_size": 4,
                "optimizer": {"lr": 5e-6, "clip_grad": "${policy.max_grad_norm}"},
            },
            "draft": None,
            "dtensor_cfg": {"_v2": True, "lora_cfg": {"enabled": False, "dim": 8}, "automodel_kwargs": {}},
            "generation": {"vllm_cfg": {"use_deep_gemm": False, "load_format": "dummy"}, "port_range_low": 3000},
        },
        data_plane={"enabled": False, "backend": "simple"},
        reward_penalties={"penalize_empty_final_answer": False, "token_ids": None},
        env={"should_use_nemo_gym": False},
    )
    config = load_config(write_yaml("upstream.yaml", content))
    assert config.policy.backend_section is config.policy.dtensor_cfg
    assert config.policy.megatron_cfg.tensor_model_parallel_size == 4
    assert config.policy.dtensor_cfg == DTensorConfig()
    assert set(config.env) == {"math"}


def test_type_errors_say_value_type_and_source(write_yaml) -> None:
    path = write_yaml("types.yaml", with_values(grpo={"num_prompts_per_step": "many"}))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = str(caught.value)
    assert f"grpo.num_prompts_per_step='many' (set by {path})" in message
    assert "Allowed: int > 0 and <= 10^6." in message


def test_a_wrong_value_is_reported_once_where_it_is_written(minimal: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(minimal, ["policy.max_total_sequence_length=abc"])
    assert str(caught.value).count("\n") == 0
    assert str(caught.value).startswith("policy.max_total_sequence_length='abc' (set by the override")


def test_missing_and_unresolvable_values_are_refused(write_yaml, minimal: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.model_name has no value\. Write it"):
        load_config(write_yaml("none.yaml", {"grpo": {"seed": 1}}))
    with pytest.raises(ConfigError, match=r"grpo\.seed has no value \(.*open\.yaml leaves it open\)"):
        load_config(write_yaml("open.yaml", with_values(grpo={"seed": "???"})))
    with pytest.raises(ConfigError, match=r"grpo\.seed \(set by the override .* cannot be worked out.*policy\.nope"):
        load_config(minimal, ["grpo.seed=${policy.nope}"])


@pytest.mark.parametrize(
    ("name", "example"),
    [
        ("val_reward", "val:accuracy"),
        ("accuracy", "val:accuracy"),
        ("val:", "val:accuracy"),
        ("''", "val:accuracy"),
        ("validation:accuracy", "val:accuracy"),
        ("val_truncation_rate", "val:truncation_rate"),
    ],
)
def test_a_metric_name_needs_the_prefix_train_or_val(minimal: Path, name: str, example: str) -> None:
    with pytest.raises(ConfigError, match=rf"val:<name> or train:<name>, for example {example}\.$"):
        load_config(minimal, [f"checkpointing.metric_name={name}"])


def test_the_example_of_a_metric_is_one_of_the_algorithm() -> None:
    with pytest.raises(ConfigError, match=r"for example val:val_loss\.$"):
        load_config("sft_cpu.yaml", ["checkpointing.metric_name=loss"], schema=SFTMasterConfig)


@pytest.mark.parametrize("name", ["null", "val:accuracy", "train:loss"])
def test_metric_names_with_a_prefix_load(minimal: Path, name: str) -> None:
    config = load_config(minimal, [f"checkpointing.metric_name={name}"])
    assert config.checkpointing.metric_name == (None if name == "null" else name)


def test_a_scheduler_may_be_one_entry_or_a_list(write_yaml) -> None:
    one = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"total_iters": 5}}
    listed = [one, {"name": "torch.optim.lr_scheduler.ConstantLR"}, {"milestones": [5]}]
    config = load_config(write_yaml("s.yaml", with_values(policy={"scheduler": listed})))
    assert config.policy.scheduler == [
        SchedulerConfig(**one),
        SchedulerConfig(name="torch.optim.lr_scheduler.ConstantLR"),
        SchedulerMilestones(milestones=[5]),
    ]
    single = load_config(write_yaml("s.yaml", with_values(policy={"scheduler": one})))
    assert single.policy.scheduler == SchedulerConfig(**one)
    for wrong in ([one, {"milestones": [5]}], [one, one, {"milestones": []}], [{"milestones": [5]}], [one, one]):
        with pytest.raises(ConfigError, match="one milestone fewer"):
            load_config(write_yaml("s.yaml", with_values(policy={"scheduler": wrong})))


def test_data_entries_inherit_from_default(write_yaml, tmp_path: Path) -> None:
    prompt = tmp_path / "p.txt"
    prompt.write_text("{}")
    data = {
        "train": [{"dataset_name": "gsm8k", "prompt_file": None}, {"dataset_name": "squad"}],
        "validation": {"dataset_name": "gsm8k", "split": "test"},
        "default": {"prompt_file": str(prompt), "input_key": "q"},
    }
    config = load_config(write_yaml("d.yaml", with_values(data=data)))
    first, second = config.data.train_entries
    assert (first.prompt_file, second.prompt_file) == (None, str(prompt))
    assert {e.input_key for e in (first, second, *config.data.validation_entries)} == {"q"}
    assert config.data.validation_entries[0].split == "test"


def test_environment_sections_get_the_type_of_their_name(write_yaml) -> None:
    own = {"num_workers": 2, "anything": [1, {"a": None}]}
    content = with_values(env={"math": {"num_workers": 3}, "mine": own}, data={"default": {"env_name": "mine"}})
    env = load_config(write_yaml("e.yaml", content)).env
    assert env["math"] == MathEnvironmentConfig(num_workers=3, timeout_s=10.0)
    assert env["mine"] == {"num_workers": 2, "anything": [1, {"a": None}]}


def test_sections_built_in_code_have_their_derived_defaults() -> None:
    policy = PolicyConfig.build(model_name="gpt2", train_micro_batch_size=2, generation={"temperature": 0.5})
    assert policy.logprob_batch_size == 2
    assert policy.dynamic_batching.train_mb_tokens == 2 * 512
    assert policy.generation is not None and policy.generation.val_temperature == 0.5
    assert policy == PolicyConfig(model_name="gpt2", train_micro_batch_size=2, generation={"temperature": 0.5})
    assert GRPOConfig(normalize_rewards=False).adv_estimator.normalize_rewards is False
    assert GRPOConfig().reward_shaping.max_response_length is None
    assert GenerationConfig(max_new_tokens=4, vllm_cfg={"max_model_len": 8, "precision": "float32"}).val_top_p == 1.0
    data = DataConfig.build(train={"dataset_name": "gsm8k"}, default={"input_key": "q"})
    assert (data.train_entries[0].input_key, data.max_input_seq_length) == ("q", None)
    assert ClusterConfig(device="cpu", gpus_per_node=4).policy_ranks_per_node == 1
    assert ClusterConfig(gpus_per_node=4).policy_ranks_per_node == 4


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (PolicyConfig, {}, "model_name: Field required"),
        (PolicyConfig, {"model_name": "a", "foo": 1}, "foo: Extra inputs"),
        (GenerationConfig, {}, "follows a key outside this section"),
        (ClippedPGLossConfig, {"ratio_clip_c": 1.0}, "ratio_clip_c"),
        (ClippedPGLossConfig, {"ratio_clip_min": -0.1}, "ratio_clip_min"),
    ],
)
def test_building_a_section_in_code_reports_config_errors(section: type[Section], values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        section.build(**values)


def test_a_config_loads_with_the_schema_of_another_algorithm(write_yaml) -> None:
    class TeacherMasterConfig(Section):
        """Two policies under their own names."""

        policy: PolicyConfig
        teacher: PolicyConfig

    path = write_yaml(
        "t.yaml", {"policy": {"model_name": "a"}, "teacher": {"model_name": "b", "train_micro_batch_size": 7}}
    )
    config = load_config(path, ["teacher.max_total_sequence_length=10"], TeacherMasterConfig)
    assert config.teacher.tokenizer.name == "b"
    assert config.teacher.sequence_packing.logprob_mb_tokens == 70
    assert config.policy.sequence_packing.logprob_mb_tokens == 4 * 512


def test_saved_configs_read_back_equal(minimal: Path, tmp_path: Path) -> None:
    config = load_config(minimal, ["+policy.optimizer.kwargs.x=1e-4", "policy.generation.stop_strings=['$']"])
    target = tmp_path / "out" / "config.yaml"
    save_resolved(config, target)
    assert load_config(target) == config
    assert "${" not in target.read_text()
    config.policy.tokenizer.chat_template = "{{ x }} ${not_a_key}"
    save_resolved(config, target)
    assert load_config(target).policy.tokenizer.chat_template == "{{ x }} ${not_a_key}"


def test_paths_are_searched_in_the_current_folder_then_the_repository(tmp_path: Path, monkeypatch, write_yaml) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_path("examples/prompts/cot.txt") == REPOSITORY_ROOT / "examples/prompts/cot.txt"
    mine = write_yaml("examples/prompts/cot.txt", "mine {}")
    assert find_path("examples/prompts/cot.txt") == mine
    assert find_path("no/such/file") is None
    content = with_values(data={"default": {"prompt_file": "examples/prompts/cot.txt"}})
    config = load_config(write_yaml("p.yaml", content))
    assert config.data.train_entries[0].prompt_file == str(mine)


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY_ROOT / "examples" / "configs").glob("grpo*.yaml")), ids=lambda p: p.name
)
def test_every_grpo_example_loads(path: Path) -> None:
    assert isinstance(load_config(path), GRPOMasterConfig)


def test_the_1b_example_has_its_documented_defaults() -> None:
    config = load_config("examples/configs/grpo_math_1B.yaml")
    assert (config.policy.model_name, config.cluster.device, config.cluster.gpus_per_node) == (
        "Qwen/Qwen2.5-1.5B",
        "cuda",
        1,
    )
    assert config.data.train_entries[0].dataset_name == "OpenMathInstruct-2"
    assert (config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt) == (32, 16)
    assert config.checkpointing.metric_name == "val:accuracy"
    prompt = Path(str(config.data.train_entries[0].prompt_file)).read_text()
    assert prompt.format("2+2") != prompt and r"\boxed{}" in prompt.format("2+2")


def test_allowed_data_set_names_are_the_registered_ones() -> None:
    from nemo_rl.data.datasets.response_datasets import DATASET_REGISTRY

    assert set(RESPONSE_DATASET_NAMES) == set(DATASET_REGISTRY)


def test_a_reward_model_cannot_be_trained_with_grpo(minimal: Path) -> None:
    with pytest.raises(ConfigError, match="cannot sample answers"):
        load_config(minimal, ["policy.reward_model_cfg.enabled=true"])
