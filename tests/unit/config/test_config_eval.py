"""The configuration of evaluations: defaults of the examples, checks, dotlist overrides."""

import pytest

from nemo_rl.config import EvalMasterConfig, check_device, load_config
from nemo_rl.config.loading.overrides import dotlist_to_overrides, parse_override
from nemo_rl.utils.errors import ConfigError

FOLDER = "examples/configs/evals"


def load(name: str, *overrides: str) -> EvalMasterConfig:
    return load_config(f"{FOLDER}/{name}.yaml", overrides, schema=EvalMasterConfig)


def test_the_default_evaluation_has_the_documented_defaults() -> None:
    config = load("eval")
    assert (config.generation.temperature, config.generation.top_k, config.generation.top_p) == (0.0, -1, 1.0)
    assert config.generation.max_new_tokens == config.generation.engine.max_model_len == 2048
    assert config.tokenizer.name == config.generation.model_name == "Qwen/Qwen2.5-Math-1.5B-Instruct"
    assert config.data.max_input_seq_length == 2048
    assert (config.eval.metric, config.eval.k_value, config.eval.num_tests_per_prompt) == ("pass@k", 1, 1)
    assert (
        config.model_dump()
        == EvalMasterConfig.build(
            data={"prompt_file": config.data.prompt_file}, env={"math": {"num_workers": 8}}
        ).model_dump()
    )


def test_evaluation_engines_use_the_same_section_as_training() -> None:
    policy = load("eval_cpu", "generation.vllm_cfg.max_model_len=99", "generation.top_p=0.9").policy
    assert policy.max_total_sequence_length == 99
    assert policy.generation is not None
    assert (policy.generation.top_p, policy.generation.max_new_tokens) == (0.9, 99)
    assert policy.precision == "float32"
    assert policy.tokenizer.name == policy.model_name


def test_tools_of_an_evaluation_are_written_by_the_tokenizer_of_the_model() -> None:
    template = "{{ messages[0]['content'] }}"
    tools = ["env={tools: {tools: [{name: calculator}]}}", "data.env_name=tools"]
    config = load("eval_cpu", *tools, f'tokenizer.chat_template="{template}"')
    written = config.env["tools"].tokenizer.model_dump()
    assert written.items() <= config.tokenizer.model_dump().items()
    assert config.env["tools"].tokenizer.name == config.generation.model_name
    with pytest.raises(ConfigError, match="policy"):
        load("eval_cpu", "+policy.tokenizer.name=examples/assets/tiny-chat")


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("eval", "eval.k_value=2", "eval.k_value=2 needs at least 2 answers"),
        ("eval", "eval.num_tests_per_prompt=4", "generation.temperature=0 gives the same answer 4 times"),
        ("math_eval", "generation.top_k=1", "generation.top_k=1 gives the same answer 4 times"),
        ("eval", "eval.pass_k_value=1", "write eval.k_value"),
        ("eval", "generation.max_new_tokens=4096", "more than generation.engine.max_model_len=2048"),
        ("eval", "data.dataset_name=math50", "Did you mean 'math500'"),
        ("eval", "data.dataset_name=problems/none.csv", "does not exist"),
        ("eval", "data.dataset_name=mmlu", "env.math.verifier_type=english_multichoice"),
        ("mmlu", "data.dataset_name=mmlu_ZH-CN", None),
        ("mmlu", "data.dataset_name=math500", "has no choices"),
        ("local_eval", "data.file_format=json", "does not end in .json"),
        ("local_eval", "data.data_path=/x.csv", "both name a file"),
        ("eval", "data.env_name=code", "not in env"),
        ("eval", "data.input_key=question", "Did you mean 'data.problem_key'"),
        ("eval", "data.output_key=answer", "Did you mean 'data.solution_key'"),
        ("eval", "data.prompt_key=question", "Did you mean 'data.problem_key'"),
        ("eval", "data.train.input_key=question", "whose keys are in data itself"),
        ("eval", "data.promt_file=null", "Did you mean 'data.prompt_file'"),
        ("eval", "generation.vllm_cfg.precision=auto", "precision"),
        ("eval", "eval.metric=pass@1", "eval.metric"),
        ("eval", "data.prompt_file=/dev/zero", "data.prompt_file='/dev/zero' is not a file"),
        ("eval", "generation.model_name=", "generation.model_name is empty"),
        ("eval", "+env.maths.key=1", "env.maths is used by no data"),
    ],
)
def test_mistakes_are_refused_with_advice(name, override, message) -> None:
    if message is None:
        assert load(name, override).data.dataset_name == "mmlu_ZH-CN"
        return
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        load(name, override)


def test_a_machine_without_a_gpu_is_directed_to_the_cpu_example(monkeypatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="evals/eval_cpu"):
        check_device(load("eval"), 0)
    check_device(load("eval_cpu"), 0)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=math500", "math500"),
        ("a=", None),
        ("a=null", None),
        ("a=true", True),
        ("a=1e-5", 1e-5),
        ("a=pass@k", "pass@k"),
        ("a=/tmp/x=1, y", "/tmp/x=1, y"),
        ("a=[x y, 2]", ["x y", 2]),
        ("a={k: [v]}", {"k": ["v"]}),
        ('a=say "hi" \\boxed{}', 'say "hi" \\boxed{}'),
        ("a=ends with \\", "ends with \\"),
        ("a=it's", "it's"),
        ("a=[open", "[open"),
    ],
)
def test_a_dotlist_value_is_parsed_as_one_yaml_value(text, value) -> None:
    (rewritten,) = dotlist_to_overrides([text])
    override = parse_override(rewritten)
    assert override.key_or_group == text.partition("=")[0]
    assert override.value() == value


def test_options_and_hydra_overrides_pass_unchanged() -> None:
    arguments = ["--config", "a=b.yaml", "--config=c.yaml", "+x=1", "~y", "++z=2", "word"]
    assert dotlist_to_overrides(arguments) == arguments
    config = load("eval", *dotlist_to_overrides(["generation.stop_strings=[a b, c]", "env.math.num_workers=2"]))
    assert config.generation.stop_strings == ["a b", "c"]
    assert config.env["math"].num_workers == 2
