"""The override grammar: on plain configs as measured with hydra-core 1.3, and on the schema."""

from pathlib import Path

import pytest
from config_helpers import with_values
from omegaconf import OmegaConf

from nemo_rl.config import load_config
from nemo_rl.config.base.names import BUILT_IN_ENVIRONMENTS
from nemo_rl.utils.config import OverridesError, parse_hydra_overrides
from nemo_rl.utils.errors import ConfigError

START = {"a": {"b": 1, "l": [1, 2], "e": {}}, "x": [{"n": 1}]}


def apply(*overrides: str) -> dict:
    config = parse_hydra_overrides(OmegaConf.create(START), list(overrides))
    return OmegaConf.to_container(config)  # type: ignore[return-value]


def changed(**a: object) -> dict:
    return {"a": {**START["a"], **a}, "x": START["x"]}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("a.b=5", changed(b=5)),
        ("+a.x=5", changed(x=5)),
        ("+a.n.m.k=1", changed(n={"m": {"k": 1}})),
        ("++a.b=7", changed(b=7)),
        ("++a.x=7", changed(x=7)),
        ("a.l=[7,8]", changed(l=[7, 8])),
        ("a.l.0=9", changed(l=[9, 2])),
        ("a={b:9}", changed(b=9)),
        ("+a.e={k:1}", changed(e={"k": 1})),
        ("a.b=null", changed(b=None)),
        ("a.b=true", changed(b=True)),
        ("a.b=1e-3", changed(b=0.001)),
        ("a.b=hello world", changed(b="hello world")),
        ("a.b=", changed(b="")),
        ("a.b=val:accuracy", changed(b="val:accuracy")),
        ("a.b=/x/y.z", changed(b="/x/y.z")),
        ("a.b='1,2'", changed(b="1,2")),
        ("x.0.n=4", {"a": START["a"], "x": [{"n": 4}]}),
        ("~a.b", {"a": {"l": [1, 2], "e": {}}, "x": [{"n": 1}]}),
        ("~a.b=1", {"a": {"l": [1, 2], "e": {}}, "x": [{"n": 1}]}),
    ],
)
def test_overrides_set_the_expected_values(override: str, expected: dict) -> None:
    assert apply(override) == expected


@pytest.mark.parametrize(
    "override",
    ["a.zz=5", "+a.b=3", "~a.b=2", "~a.q", "+a.l.3=", "a.e={k:1}", "a.b=1,2", "foo", "--flag", "a.b=[1",
     "a.l.9=1", "a.b=range(1,3)", "~x.0"],
)  # fmt: skip
def test_refused_overrides_are_quoted(override: str) -> None:
    with pytest.raises(OverridesError) as caught:
        apply(override)
    assert repr(override) in str(caught.value)
    assert isinstance(caught.value, ConfigError) and isinstance(caught.value, ValueError)


def test_later_overrides_win() -> None:
    assert apply("a.b=2", "a.b=3")["a"]["b"] == 3


def test_syntax_errors_show_an_example() -> None:
    with pytest.raises(OverridesError, match=r"no '='.*grpo\.num_prompts_per_step=8"):
        apply("foo")
    with pytest.raises(OverridesError, match=r"sweep.*'a\.b=\[1,2\]'"):
        apply("a.b=1,2")
    with pytest.raises(OverridesError, match="Only --config is an option"):
        apply("--seed=1")


def test_schema_defaults_count_as_existing(minimal: Path) -> None:
    config = load_config(minimal, ["policy.generation.weight_sync.bucket_size_mb=8"])
    assert config.policy.generation is not None
    assert config.policy.generation.weight_sync.bucket_size_mb == 8


def test_plus_works_on_a_default_but_not_on_a_key_of_a_file(minimal: Path) -> None:
    config = load_config(minimal, ["+grpo.max_rollout_turns=3"])
    assert config.grpo.max_rollout_turns == 3
    with pytest.raises(OverridesError, match="already"):
        load_config(minimal, ["+grpo.num_prompts_per_step=4"])
    with pytest.raises(OverridesError, match="already"):
        load_config(minimal, ["+grpo.max_rollout_turns=3", "+grpo.max_rollout_turns=4"])


