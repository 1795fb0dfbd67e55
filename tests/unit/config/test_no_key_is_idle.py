"""Every key a user may set has an effect, or the user gets a notice that it has none.

"Something" is an attribute access in code outside `config`, on a value that is known to be that section (see
`attribute_reads`). Rules, loading and checks do not count: a key that is only checked changes no run. Keys that depend
on other keys (a penalty without its loss) are the business of rules; here is whether anything reads a key at all.
"""

import ast
import logging
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import yaml
from attribute_reads import AttributeReads
from config_helpers import with_values
from pydantic.fields import FieldInfo

from nemo_rl.config import REPOSITORY_ROOT, PolicyConfig, Section, load_config
from nemo_rl.config.base.availability import Only
from nemo_rl.config.base.defaults import is_interpolation
from nemo_rl.config.base.structure import Slot
from nemo_rl.config.loading.algorithms import ALGORITHMS
from nemo_rl.config.rules.models import check_backend
from nemo_rl.config.runs.service import ServiceMasterConfig
from nemo_rl.config.schema.algorithms.teachers import TeacherLayoutConfig
from nemo_rl.config.schema.model.megatron import MegatronConfig, MegatronOptimizerConfig
from nemo_rl.config.schema.model.parallel import DTensorConfig, TrainingBackendConfig
from nemo_rl.environments.workers.loading import WORKER_KEYS
from nemo_rl.losses.preference import DPOLossConfig, KTOLossConfig

LIBRARY = REPOSITORY_ROOT / "nemo_rl"
MASTERS = (*ALGORITHMS.values(), ServiceMasterConfig)
TRACKERS = ("wandb", "tensorboard", "mlflow", "swanlab", "trackio")

BY_COMPUTED_NAME = {
    ("DPOConfig", "from_section"): {field.name for kind in (DPOLossConfig, KTOLossConfig) for field in fields(kind)},
    ("BackendSection", "size"): {
        key for section in (DTensorConfig, MegatronConfig, TrainingBackendConfig) for key in section.size_keys.values()
    },
    ("ToolTokenizerConfig", "_tokenizer_of"): {"chat_template", "chat_template_kwargs"},
    ("MegatronOptimizerConfig", "build_optimizer"): {
        name for name in MegatronOptimizerConfig.model_fields if name.startswith("muon_")
    },
    ("LoggerConfig", "make_backends"): {*TRACKERS, *(f"{name}_enabled" for name in TRACKERS)},
}
"""Section and function that reads keys of it by names that are not written out -> these keys."""


READ_BY_A_BACKEND = {"TrainingBackendConfig.kwargs", "TrainingBackendConfig.name"}
"""Keys for the classes that users write."""

TAKEN_BY_ANOTHER = {
    *("McoreGenerationConfig.max_model_len", "MegatronCheckpointConfig.async_save", "NemoGymConfig.thinking_tags"),
    *(f"ServingChatConfig.{key}" for key in ("tool_parser", "reasoning_parser")),
    *(
        "DataPlaneConfig.enabled",
        "ServingChatConfig.default_chat_template_kwargs",
        "NemoGymConfig.num_gpu_nodes",
        "NemoGymConfig.effort_levels",
    ),
    *(f"TeacherLayoutConfig.{key}" for key in TeacherLayoutConfig.model_fields),
    *(
        f"VllmConfig.{key}"
        for key in ("http_server_serving_chat_kwargs", "tool_parser_plugin", "reasoning_parser_plugin")
    ),
}
"""Keys whose value `runs.dependent_keys` writes into another key (tested with the files for Megatron and NeMo Gym,
and with the teachers of a run)."""

READ_FROM_A_DICT = {
    f"{section}.{key}"
    for section in (
        "MathEnvironmentConfig",
        "RewardFunctionsConfig",
        "VLMEnvironmentConfig",
        "AgentEnvironmentConfig",
        "NemoGymConfig",
    )
    for key in WORKER_KEYS
    if (section, key) != ("NemoGymConfig", "num_workers")
}
"""Keys of any environment, which `environments.workers.loading` reads from the section as a dict."""

