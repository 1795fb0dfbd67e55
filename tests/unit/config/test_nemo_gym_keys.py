"""Keys of NeMo Gym: what loads, what it becomes, and what is refused before anything starts."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.agents.nemo_gym import should_use_nemo_gym
from nemo_rl.algorithms.setup.preflight import check_environments
from nemo_rl.config import REPOSITORY_ROOT, EvalMasterConfig, GRPOMasterConfig, load_config
from nemo_rl.config.schema.agents import HeadServerConfig
from nemo_rl.utils.errors import ConfigError

EXAMPLE = REPOSITORY_ROOT / "examples/nemo_gym/grpo_calculator_cpu.yaml"


@pytest.fixture(autouse=True)
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty files of rows, in the folder that the example names."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "results/nemo_gym_calculator"
    folder.mkdir(parents=True)
    for role in ("train", "validation"):
        (folder / f"{role}.jsonl").touch()


def loaded(*overrides: str) -> GRPOMasterConfig:
    return load_config(EXAMPLE, list(overrides), schema=GRPOMasterConfig)


def gym(*overrides: str) -> Any:
    return loaded(*overrides).env["nemo_gym"]


def test_servers_among_the_keys_are_passed_on() -> None:
    model = "+env.nemo_gym.policy_model={responses_api_models: {vllm_model: {a: 1}}}"
    section = gym(model, "env.nemo_gym.servers={other: 2}", "env.nemo_gym.num_gpu_nodes=0")
    assert section.servers == {"other": 2, "policy_model": {"responses_api_models": {"vllm_model": {"a": 1}}}}
    assert Path(section.config_paths[0]).is_absolute() and Path(section.command[1]).is_absolute()
    unknown = "responses_api_models/vllm_model/configs/vllm_model.yaml"
    assert gym(f"env.nemo_gym.config_paths=[{unknown}]").config_paths == [unknown]
    assert (
        gym("env.nemo_gym.config_paths=[]", "env.nemo_gym.head_server={}", "cluster.agent_endpoint.port=5").head_server
        == HeadServerConfig()
    )


def test_switches_of_nemo_rl_are_keys_of_the_section() -> None:
    section = gym("+env.should_mask_flagged_samples=false", "+env.should_log_nemo_gym_responses=true")
    assert section.should_use_nemo_gym is True
    assert section.should_mask_flagged_samples is False and section.logs_results
    config = loaded("env.should_use_nemo_gym=false")
    assert should_use_nemo_gym(config), "data names the environment"
    other = load_config(REPOSITORY_ROOT / "examples/configs/grpo_math_cpu.yaml", ["+env.should_use_nemo_gym=false"])
    assert "nemo_gym" not in other.env and not should_use_nemo_gym(other)


def test_keys_of_the_http_server_choose_parsers(tmp_path: Path) -> None:
    plugin = tmp_path / "parsers.py"
    plugin.touch()
    served = "{tool_parser: hermes, enable_auto_tools: true, reasoning_parser: qwen3}"
    keys = (
        "policy.generation.vllm_cfg.expose_http_server=true",
        f"policy.generation.vllm_cfg.http_server_serving_chat_kwargs={served}",
    )
    plugins = f"policy.generation.vllm_cfg.tool_parser_plugin={plugin}"
    section = gym("env.nemo_gym.tool_parser=null", *keys, plugins)
    assert (section.tool_parser, section.reasoning_parser) == ("hermes", "qwen3")
    assert (section.tool_parser_plugin, section.reasoning_parser_plugin) == (str(plugin), None)
    assert gym(*keys).tool_parser == "pythonic", "the section's own key"


def test_thinking_tags_are_those_of_the_penalties() -> None:
    assert loaded("env.nemo_gym.thinking_tags=['<a>', '</a>']").reward_penalties.thinking_tags == ["<a>", "</a>"]
    assert loaded().reward_penalties.thinking_tags == ["<think>", "</think>"]


def test_levels_of_effort_are_those_of_their_section() -> None:
    config = loaded("env.nemo_gym.effort_levels={low: {weight: 3, system_prompt: Be brief.}, high: {}}")
    assert {name: level.weight for name, level in config.effort_levels.items()} == {"low": 3, "high": 1}


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["cluster.rollout_runners=2"], "calls one address"),
        (["env.nemo_gym.config_paths=[]"], "neither config_paths nor head_server"),
        (["env.nemo_gym.config_paths=[]", "env.nemo_gym.head_server={}"], "agent_endpoint.port"),
        (["env.nemo_gym.effort_levels={low: {nonsense: 1}}"], "effort_levels.low"),
        (
            ["env.nemo_gym.effort_levels={low: {weight: 1}}", "effort_levels={low: {weight: 2}}"],
            "effort_levels=.* and env.nemo_gym.effort_levels disagree",
        ),
        (["env.nemo_gym.timeout_s=500"], "has to be more"),
        (["env.nemo_gym.port_range_low=6000", "env.nemo_gym.port_range_high=5000"], "is above"),
        (["data.default.env_name=math", "env.math={}"], "no data has env_name=nemo_gym"),
        (["policy.generation.vllm_cfg.tool_parser_plugin=a/b/c.py"], "does not exist"),
        (["data.train.data_path=null"], "needs data.train.data_path"),
    ],
)
def test_keys_that_do_not_fit_are_refused(overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        loaded(*overrides)


def test_an_http_server_without_agents_is_refused() -> None:
    asked = "policy.generation.vllm_cfg.expose_http_server=true"
    with pytest.raises(ConfigError, match="only served to programs of agents"):
        load_config(REPOSITORY_ROOT / "examples/configs/grpo_math_cpu.yaml", [asked])


def test_a_missing_program_is_refused_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = loaded("env.nemo_gym.command=[no_such_run]")
    with pytest.raises(ConfigError, match="'no_such_run', which is not in PATH. Install NeMo Gym"):
        check_environments(config)
    check_environments(loaded("env.nemo_gym.command=[no_such_run]", "+cluster.venvs.nemo_gym={packages: [nemo-gym]}"))


def test_a_collection_takes_all_rows_and_needs_some_and_a_new_file(tmp_path: Path) -> None:
    asked = "env.nemo_gym.is_trajectory_collection=true"
    config = loaded(asked, "grpo.max_val_samples=4")
    prepare(config)
    assert config.grpo.max_val_samples is None
    none = ("data.validation=null", "grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false")
    with pytest.raises(ConfigError, match="there are none. Set data.validation"):
        prepare(loaded(asked, *none))
    (tmp_path / "logs/nemo_gym").mkdir(parents=True)
    (tmp_path / "logs/nemo_gym/results.jsonl").touch()
    with pytest.raises(ConfigError, match="choose another env.nemo_gym.log_dir"):
        prepare(config)


def prepare(config: GRPOMasterConfig) -> None:
    """Call the function of the example, which is no package."""
    found = spec_from_file_location("example", EXAMPLE.parent / "run_grpo_nemo_gym.py")
    assert found is not None and found.loader is not None
    module = module_from_spec(found)
    found.loader.exec_module(module)
    module.prepare_collection(config, config.env["nemo_gym"])


def evaluation(*overrides: str) -> EvalMasterConfig:
    data = ("data.dataset_name=NemoGymDataset", "data.data_path=results/nemo_gym_calculator/train.jsonl")
    numbers = ("~data.num_samples", "~data.min_operand", "~data.max_operand")
    given = (*data, *numbers, "data.env_name=nemo_gym", "~env.math", *overrides)
    file = REPOSITORY_ROOT / "examples/configs/evals/eval_cpu.yaml"
    return load_config(file, list(given), schema=EvalMasterConfig)


def test_an_evaluation_has_the_same_keys_and_rules(tmp_path: Path) -> None:
    served = "+generation.vllm_cfg.http_server_serving_chat_kwargs={tool_parser: hermes}"
    asked = "+generation.vllm_cfg.expose_http_server=true"
    section = evaluation("+env.nemo_gym={config_paths: [a.yaml]}", served, asked).env["nemo_gym"]
    assert (section.tool_parser, section.log_dir) == ("hermes", str(tmp_path / "logs/nemo_gym"))
    with pytest.raises(ConfigError, match="neither config_paths nor head_server"):
        evaluation("+env.nemo_gym={}")
    with pytest.raises(ConfigError, match=r"env\.nemo_gym\.tool_parser_plugin"):
        evaluation("+env.nemo_gym={config_paths: [a.yaml], tool_parser_plugin: a/b/c.py}")
    with pytest.raises(ConfigError, match=r"generation\.vllm_cfg\.expose_http_server=true"):
        load_config(REPOSITORY_ROOT / "examples/configs/evals/eval_cpu.yaml", [asked], schema=EvalMasterConfig)
