"""Every field of every schema refuses wrong values before Ray starts, with one message and status 2.

The fields are found by walking the schema from a shipped CPU configuration of each algorithm. Values of a wrong type,
out of bounds, or that no file can store are refused by the loader.
"""

import copy
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, Literal, get_args, get_origin

import pytest
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel

from nemo_rl.config import RunConfig, config_of, load_config
from nemo_rl.config.base.paths import REPOSITORY_ROOT
from nemo_rl.config.base.structure import Slot, _flatten, _options
from nemo_rl.config.loading.algorithms import ALGORITHMS
from nemo_rl.launch.checks import CHECKS, Request
from nemo_rl.utils.errors import ConfigError, DataError

CONFIGS = {
    "grpo": "grpo_math_cpu.yaml",
    "ppo": "ppo_math_cpu.yaml",
    "distillation": "distillation_math_cpu.yaml",
    "sft": "sft_cpu.yaml",
    "dpo": "dpo_cpu.yaml",
    "rm": "rm_cpu.yaml",
    "eval": "evals/eval_cpu.yaml",
}

ENVIRONMENTS: dict[str, Any] = {
    "reward_model": {"model_name": "a/model"},
    "rag": {"dataset_name": "a/set"},
    "llm_judge": {"engine": {"model_name": "a/model"}},
    "agent": {"program": "some.program"},
    "gymnasium": {"id": "Game-v0"},
    "textarena": {"id": "Game-v0"},
    "reasoning_gym": {"dataset": "sums"},
    "verifiers": {"id": "game"},
}
"""Sections of environments with the keys that they need."""

type Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Field:
    """A field of the schema at one place of a configuration."""

    path: Path
    slot: Slot


def fields_of(section: type[BaseModel], tree: Any, path: Path = (), above: tuple[type, ...] = ()) -> Iterator[Field]:
    """Yield the fields of a section and of those below it; each section class once on a path."""
    for name, info in section.model_fields.items():
        slot, place = Slot.of(info.annotation, info.metadata), (*path, name)
        yield Field(place, slot)
        value = tree.get(name) if isinstance(tree, Mapping) else None
        if slot.named is not None:
            below = {**slot.named.sections}
            for each, kind in below.items():
                given = value.get(each) if isinstance(value, Mapping) else None
                yield from fields_of(kind, given, (*place, each), (*above, section))
        for kind in slot.sections:
            if kind not in above:
                yield from fields_of(kind, value, place, (*above, section))


def wrong_values(slot: Slot) -> dict[str, Any]:
    """Return values that a field cannot have, by what is wrong with them."""
    options = [option for option in _options(slot.annotation) if option is not type(None)]
    kinds = [get_origin(option) or option for option in options]
    wrong: dict[str, Any] = {}
    if Any in options:
        return wrong
    if not slot.optional and not slot.is_mapping:
        wrong["null"] = None
    if dict not in kinds and not slot.sections:
        wrong["mapping"] = {"a": 1}
    if list not in kinds:
        wrong["list"] = [[1]]
    if set(kinds) <= {int, float}:
        wrong |= {"text": "abc", "true": True, "empty": "", "nan": math.nan, "infinite": math.inf, "huge": 10.0**30}
        wrong |= _out_of_bounds(slot)
    elif set(kinds) <= {bool}:
        wrong |= {"text": "maybe", "number": 7, "empty": "", "NUL": "a\0b"}
    elif set(kinds) <= {str}:
        wrong |= {"number": 7, "empty": "", "NUL": "a\0b", "control": "a\x1b[0m", "surrogate": "a\ud800"}
    elif set(kinds) <= {Literal}:
        wrong |= {"text": "no such word", "number": 12345, "empty": "", "NUL": "a\0b"}
    elif str not in kinds and Literal not in kinds:
        wrong |= {"text": "abc", "number": 7, "empty": ""}
    return wrong