REFUSED_BY_A_RULE = {"DTensorConfig.enabled": check_backend}
"""Keys that have one value in every run, because a rule refuses the others."""


@pytest.fixture(scope="module")
def sources() -> dict[Path, str]:
    return {path: path.read_text() for path in LIBRARY.rglob("*.py")}


def reads_of(sources: dict[Path, str]) -> AttributeReads:
    """Return what the code outside `config` reads, with the functions of `config` that it calls."""
    reads = AttributeReads(sources)

    def is_rule(name: str, returns: ast.expr | None) -> bool:
        return name.lstrip("_").startswith("check") or "Findings" in (ast.unparse(returns) if returns else "")

    reads.follow(lambda path: LIBRARY / "config" not in path.parents, is_rule)
    return reads


def keys(section: type[Section], path: str) -> Iterator[tuple[str, type[Section], str]]:
    """Yield every key below a section: its dotted path, its section, and its name."""
    for name, field in section.model_fields.items():
        yield f"{path}{name}", section, name
        slot = Slot.of(field.annotation, field.metadata)
        below = {*slot.sections, *(slot.item.sections if slot.item else ())}
        below |= set(slot.named.sections.values()) if slot.named else set()
        for inner in below:
            yield from keys(inner, f"{path}{name}.")


def has_one_value(field: FieldInfo) -> bool:
    """Return whether the type of the key refuses every other value."""
    only = [m for m in field.metadata if isinstance(m, Only)]
    only += [m for a in get_args(field.annotation) for m in getattr(a, "__metadata__", ()) if isinstance(m, Only)]
    literal = get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1
    return literal or any(len(one.allowed) == 1 for one in only)


def is_told(section: type[Section], key: str) -> bool:
    """Return whether a user who writes the key gets a notice."""
    return key in section.idle


def feeds_another(master: type[Section], path: str) -> bool:
    """Return whether the default of another key follows this one."""
    *parents, key = path.split(".")
    for other, section, name in keys(master, ""):
        default = section.model_fields[name].default
        if not is_interpolation(default):
            continue
        above = other.split(".")[:-1]
        for part in default.replace("${mul:", "${").split("${")[1:]:
            reference = part.split("}")[0].split(",")[0]
            dots = len(reference) - len(reference.lstrip("."))
            base = above[: len(above) - dots + 1] if dots else []
            if [*base, *reference.lstrip(".").split(".")] == [*parents, key]:
                return True
    return False


def idle_keys(reads: AttributeReads) -> set[str]:
    """Return the keys that nothing reads, in any master configuration, by section."""
    computed = {(section, key) for (section, _), names in BY_COMPUTED_NAME.items() for key in names}
    found = reads.found | computed
    idle = set()
    for master in MASTERS:
        walked = list(keys(master, ""))
        inherited = {section.inherits: section for _, section, _ in walked if section.inherits}
        for path, section, key in walked:
            children = inherited.get(path.rpartition(".")[0])
            places = [*section.__mro__, *(children.__mro__ if children else ())]
            if any((place.__name__, key) in found for place in places):
                continue
            if has_one_value(section.model_fields[key]) or is_told(section, key) or feeds_another(master, path):
                continue
            if Slot.of(section.model_fields[key].annotation, section.model_fields[key].metadata).sections:
                continue  # a section is unused if all its keys are
            idle.add(f"{section.__name__}.{key}")
    return idle - set(REFUSED_BY_A_RULE) - READ_BY_A_BACKEND - READ_FROM_A_DICT - TAKEN_BY_ANOTHER


def test_the_library_reads_every_key(sources: dict[Path, str]) -> None:
    reads = reads_of(sources)
    assert idle_keys(reads) == set()
    assert set(BY_COMPUTED_NAME) <= reads.wholes, "a function that reads by computed names is no longer there"
    without_backend = PolicyConfig.build(model_name="m", dtensor_cfg={"enabled": False})
    assert all(list(rule("policy", without_backend)) for rule in REFUSED_BY_A_RULE.values())


