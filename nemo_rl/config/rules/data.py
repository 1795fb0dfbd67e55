"""Check data entries and environments.

Invariant: only names are checked. Nothing is read or downloaded.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from nemo_rl.config.base.availability import NOT_BUILT
from nemo_rl.config.base.names import (
    BUILT_IN_ENVIRONMENTS,
    GENERATED_DATASETS,
    NEMO_GYM_ROWS,
    NOT_BUILT_DATASETS,
    NOT_BUILT_ENVIRONMENTS,
    PLAIN_TEXT,
    RESPONSE_DATASET_NAMES,
)
from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.schema.data import CurriculumConfig, DataConfig, DatasetConfig
from nemo_rl.utils.errors import did_you_mean

NEED_PATH = (
    "ResponseDataset",
    "openai_format",
    "open_assistant",
    "BinaryPreferenceDataset",
    "PreferenceDataset",
    "BinaryFeedbackDataset",
    "ScoredAnswersDataset",
    "LabelledStepsDataset",
    NEMO_GYM_ROWS,
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
        if entry.dataset_name == PLAIN_TEXT:
            yield f"{name}.dataset_name={PLAIN_TEXT} has no prompts that could be answered. It is for run_sft.py."
        yield from check_environment(name, entry.env_name, environments)
        is_validated = name.startswith("data.validation") or entry.split_validation_size > 0
        if is_validated and entry.name in environments:
            yield (
                f"{name}.name={entry.name!r} is the name of an environment, whose metrics of validation are under "
                f"validation/{entry.name}/. Choose another name for the data set."
            )
    yield from check_shares(data, has_rewards=True)


def check_environment(place: str, env_name: str | None, environments: Collection[str]) -> Findings:
    """Check that the environment that grades answers is one of `env`.

    Args:
        place: key of the entry with the environment's name.
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
    """Check that no environment is unused because its name is misspelled or is only the first part of a dotted name.

    Other environments may be unused, such as those of an inherited file. The loader reports them.

    Args:
        used: names that data entries have as `env_name`.
    """
    named = sorted(name for name in used if name is not None)
    for name in environments:
        if name in used or name in BUILT_IN_ENVIRONMENTS or name in NOT_BUILT_ENVIRONMENTS:
            continue
        meant = next((other for other in named if other.startswith(f"{name}.")), None)
        near = did_you_mean(name, [*named, *BUILT_IN_ENVIRONMENTS], cutoff=0.8)
        if meant or near:
            yield (
                f"env.{name} is used by no data: env_name of the data entries is {', '.join(named) or 'not set'}."
                + (
                    f" For the environment {meant} write env={{{meant}: {{key: value}}}}, or env.{meant}.key=value "
                    "after it."
                    if meant
                    else f"{near} Set data.default.env_name={name}, or remove it with ~env.{name}."
                )
            )


def named_entries(data: DataConfig) -> Iterator[tuple[str, DatasetConfig]]:
    """Yield the entries of train and validation, each with its key."""
    for side, entries in (("train", data.train), ("validation", data.validation)):
        if isinstance(entries, list):
            yield from ((f"data.{side}.{i}", entry) for i, entry in enumerate(entries))
        elif entries is not None:
            yield f"data.{side}", entries


def check_shares(data: DataConfig, *, has_rewards: bool) -> Findings:
    """Check weights of data sets, and the curriculum.

    Args:
        has_rewards: whether the run rewards answers, so that it knows the accuracy of the policy.
    """
    if data.default.weight is not None:
        yield f"data.default.weight={data.default.weight:g} is no weight of a data set. Set data.train.<i>.weight."
        return
    for name, entry in named_entries(data):
        if name.startswith("data.validation") and entry.weight is not None:
            yield f"{name}.weight={entry.weight:g} has no effect: a validation takes all rows. Leave it out."
    if data.has_shares:
        yield from _check_weights(data)
        if data.curriculum is not None:
            yield from check_curriculum(data.curriculum, data.train_names, has_rewards=has_rewards)