def test_deleting_a_key_restores_its_default(minimal: Path) -> None:
    assert load_config(minimal, ["~policy.train_global_batch_size"], check=False).policy.train_global_batch_size == 512
    assert load_config(minimal, ["~policy.scheduler"]).policy.scheduler is None
    assert load_config(minimal, ["~env.math"], check=False).env == {}


def test_new_keys_of_free_mappings_need_a_plus(minimal: Path) -> None:
    with pytest.raises(OverridesError, match=r"To add it write '\+policy\.optimizer\.kwargs\.foreach=false'"):
        load_config(minimal, ["policy.optimizer.kwargs.foreach=false"])
    config = load_config(minimal, ["+policy.optimizer.kwargs.foreach=false", "policy.optimizer.kwargs.betas.0=0.8"])
    assert config.policy.optimizer is not None
    assert config.policy.optimizer.kwargs == {
        "lr": 5e-6, "weight_decay": 0.01, "betas": [0.8, 0.999], "eps": 1e-8, "foreach": False,
    }  # fmt: skip


def test_an_override_may_fill_a_null_section(minimal: Path) -> None:
    config = load_config(minimal, ["data.validation.dataset_name=gsm8k", "data.default.seed=7"])
    assert [(e.dataset_name, e.seed) for e in config.data.validation_entries] == [("gsm8k", 7)]


def test_a_list_may_replace_an_entry(minimal: Path) -> None:
    config = load_config(
        minimal,
        ["data.train=[{dataset_name: gsm8k},{dataset_name: arithmetic, seed: 3}]", "data.train.0.split=test"],
    )
    assert [(e.dataset_name, e.split, e.seed) for e in config.data.train_entries] == [
        ("gsm8k", "test", 42),
        ("arithmetic", None, 3),
    ]


def test_an_unknown_key_in_an_override_is_refused(minimal: Path) -> None:
    with pytest.raises(
        OverridesError, match=r"'grpo\.num_prompt_per_step=4'.*Did you mean 'grpo\.num_prompts_per_step'"
    ):
        load_config(minimal, ["grpo.num_prompt_per_step=4"])
    with pytest.raises(ConfigError, match=r"unknown key 'data\.train\.0\.seedd'.*'data\.train\.0\.seed'"):
        load_config(minimal, ["data.train=[{dataset_name: gsm8k, seedd: 3}]"])


@pytest.mark.parametrize("override", ["+grpo._override_=true", "policy.optimizer.kwargs={_override_: true, lr: 1}"])
def test_the_override_marker_of_files_is_refused_with_advice(minimal: Path, override: str) -> None:
    with pytest.raises(OverridesError, match=r"_override_ is for files.* with ~key"):
        load_config(minimal, [override])


def test_derived_defaults_follow_overrides(minimal: Path) -> None:
    config = load_config(
        minimal,
        [
            "policy.max_total_sequence_length=100",
            "policy.train_micro_batch_size=3",
            "policy.generation.temperature=0.7",
        ],
    )
    policy = config.policy
    assert policy.logprob_batch_size == 3
    assert policy.sequence_packing.train_mb_tokens == 300
    assert policy.generation is not None
    assert policy.generation.max_new_tokens == 100
    assert policy.generation.engine.max_model_len == 100
    assert policy.generation.val_temperature == 0.7
    assert config.data.max_input_seq_length == 100
    assert config.grpo.reward_shaping.max_response_length == 100
    assert policy.tokenizer.name == "gpt2"


OWN = "my_rewards.Length"


@pytest.mark.parametrize(
    "overrides",
    [
        [f"data.default.env_name={OWN}", f"+env.{OWN}.target=20"],
        [f"data.default.env_name={OWN}", f"env={{{OWN}: {{target: 20}}}}"],
        [f"data.default.env_name={OWN}", f"env={{{OWN}: {{target: 3}}}}", f"env.{OWN}.target=20"],
        [f"data.default.env_name={OWN}", f"env={{{OWN}: {{target: 20, x: 1}}}}", f"~env.{OWN}.x"],
        [f"data.default.env_name={OWN}", f"+env.{OWN}={{target: 20}}"],
    ],
)
def test_an_environment_may_be_named_by_its_path(minimal: Path, overrides: list[str]) -> None:
    assert load_config(minimal, overrides).env[OWN] == {"target": 20}


