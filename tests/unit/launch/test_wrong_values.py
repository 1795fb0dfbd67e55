"""Every field of every schema refuses wrong values before Ray starts, with one message and status 2.

The fields are found by walking the schema from a shipped CPU configuration of each algorithm. Values of a wrong type,
out of bounds, or that no file can store are refused by the loader.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import pytest
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel

from nemo_rl.config import config_of, load_config
from nemo_rl.config.base.structure import Slot, _flatten, _options
from nemo_rl.config.loading.algorithms import ALGORITHMS
from nemo_rl.utils.errors import ConfigError

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
    lowest, highest = [], []
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
