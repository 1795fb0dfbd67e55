"""Which keys a resumed run takes over, and which it refuses."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from nemo_rl.config import CheckpointingConfig, load_config
from nemo_rl.config.loading.algorithms import ALGORITHMS
from nemo_rl.config.rules.resume import APPLIED, changed_keys

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = {
    name: ALGORITHMS[name.split("_")[0]]
    for name in ("grpo_math_cpu", "sft_cpu", "dpo_cpu", "rm_cpu", "distillation_math_cpu")
}


@cache
def load(name: str) -> BaseModel:
    return load_config(ROOT / f"examples/configs/{name}.yaml", schema=EXAMPLES[name])


def stored(name: str) -> dict:
    return yaml.safe_load(yaml.safe_dump(load(name).model_dump(mode="json")))


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_stored_configuration_equals_that_of_its_run(name):
    assert changed_keys(load(name), stored(name)) == []


@pytest.mark.parametrize(
    ("name", "override", "said", "applied"),
    [
        ("sft_cpu", "policy.optimizer.kwargs.lr=1e-5", "policy.optimizer.kwargs.lr: 0.0005 -> 1e-05", True),
        (
            "sft_cpu",
            "+policy.optimizer.kwargs.amsgrad=true",
            "policy.optimizer.kwargs.amsgrad: (absent) -> True",
            True,
        ),
        ("sft_cpu", "sft.max_num_steps=120", "sft.max_num_steps: 100 -> 120", True),
        ("sft_cpu", "data.validation.num_samples=9", "data.validation.num_samples: 256 -> 9", True),
        ("sft_cpu", "cluster.ranks_per_node=2", "cluster.ranks_per_node: None -> 2", True),
        ("grpo_math_cpu", "policy.generation.val_temperature=0", "policy.generation.val_temperature: 1.0 -> 0.0", True),
        ("sft_cpu", "sft.seed=1", "sft.seed: 42 -> 1", False),
        ("sft_cpu", "data.shuffle=false", "data.shuffle: True -> False", False),
        ("sft_cpu", "data.train.num_samples=7", "data.train.num_samples: 5000 -> 7", False),
        ("sft_cpu", "policy.model_name=other", "policy.model_name", False),
        ("sft_cpu", "policy.optimizer.name=torch.optim.SGD", "policy.optimizer.name", False),
        ("sft_cpu", "policy.dtensor_cfg.lora_cfg.dim=2", "policy.dtensor_cfg.lora_cfg.dim: 8 -> 2", False),
        ("sft_cpu", "policy.tokenizer.chat_template=null", "policy.tokenizer.chat_template", False),
        ("grpo_math_cpu", "policy.generation.temperature=0.5", "policy.generation.temperature: 1.0 -> 0.5", False),
        ("grpo_math_cpu", "loss_fn.ratio_clip_min=0.1", "loss_fn.ratio_clip_min: 0.2 -> 0.1", False),
        ("grpo_math_cpu", "env.math.num_workers=3", "env.math.num_workers", True),
        ("distillation_math_cpu", "teacher.logprob_batch_size=3", "teacher.logprob_batch_size", True),
        ("distillation_math_cpu", "teacher.model_name=other", "teacher.model_name", False),
    ],
)
def test_changes_are_found_and_classified(name, override, said, applied):
    found = changed_keys(
        load_config(ROOT / f"examples/configs/{name}.yaml", [override], schema=EXAMPLES[name], check=False),
        stored(name),
    )
    change = next(change for change in found if str(change).startswith(said))
    assert change.is_applied is applied


def test_keys_of_another_version_are_left_out():
    before = stored("sft_cpu")
    del before["sft"]["seed"]
    before["sft"]["gone"] = 1
    assert changed_keys(load("sft_cpu"), before) == []


def test_an_entry_that_becomes_a_list_is_one_change():
    entry = "{dataset_name: arithmetic_sft, num_samples: 9}"
    config = load_config(
        ROOT / "examples/configs/sft_cpu.yaml", [f"data.train=[{entry},{entry}]"], schema=ALGORITHMS["sft"], check=False
    )
    assert [change.key for change in changed_keys(config, stored("sft_cpu"))] == ["data.train"]


def keys_below(section: BaseModel, path: str = "") -> Iterator[str]:
    for name in type(section).model_fields:
        yield f"{path}{name}"
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from keys_below(value, f"{path}{name}.")
        elif isinstance(value, dict):
            for key, below in value.items():
                if isinstance(below, BaseModel):
                    yield from keys_below(below, f"{path}{name}.{key}.")


def test_every_pattern_names_a_key_and_is_in_the_guide():
    keys = {key for name in EXAMPLES for key in keys_below(load(name))}
    guide = (ROOT / "docs/algorithms/grpo.md").read_text()
    for group, patterns in APPLIED.items():
        assert group in guide
        for pattern in patterns:
            assert any(fnmatchcase(key, pattern) for key in keys), pattern
            assert f"`{pattern}`" in guide, pattern


@pytest.mark.parametrize(
    ("allowed", "key", "want"),
    [
        ([], "data.train", False),
        (["data.train"], "data.train", True),
        (["data"], "data.train.seed", True),
        (["data.tr"], "data.train", False),
        (["data.train.seed"], "data.train", False),
    ],
)
def test_allowing_a_section_allows_its_keys(allowed, key, want):
    assert CheckpointingConfig.build(allow_changed=allowed).allows(key) is want