def test_environments_of_reward_functions_may_have_any_names(minimal: Path) -> None:
    entries = "data.train=[{dataset_name: arithmetic, env_name: first}, {dataset_name: arithmetic, env_name: second}]"
    keys = ["env.first.function=a.f", "env.first.num_workers=2", "env.second.function.x=b.f", "env.second.weights.x=2"]
    sections = load_config(minimal, [entries, *keys]).env
    assert sections["first"] == {"function": "a.f", "num_workers": 2}
    assert sections["second"] == {"function": {"x": "b.f"}, "weights": {"x": 2}}
    with pytest.raises(ConfigError, match=r"there is no environment 'first'"):
        load_config(minimal, ["env.first.num_workers=2"])


def test_an_environment_keeps_its_own_keys_and_python_environment(write_yaml) -> None:
    own = {"env_name": OWN}
    content = with_values(data={"default": own}, env={OWN: {"target": 3, "deep": {"a.b": 1}}})
    overrides = [f"env.{OWN}.target=20", f"env.{OWN}.deep.a.b=2", f"+cluster.venvs.{OWN}.packages=[x]"]
    config = load_config(write_yaml("own.yaml", content), overrides)
    assert config.env[OWN] == {"target": 20, "deep": {"a.b": 2}}
    assert config.cluster.venvs[OWN].packages == ["x"]
    del content["env"]["math"]
    config = load_config(write_yaml("own.yaml", content), [f"~env.{OWN}", f"+env.{OWN}.target=1"])
    assert config.env == {OWN: {"target": 1}}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"env.{OWN}.target=20", "there is no environment 'my_rewards'. Environments in env: math"),
        (f"env.{OWN}.target=20", rf"that is not there yet \+env.{OWN}.target=20"),
        ("+env.mathh.target=20", r"Did you mean 'math'\? Set data.default.env_name=mathh, or"),
        ("grpo=null", "grpo is a section, which null does not switch off"),
        ("env.math=null", "env.math is a section"),
        ("checkpointing.checkpoint_dir=", r"checkpointing.checkpoint_dir is empty \(set by the override"),
        ("logger.log_dir=", "logger.log_dir is empty"),
        ("policy.model_name=", "policy.model_name is empty"),
        ("policy.tokenizer.name=", "policy.tokenizer.name is empty"),
        ("data.default.prompt_file=", "data.default.prompt_file is empty .*, or null"),
        ("checkpointing.allow_changed=['']", "checkpointing.allow_changed.0 is empty"),
        ("grpo.seed=18446744073709551616", "Allowed: int >= 0"),
        ("grpo.seed.x=3", "grpo.seed"),
        ("data.default.prompt_file=/dev/zero", "prompt_file='/dev/zero' is not a file"),
        ("data.default.system_prompt_file=/tmp", "system_prompt_file='/tmp' is not a file"),
        ("data.train.min_operand=-99999999999999999999999", "Allowed: int >= -1000000000000000"),
        (
            "cluster.timeouts.rollout_s=inf",
            r"rollout_s=inf .* a finite number\. Allowed: float > 0 and <= 10\^9.$",
        ),
        ("policy.generation.temperature=1e400", "temperature=inf .* input should be a finite number"),
        ("policy.generation.stop_token_ids=[-1]", r"stop_token_ids\.0=-1"),
    ],
)
def test_following_the_advice_of_an_error_leads_to_the_next_one(minimal: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(minimal, [override])


def test_each_empty_value_is_named_once(minimal: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(minimal, ["policy.model_name=", "logger.log_dir="])
    assert str(caught.value).count("is empty (set") == 2
    plain = ["policy.tokenizer.chat_template_kwargs={x: ''}", "policy.generation.vllm_kwargs={y: ''}"]
    assert load_config(minimal, plain).policy.tokenizer.chat_template_kwargs == {"x": ""}


def test_built_in_environments_are_known_by_name() -> None:
    from nemo_rl.environments.registry import ENV_REGISTRY

    assert set(BUILT_IN_ENVIRONMENTS) == set(ENV_REGISTRY)
