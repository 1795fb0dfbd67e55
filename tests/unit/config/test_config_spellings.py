"""Keys of `engine` written under `vllm_cfg`, as NeMo RL does: in files, parents, overrides, interpolations and code."""

from pathlib import Path

import pytest

from nemo_rl.config import EngineConfig, GenerationConfig, GRPOMasterConfig, load_config
from nemo_rl.config.loading.algorithms import ALGORITHMS
from nemo_rl.utils.errors import ConfigError

BASE = Path(__file__).resolve().parents[3] / "examples/configs/grpo_math_cpu.yaml"


def load(tmp_path: Path, generation: str, *overrides: str, parent: str = str(BASE)) -> GRPOMasterConfig:
    file = tmp_path / "run.yaml"
    file.write_text(f"defaults: {parent}\npolicy:\n  generation:\n{generation}")
    return load_config(file, overrides, check=False)


def engine(config: GRPOMasterConfig) -> EngineConfig:
    assert config.policy.generation is not None
    return config.policy.generation.engine


@pytest.mark.parametrize("section", ["engine", "vllm_cfg"])
def test_either_section_means_the_same(tmp_path, section):
    lines = f"    {section}: {{max_model_len: 77, precision: bfloat16, gpu_memory_utilization: 0.3}}\n"
    lines += f"    max_new_tokens: ${{policy.generation.{section}.max_model_len}}\n"
    config = load(tmp_path, lines, f"policy.generation.{section}.kv_cache_memory_mb=5")
    read = engine(config)
    assert (read.max_model_len, read.precision, read.gpu_memory_utilization) == (77, "bfloat16", 0.3)
    assert read.kv_cache_memory_mb == 5
    assert config.policy.generation.max_new_tokens == 77


def test_the_defaults_that_follow_the_policy_do_so_under_either_name(tmp_path):
    config = load(tmp_path, "    vllm_cfg: {max_model_len: '${...max_total_sequence_length}'}\n")
    assert engine(config).max_model_len == config.policy.max_total_sequence_length


@pytest.mark.parametrize(("older", "newer"), [("engine", "vllm_cfg"), ("vllm_cfg", "engine")])
def test_the_later_file_or_override_wins_whichever_it_uses(tmp_path, older, newer):
    parent = tmp_path / "parent.yaml"
    parent.write_text(
        f"defaults: {BASE}\npolicy: {{generation: {{{older}: {{max_model_len: 70, env_vars: {{A: b}}}}}}}}"
    )
    lines = f"    {newer}: {{max_model_len: 80}}\n"
    assert engine(load(tmp_path, lines, parent=str(parent))).max_model_len == 80
    overridden = load(tmp_path, lines, f"policy.generation.{older}.max_model_len=90", parent=str(parent))
    assert (engine(overridden).max_model_len, engine(overridden).env_vars) == (90, {"A": "b"})
    whole = load(tmp_path, lines, "policy.generation.vllm_cfg={max_model_len: 60}", parent=str(parent))
    assert engine(whole).max_model_len == 60


def test_two_values_in_one_file_are_refused(tmp_path):
    both = "    vllm_cfg: {{max_model_len: 70}}\n    engine: {{max_model_len: {}}}\n"
    assert engine(load(tmp_path, both.format(70))).max_model_len == 70
    with pytest.raises(
        ConfigError, match=r"run.yaml: vllm_cfg.max_model_len=70 and engine.max_model_len=71 are the same"
    ):
        load(tmp_path, both.format(71))
    with pytest.raises(ValueError, match="are the same key"):
        GenerationConfig.build(max_new_tokens=4, vllm_cfg={"max_model_len": 8}, engine={"max_model_len": 9})


def test_a_value_that_is_no_section_is_refused_next_to_the_other_spelling(tmp_path):
    with pytest.raises(ConfigError, match=r"policy.generation.engine='hf' \(set by the override .*Allowed: section"):
        load(tmp_path, "    temperature: 1.0\n", "policy.generation.engine=hf")
    for wrong in ("5", "'${policy.generation.vllm_cfg}'"):
        with pytest.raises(ConfigError, match=r"run.yaml: unknown key 'policy.generation.vllm_cfg.max_model_len'"):
            load(tmp_path, f"    vllm_cfg: {{max_model_len: 70}}\n    engine: {wrong}\n")


