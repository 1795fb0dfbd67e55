"""Refuse rows that a model, the engine or the grader of a run cannot process, before Ray starts."""

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any

from nemo_rl.config import PolicyConfig, RolloutMasterConfig
from nemo_rl.config.schema.agents import AgentEnvironmentConfig
from nemo_rl.data.datasets.processed_dataset import MixedDataset
from nemo_rl.data.datasets.setup import RunData
from nemo_rl.data.model_rows import ROW_INPUTS, RowInputs
from nemo_rl.environments.truth_check import check_truths, truth_grader
from nemo_rl.models.generation.registry import engine_rows
from nemo_rl.models.training.backends import training_backend
from nemo_rl.utils.errors import ConfigError

_KEYS = (ROW_INPUTS, f"{ROW_INPUTS}_chosen", f"{ROW_INPUTS}_rejected")


def check_rows(models: Sequence[PolicyConfig], data: RunData, *, sampled: bool) -> None:
    """Check the first row of each data set. Later rows are checked when they are used.

    Args:
        models: Sections of the models that read the rows. The first one is the policy's.
        sampled: Whether the policy's engines continue the rows.

    Raises:
        ConfigError: A row is not accepted. The message names its kind of input, and which models and engines accept it.
    """
    rows = list(chain.from_iterable(map(_first_inputs, _data_sets(data))))
    if not rows:
        return
    for model in models:
        training_backend(model).accepted_rows(model).require(rows)
    generation = models[0].generation
    if sampled and generation is not None:
        engine_rows(generation.backend).require(rows)


def check_known_answers(config: RolloutMasterConfig, data: RunData, own: Collection[str] = ()) -> None:
    """Check that each data set's known answers get a reward when they are graded (`environments.truth_check`).

    Args:
        own: Names of environments that the program supplied. They are not checked.

    Raises:
        DataError: The answers of a data set never get a reward.
    """
    names = {name for _, name in config.env_entries() if name} | set(data.task_env.values())
    names -= {*own, *config.cluster.venvs}
    graders = {
        name: grader
        for name in sorted(names & config.env.keys())
        if (grader := truth_grader(name, config.env[name])) is not None
    }
    check_truths([part for rows in _data_sets(data) for part in rows.parts], graders, data.task_env)


def check_row_fields(config: RolloutMasterConfig, data: RunData) -> None:
    """Check that the first row of each data set has the fields that programs of agents need.

    Raises:
        ConfigError: Fields are missing. The message names the missing fields and the row's fields.
    """
    section = config.env.get("agent")
    if not isinstance(section, AgentEnvironmentConfig) or not section.row_fields:
        return
    for part in (part for rows in _data_sets(data) for part in rows.parts if len(part)):
        datum: dict[str, Any] = dict(part[0])
        task = str(datum.get("task_name"))
        info = datum.get("extra_env_info") or {}
        missing = [name for name in section.row_fields if name not in info]
        if data.task_env.get(task, task) == "agent" and missing:
            raise ConfigError(
                f"env.agent.row_fields names {', '.join(missing)}, which the first row of {part.place(0)[0]} does not "
                f"have. It has: {', '.join(map(str, info)) or 'none'}."
            )


def _data_sets(data: RunData) -> Iterator[MixedDataset]:
    yield from (rows for rows in (data.train, data.validation, *data.named_validation.values()) if rows is not None)


def _first_inputs(rows: MixedDataset) -> Iterator[RowInputs]:
    for part in rows.parts:
        datum: dict[str, Any] = dict(part[0]) if len(part) else {}
        yield from (inputs for key in _KEYS if (inputs := datum.get(key)) is not None)