def _check_weights(data: DataConfig) -> Findings:
    entries, names = data.train_entries, data.train_names
    if len(entries) < 2:
        key = "data.curriculum" if data.curriculum is not None else f"data.train.weight={entries[0].weight:g}"
        yield f"{key} needs several data sets, and data.train has {len(entries)}. Leave it out, or add entries."
        return
    for name in sorted({name for name in names if names.count(name) > 1}):
        same = [f"data.train.{index}" for index, other in enumerate(names) if other == name]
        yield f"{' and '.join(same)} have the same name, {name}. Set data.train.<i>.name of each to another one."
    weighted = [f"data.train.{index}.weight" for index, entry in enumerate(entries) if entry.weight is not None]
    if data.curriculum is not None and data.curriculum.phases:
        if weighted:
            yield f"{', '.join(weighted)}: data.curriculum.phases has the weights. Leave one of the two out."
    elif weighted and len(weighted) < len(entries):
        without = [f"data.train.{index}" for index, entry in enumerate(entries) if entry.weight is None]
        yield f"{', '.join(weighted)}: no weight is set for {', '.join(without)}. Give all entries one, or none."


def check_curriculum(curriculum: CurriculumConfig, names: Sequence[str], *, has_rewards: bool) -> Findings:
    """Check phases and the accuracy rule.

    Args:
        has_rewards: as in `check_shares`.
    """
    phases, accuracy = curriculum.phases, curriculum.accuracy
    if not phases and accuracy is None:
        yield "data.curriculum has no rule. Write data.curriculum.phases or data.curriculum.accuracy, or leave it out."
    if curriculum.interpolation != "none" and len(phases) < 2:
        yield (
            f"data.curriculum.interpolation={curriculum.interpolation} needs two phases, and data.curriculum.phases "
            f"has {len(phases)}. Leave it at none."
        )
    yield from _check_steps([phase.from_step for phase in phases])
    for index, phase in enumerate(phases):
        yield from _check_phase(f"data.curriculum.phases.{index}.weights", phase.weights, names)
    for name in names:
        if phases and all(phase.weights.get(name) == 0 for phase in phases):
            yield f"data.curriculum.phases: the weight of {name} is 0 in all phases. Remove it from data.train."
    if accuracy is not None and not has_rewards:
        yield "data.curriculum.accuracy needs rewards, and this run samples no answers. Use data.curriculum.phases."
    elif accuracy is not None and accuracy.min_share * len(names) > 1:
        yield (
            f"data.curriculum.accuracy.min_share={accuracy.min_share:g} for each of {len(names)} data sets is more "
            f"than all prompts. Set it to at most {1 / len(names):.3g}."
        )


def _check_steps(steps: Sequence[int]) -> Findings:
    if steps and steps[0] != 0:
        yield f"data.curriculum.phases.0.from_step={steps[0]}: the first phase begins at 0, the start of the run."
    for index, (before, now) in enumerate(pairwise(steps), start=1):
        if now <= before:
            yield (
                f"data.curriculum.phases.{index}.from_step={now} does not follow {before}, that of the phase before. "
                "Sort the phases by from_step, each step once."
            )


def _check_phase(key: str, weights: Mapping[str, float], names: Sequence[str]) -> Findings:
    for name in weights:
        if name not in names:
            yield f"{key}.{name}: there is no such data set.{did_you_mean(name, names)} Names: {', '.join(names)}."
    missing = [name for name in names if name not in weights]
    if missing:
        yield f"{key} has no weight for {', '.join(missing)}. Give each data set one; 0 draws no prompt from it."
    elif not any(weights[name] for name in names):
        yield f"{key}: all are 0, so that no prompt can be drawn. Give one data set a weight above 0."


def check_dataset(name: str, entry: DatasetConfig, known: Sequence[str]) -> Findings:
    """Check that the entry names existing data.

    Args:
        name: key of the entry.
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
    if dataset == PLAIN_TEXT and (entry.data_path is None) == (entry.data_files is None):
        yield f"{name}.dataset_name={dataset} reads {name}.data_path or {name}.data_files. Set one of the two."
    elif dataset != PLAIN_TEXT and entry.data_files is not None:
        yield f"{name}.data_files belongs to dataset_name={PLAIN_TEXT}. For one file set {name}.data_path."
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