def test_a_section_built_in_code_takes_either():
    config = GenerationConfig.build(max_new_tokens=4, vllm_cfg={"max_model_len": 8, "precision": "float32"})
    assert (config.engine.max_model_len, config.engine.precision) == (8, "float32")
    assert GenerationConfig.build(**config.model_dump()) == config


def test_a_misspelled_key_is_refused_with_the_right_one(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown key 'policy.generation.vllm_cfg.max_model_length'.*max_model_len'"):
        load(tmp_path, "    vllm_cfg: {max_model_length: 70}\n")


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("trtllm", "not built yet: the generation backend trtllm"),
        ("vlm", "vllm or hf or megatron or sglang or the dotted path of a class"),
        ("my_package.MyEngine", None),
    ],
)
def test_engines_by_name_or_path(tmp_path, backend, message):
    if message is None:
        assert load(tmp_path, "", f"policy.generation.backend={backend}").policy.generation.backend == backend
    else:
        with pytest.raises(ConfigError, match=message):
            load(tmp_path, "", f"policy.generation.backend={backend}")


@pytest.mark.parametrize("section", ["automodel_cfg", "dtensor_cfg"])
def test_the_training_backend_has_two_names_everywhere(tmp_path, section):
    file = tmp_path / "run.yaml"
    file.write_text(f"""\
defaults: {BASE}
policy:
  {section}: {{activation_checkpointing: true, lora_cfg: {{dim: 3}}}}
  make_sequence_length_divisible_by: ${{mul:2,${{policy.{section}.lora_cfg.dim}}}}
env:
  reward_model: {{model_name: m, {section}: {{cpu_offload: true}}}}
""")
    overrides = [f"policy.{section}.clear_cache_every_n_steps=3", f"policy={{{section}: {{keep_gathered: true}}}}"]
    config = load_config(file, [*overrides, f"~policy.{section}.clear_cache_every_n_steps"], check=False)
    backend = config.policy.dtensor_cfg
    assert (backend.activation_checkpointing, backend.lora_cfg.dim, backend.keep_gathered) == (True, 3, True)
    assert config.policy.make_sequence_length_divisible_by == 6
    assert config.env["reward_model"].dtensor_cfg.cpu_offload is True
    assert config.policy.automodel_cfg is backend and config["policy"]["automodel_cfg"] is backend
    assert "automodel_cfg" in config.policy and "automodel_cfg" not in config.policy.model_dump()


@pytest.mark.parametrize("section", ["teacher", "value"])
def test_the_other_models_have_both_names_too(section):
    schema, shape = {"teacher": ("distillation", "distillation"), "value": ("ppo", "ppo")}[section]
    path = Path(__file__).parent / "nemo_rl" / f"{shape}.yaml"
    config = load_config(path, [f"{section}.automodel_cfg.cpu_offload=true"], schema=ALGORITHMS[schema], check=False)
    assert config[section].dtensor_cfg.cpu_offload is True


@pytest.mark.parametrize(("older", "newer"), [("automodel_cfg", "dtensor_cfg"), ("dtensor_cfg", "automodel_cfg")])
def test_a_child_may_use_the_other_name_of_the_backend(tmp_path, older, newer):
    parent = tmp_path / "parent.yaml"
    parent.write_text(f"defaults: {BASE}\npolicy: {{{older}: {{activation_checkpointing: true, cpu_offload: true}}}}")
    file = tmp_path / "run.yaml"
    file.write_text(f"defaults: {parent}\npolicy: {{{newer}: {{cpu_offload: false}}}}")
    backend = load_config(file, check=False).policy.dtensor_cfg
    assert (backend.activation_checkpointing, backend.cpu_offload) == (True, False)


def test_both_names_of_the_backend_in_one_file_may_not_differ(tmp_path):
    file = tmp_path / "run.yaml"
    text = f"defaults: {BASE}\npolicy: {{automodel_cfg: {{cpu_offload: true}}, dtensor_cfg: {{cpu_offload: %s}}}}"
    file.write_text(text % "true")
    assert load_config(file, check=False).policy.dtensor_cfg.cpu_offload is True
    file.write_text(text % "false")
    with pytest.raises(ConfigError, match=r"automodel_cfg.cpu_offload=True and dtensor_cfg.cpu_offload=False are the"):
        load_config(file, check=False)