BATCHES_BY_TOKENS = ("DynamicBatchingConfig", "PairDynamicBatchingConfig", "BudgetedPassesConfig")

PLANTED = {
    "dynamic_batching.sequence_length_round, while packing has a key of the same name": (
        ("models/policy/batching.py", "config.dynamic_batching.sequence_length_round", "round_to"),
        ("models/policy/workers/rank.py", "config.dynamic_batching.sequence_length_round", "round_to"),
        {f"{kind}.sequence_length_round" for kind in BATCHES_BY_TOKENS},
    ),
    "dynamic_batching.enabled, a name that many sections have": (
        ("models/policy/batching.py", "config.dynamic_batching.enabled", "False"),
        ("models/policy/workers/rank.py", "config.dynamic_batching.enabled", "False"),
        ("algorithms/supervised.py", "policy.dynamic_batching.enabled", "False"),
        ("models/capacity/memory.py", "if way.enabled", "if True"),
        ("commands/size/search.py", "section.dynamic_batching.enabled", "False"),
        {f"{kind}.enabled" for kind in BATCHES_BY_TOKENS},
    ),
    "env.math.stop_strings": (
        ("config/schema/env.py", "section.stop_strings", "None"),
        {f"{name}EnvironmentConfig.stop_strings" for name in ("Math", "VLM", "CodeJaccard", "Tool", "RAG")}
        | {"RewardFunctionsConfig.stop_strings", "VerifiersConfig.stop_strings"},
    ),
    "data.*.processor": (
        ("data/datasets/setup.py", "entry.processor", "None"),
        ("data/datasets/raw_dataset.py", "self.data_config.processor", "None"),
        ("data/datasets/response_datasets.py", "config.processor", "None"),
        ("data/datasets/nemo_gym.py", "config.processor", "None"),
        {"DatasetConfig.processor", "DatasetDefaults.processor", "SupervisedDatasetDefaults.processor"},
    ),
    "val_micro_batch_size": (
        ("algorithms/supervised.py", "algorithm.val_micro_batch_size", "1"),
        {f"{section}.val_micro_batch_size" for section in ("SFTConfig", "DPOConfig", "RMConfig")},
    ),
    "a key that a rule reads, and nothing else": (
        ("models/generation/factory.py", "generation.val_top_p if validation else ", ""),
        {"GenerationConfig.val_top_p"},
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_key_that_is_no_longer_read_is_found(sources: dict[Path, str], name: str) -> None:
    *edits, expected = PLANTED[name]
    edited = dict(sources)
    for file, old, new in edits:
        assert old in edited[LIBRARY / file]
        edited[LIBRARY / file] = edited[LIBRARY / file].replace(old, new)
    assert idle_keys(reads_of(edited)) == expected


def test_notices_name_existing_keys() -> None:
    for master in MASTERS:
        for section in {section for _, section, _ in keys(master, "")}:
            assert set(section.idle) <= set(section.model_fields)
            assert not set(section.ignored) & set(section.model_fields)


def test_keys_without_effect_give_one_notice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    generated = {"dataset_name": "arithmetic", "num_samples": 5}
    content = with_values(data={"train": [generated, {"data_path": "README.md", "min_operand": 3}]})
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    with caplog.at_level(logging.INFO, "nemo_rl.config"):
        load_config(path, ["policy.dtensor_cfg.automodel_kwargs.force_hf=true"])
    # # Threads of other tests in this process may also log.
    (notice,) = [record.getMessage() for record in caplog.records if record.name.startswith("nemo_rl.config")]
    assert notice.count("(") == 2
    assert "policy.dtensor_cfg.automodel_kwargs.force_hf (models are" in notice
    assert "data.train.1.min_operand (only arithmetic" in notice
