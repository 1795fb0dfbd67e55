"""Checks data entries and environments.

Invariant: nothing is read or downloaded; only names are checked.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from nemo_rl.config.base.availability import NOT_BUILT
from nemo_rl.config.base.names import (
    BUILT_IN_ENVIRONMENTS,
    GENERATED_DATASETS,
    NOT_BUILT_DATASETS,
    NOT_BUILT_ENVIRONMENTS,
    RESPONSE_DATASET_NAMES,
)
from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.schema.data import DataConfig, DatasetConfig
from nemo_rl.utils.did_you_mean import did_you_mean

NEED_PATH = (
    "ResponseDataset",
    "openai_format",
    "open_assistant",
    "BinaryPreferenceDataset",
    "PreferenceDataset",
    "BinaryFeedbackDataset",
)
"""Data sets that read `data_path` and have no other source."""


def check_data(data: DataConfig, environments: Mapping[str, Any]) -> Findings:
    """Check that each data entry names a known data set and a configured environment."""
    if not data.train_entries and not data.has_user_data:
        yield (
            "data.train is empty. Name a data set, for example data.train.dataset_name=arithmetic, or a "
            "file with data.train.data_path."
        )
    if not data.has_user_data:
        yield from check_unused(environments, {entry.env_name for _, entry in named_entries(data)})
    for name, entry in named_entries(data):
        yield from check_dataset(name, entry, RESPONSE_DATASET_NAMES)
        yield from check_environment(name, entry.env_name, environments)
        if entry.name is not None:
            yield f"{name}.name={entry.name!r}: GRPO validates on all data together. Leave the name out."


def check_environment(place: str, env_name: str | None, environments: Collection[str]) -> Findings:
    """Check that the environment that grades answers is one of `env`.

    Args:
        place: key of the entry that names it.
        env_name: the name.
        environments: names in `env`.
    """
    if env_name is None:
        yield f"{place}.env_name is null, but answers need an environment that rewards them."
    elif env_name not in environments:
        known = ", ".join(sorted(environments)) or "none"
        yield (
            f"{place}.env_name={env_name!r} is not in env. Environments in env: {known}."
            f"{did_you_mean(env_name, environments)} Choose one of them or write a section env.{env_name}."
        )


def check_unused(environments: Collection[str], used: Collection[str | None]) -> Findings:
    """Check that data names each user-defined environment; built-in ones may be unused, from an inherited file.

    Args:
        environments: names in `env`.
        used: names that data entries have as `env_name`.
    """
    named = sorted(name for name in used if name is not None)
    for name in environments:
        if name in used or name in BUILT_IN_ENVIRONMENTS or name in NOT_BUILT_ENVIRONMENTS:
            continue
        meant = next((other for other in named if other.startswith(f"{name}.")), None)
        yield (
            f"env.{name} is used by no data: env_name of the data entries is {', '.join(named) or 'not set'}. "
            + (
                f"For the environment {meant} write env={{{meant}: {{key: value}}}}, or env.{meant}.key=value after it."
                if meant
                else f"Set data.default.env_name={name}, or remove it with ~env.{name}."
            )
        )


def named_entries(data: DataConfig) -> Iterator[tuple[str, DatasetConfig]]:
    """Yield the entries of train and validation, each with its key."""
    for side, entries in (("train", data.train), ("validation", data.validation)):
        if isinstance(entries, list):
            yield from ((f"data.{side}.{i}", entry) for i, entry in enumerate(entries))
        elif entries is not None:
            yield f"data.{side}", entries


def check_dataset(name: str, entry: DatasetConfig, known: Sequence[str]) -> Findings:
    """Check that the entry names data that exists.

    Args:
        name: key of the entry.
        entry: one data set.
        known: built-in names that fit the algorithm.
    """
    dataset = entry.dataset_name
    if dataset is None and entry.data_path is None:
        yield (f"{name} names no data. Set {name}.dataset_name, for example gsm8k, or {name}.data_path, a local file.")
    elif dataset is not None and dataset not in known and "." not in dataset:
        wrong = NOT_BUILT if dataset in NOT_BUILT_DATASETS else "unknown"
        hint = did_you_mean(dataset, known)
        yield (
            f"{name}.dataset_name={dataset!r} is {wrong}.{hint} Known: "
            f"{', '.join(known)}. For a file set {name}.data_path; for a class of your "
            "own give its dotted path."
        )
    if dataset in NEED_PATH and entry.data_path is None:
        yield f"{name}.dataset_name={dataset} needs {name}.data_path, a local file or a hub id."
    yield from _check_arithmetic(name, entry)


def _check_arithmetic(name: str, entry: DatasetConfig) -> Findings:
    if entry.dataset_name is None or entry.dataset_name not in GENERATED_DATASETS:
        return
    if entry.data_path is not None:
        yield (
            f"{name}.dataset_name={entry.dataset_name} generates its problems and cannot read "
            f"{name}.data_path={entry.data_path!r}. For the file set "
            f"{name}.dataset_name={GENERATED_DATASETS[entry.dataset_name]}."
        )
    yield from check_operands(f"{name}.", entry.min_operand, entry.max_operand)


def check_operands(place: str, low: int, high: int) -> Findings:
    """Check that the range of numbers of generated problems is not empty."""
    if low > high:
        yield f"{place}min_operand={low} is above {place}max_operand={high}."