def _out_of_bounds(slot: Slot) -> dict[str, Any]:
    lowest: list[Any] = []
    highest: list[Any] = []
    inner = [each for option in get_args(slot.annotation) for each in getattr(option, "__metadata__", ())]
    for bound in _flatten((*slot.metadata, *inner)):
        if isinstance(bound, Ge | Gt):
            lowest.append(bound.ge if isinstance(bound, Ge) else bound.gt)
        if isinstance(bound, Le | Lt):
            highest.append(bound.le if isinstance(bound, Le) else bound.lt)
    assert lowest and highest, f"{slot} has no bounds"
    return {"below": min(lowest) - 1, "above": max(highest) * 10 + 1}


def with_value(tree: Any, path: Path, value: Any) -> Any:
    """Return a copy of a tree with another value at a path; sections that are null become empty ones."""
    copied = dict(tree) if isinstance(tree, Mapping) else {}
    key = path[0]
    copied[key] = value if len(path) == 1 else with_value(copied.get(key), path[1:], value)
    return copied


def refusal(schema: type[Any], tree: Any) -> str:
    """Return the message with which a configuration is refused; empty if it is accepted."""
    try:
        config_of(tree, schema)
    except ConfigError as error:
        assert error.exit_status == 2
        return str(error)
    return ""


@pytest.mark.parametrize("algorithm", CONFIGS)
def test_the_loader_refuses_wrong_values_of_each_field(algorithm: str) -> None:
    schema = ALGORITHMS[algorithm]
    base = load_config(f"examples/configs/{CONFIGS[algorithm]}", schema=schema, check=False).model_dump(mode="json")
    if "env" in base:
        base["env"] = {**ENVIRONMENTS, **base["env"]}
    fields = list(fields_of(schema, base))
    cases = [(field, kind, value) for field in fields for kind, value in wrong_values(field.slot).items()]
    # Many wrong values fit into one configuration, because the message names each of them.
    together: dict[tuple[int, str], list[tuple[Field, Any]]] = {}
    for field, kind, value in cases:
        depth = len(field.path) if field.slot.sections or field.slot.named else 0
        together.setdefault((depth, kind), []).append((field, value))
    accepted = []
    for (_, kind), group in together.items():
        tree = copy.deepcopy(base)
        for field, value in group:
            tree = with_value(tree, field.path, value)
        lines = refusal(schema, tree)
        for field, value in group:
            name = ".".join(map(str, field.path))
            if f"{name}=" in lines or f"{name} " in lines:
                continue
            if not refusal(schema, with_value(base, field.path, value)):
                accepted.append(f"{name}: {kind} {value!r:.40}")
    print(f"\n{algorithm}: {len(fields)} fields, {len(cases)} wrong values, {len(accepted)} accepted")
    assert accepted == []


MATH, AGENT = "grpo_math_cpu.yaml", "grpo_agent_cpu.yaml"
JUDGE = ["data.default.env_name=llm_judge", "+env.llm_judge.base_url=http://127.0.0.1:1/v1", "+env.llm_judge.model=m"]
STEP_LR = "torch.optim.lr_scheduler.StepLR"
SPECULATION = "+policy.generation.vllm_kwargs.speculative_config"
NAMES = {
    "program of no module": ("grpo", AGENT, ["env.agent.program=nosuch.module"], "'nosuch.module' cannot be imported"),
    "program that is a text": ("grpo", AGENT, ["env.agent.program=os.sep"], "cannot be called"),
    "program that is a number": ("grpo", AGENT, ["env.agent.program=math.pi"], "cannot be called"),
    "program without a name": ("grpo", AGENT, ["env.agent.program=.."], "not a dotted path"),
    "argument of a program": ("grpo", AGENT, ["+env.agent.kwargs.nope=1"], "unexpected keyword argument 'nope'"),
    "command": ("grpo", AGENT, ["env.agent.program=null", "env.agent.command=[nosuch]"], "no program on this machine"),
    "scheme": ("grpo", AGENT, ["env.agent.program=null", "env.agent.service=ftp://x/"], "neither http:// nor"),
    "no address": ("grpo", AGENT, ["env.agent.program=null", "env.agent.service=nourl"], "neither http:// nor"),
    "port": ("grpo", AGENT, ["env.agent.program=null", "env.agent.service=http://x:99999/"], "Port out of range"),
    "tool parser": ("grpo", AGENT, ["env.agent.tool_parser=nope"], "env.agent: tool_parser='nope' is unknown"),
    "reasoning parser": ("grpo", AGENT, ["env.agent.reasoning_parser=nope"], "reasoning_parser='nope' is unknown"),
    "grader": ("grpo", AGENT, ["env.agent.grader.name=nope"], "env.agent.grader.name='nope': unknown environment"),
    "key of a grader": ("grpo", AGENT, ["+env.agent.grader.kwargs.nope=1"], "env.agent.grader.kwargs.nope"),
    "host": ("grpo", AGENT, ["cluster.agent_endpoint.host=999.1.1.1"], "no host has this name"),
    "host of another machine": ("grpo", AGENT, ["cluster.agent_endpoint.host=10.9.8.7"], "cannot listen on 10.9.8.7"),
    "public host": ("grpo", AGENT, ["cluster.agent_endpoint.public_host='a b'"], "no host has this name"),
    "grader of tools": ("grpo", "grpo_calculator_cpu.yaml", ["env.tools.grader.name=nope"], "env.tools.grader.name"),
    "tokenizer": ("grpo", "grpo_calculator_cpu.yaml", ["env.tools.tokenizer.name=/none"], "env.tools.tokenizer.name"),
    "template": ("grpo", MATH, [*JUDGE, "+env.llm_judge.template=x"], "does not have {answer}"),
    "broken template": ("grpo", MATH, [*JUDGE, "+env.llm_judge.template='{answer'"], "expected '}'"),
    "pair": ("grpo", MATH, [*JUDGE, "+env.llm_judge.template='{answer}'", "+env.llm_judge.mode=pairwise"], "answer_a"),
    "key of a judge": ("grpo", MATH, [*JUDGE, "+env.llm_judge.api_key_env=NOT_SET_X"], "NOT_SET_X"),
    "no data set": ("grpo", MATH, ["data.default.env_name=rag"], "write a section env.rag"),
    "missing data set": (
        "grpo",
        MATH,
        ["data.default.env_name=rag", "+env.rag.dataset_name=/none.jsonl"],
        "env.rag.dataset_name='/none.jsonl'",
    ),
    "optimizer": ("ppo", "ppo_math_cpu.yaml", ["value.optimizer.name=torch.optim.Nope"], "value.optimizer.name="),
    "negative rate": (
        "ppo",
        "ppo_math_cpu.yaml",
        ["value.optimizer.kwargs.lr=-1"],
        "value.optimizer.kwargs do not fit",
    ),
    "rate that is a text": ("rm", "rm_cpu.yaml", ["policy.optimizer.kwargs.lr=abc"], "lr='abc' is not a number"),
    "betas": ("dpo", "dpo_cpu.yaml", ["policy.optimizer.kwargs.betas=[0.9]"], "not a list of 2 numbers"),
    "other word": ("grpo", MATH, ["policy.optimizer.kwargs.learning_rate=1"], "Did you mean 'lr'?"),
    "added other word": ("grpo", MATH, ["+policy.optimizer.kwargs.learning_rate=1"], "Did you mean 'lr'?"),
    "schedule": ("grpo", MATH, [f"policy.scheduler={{name:{STEP_LR},kwargs:{{step_size:x}}}}"], "cannot take a step"),
    "quantization": ("grpo", MATH, ["+policy.generation.vllm_kwargs.quantization=fp8"], "vllm_cfg.precision=fp8"),
    "n-grams": (
        "grpo",
        MATH,
        [f"{SPECULATION}={{method:ngram,num_speculative_tokens:2,prompt_lookup_max:0}}"],
        "prompt_lookup_max=0",
    ),
    "joined matrices": (
        "grpo",
        MATH,
        [f"policy.generation.vllm_cfg.{key}" for key in ("precision=fp8", "quantization_ignored_layer_kws=[q_proj]")],
        "vLLM joins",
    ),
    "draft": (
        "grpo",
        MATH,
        ["policy.draft.enabled=true", "policy.draft.model_name=/none"],
        "policy.draft.model_name='/none' does not exist",
    ),
    "judge's context": (
        "grpo",
        MATH,
        [
            JUDGE[0],
            "+env.llm_judge.engine.model_name=${policy.model_name}",
            "+env.llm_judge.engine.max_model_len=99999",
        ],
        "reads 2048 tokens",
    ),
}
OF_A_START = ("devices", "packages", "ray", "memory", "checkpoints", "logs")
"""Checks whose result does not depend on names."""


def make_all_checks(config: RunConfig) -> None:
    """Make the checks that a run makes before it starts Ray."""
    for check in CHECKS:
        if check.name not in OF_A_START and not check.skipped(config):
            check.look(Request(config))


@pytest.mark.parametrize("what", NAMES)
def test_names_that_lead_nowhere_are_refused_before_ray(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, name, overrides, message = NAMES[what]
    monkeypatch.syspath_prepend(str(REPOSITORY_ROOT / "examples"))
    with pytest.raises((ConfigError, DataError)) as refused:
        make_all_checks(load_config(f"examples/configs/{name}", overrides, schema=ALGORITHMS[algorithm]))
    assert message in str(refused.value)
    assert refused.value.exit_status == 2


def test_the_shipped_agent_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY_ROOT / "examples"))
    make_all_checks(load_config(f"examples/configs/{AGENT}"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grpo: {val_period: 1:30}", "1:30 is a number with another base"),
        ("grpo: {num_prompts_per_step: 010}", "010 is a number with another base"),
        ("grpo: {_override_: 5}", "_override_=5 must be true"),
        ("grpo: {val_period: '${mul:1}'}", "it needs two numbers or more"),
        ("grpo: {val_period: '${div:1,0}'}", "cannot be divided by 0"),
        (r'checkpointing: {checkpoint_dir: "a\nb"}', "has a line break"),
        (r'logger: {log_dir: "a\0b"}', "control character"),
    ],
)
def test_values_of_a_file_that_are_not_what_they_look_like(tmp_path: FilePath, text: str, message: str) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(f"defaults: {REPOSITORY_ROOT}/examples/configs/{MATH}\n{text}\n")
    with pytest.raises(ConfigError) as refused:
        load_config(file)
    assert message in str(refused.value)


def test_a_pipe_is_no_configuration(tmp_path: FilePath) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match="only regular files are read"):
        load_config(tmp_path / "pipe.yaml")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([], ""),
        (["policy.megatron_cfg.mtp_num_layers=1"], "policy.megatron_cfg.mtp_num_layers"),
        (["policy.megatron_cfg.fp8_cfg.enabled=true"], "policy.megatron_cfg.fp8_cfg"),
        (["policy.generation.vllm_cfg.is_mx=true"], "vllm_cfg.is_mx (only with engine.precision=fp8)"),
        (["grpo.overlap.in_flight_weight_updates=true"], "in_flight_weight_updates (only with mode=ahead)"),
        (["grpo.overlap.groups_per_part=4"], "grpo.overlap.groups_per_part (a step is trained on when"),
        (["+env.rag.dataset_name=x"], "env.rag (no data entry has it as env_name)"),
        (["logger.wandb.project=x"], "logger.wandb (only with wandb_enabled)"),
        (["cluster.gpus_per_node=4"], "cluster.gpus_per_node (only with device=cuda)"),
        (["policy.generation.backend=hf", f"{SPECULATION}={{method:ngram}}"], "vllm_kwargs (only with backend=vllm)"),
        (["data.train={dataset_name: ResponseDataset, data_path: README.md}"], ""),
    ],
)
def test_keys_without_effect_are_reported(caplog: pytest.LogCaptureFixture, overrides: list[str], told: str) -> None:
    with caplog.at_level("INFO", "nemo_rl.config"):
        load_config(f"examples/configs/{MATH}", overrides)
    lines = [message for message in caplog.messages if message.startswith("Keys without effect")]
    assert told in "".join(lines)
    assert bool(lines) == bool(told)
