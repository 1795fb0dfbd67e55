"""Compute the rewards of stored samples again: configuration, data, environments, replay, report."""

import argparse
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_rl.commands.regrade.replay import Regraded, replay_all, review_again
from nemo_rl.commands.regrade.stored_samples import StoredSample, read_samples, sample_files
from nemo_rl.config import GRPOMasterConfig, MasterConfig, RolloutMasterConfig, load_config
from nemo_rl.config.loading.algorithms import ALGORITHMS, algorithm_of
from nemo_rl.data.datasets.setup import RunData, setup_response_data
from nemo_rl.data.effort_levels import with_effort_levels
from nemo_rl.data.interfaces import DatumSpec
from nemo_rl.data.messages.content import content_text
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.virtual_cluster import init_ray
from nemo_rl.environments.registry import env_class_path
from nemo_rl.environments.user_environments import environment_of, start_environment
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.penalties import AnswerReview, ReviewSettings
from nemo_rl.files.writing import write_atomically
from nemo_rl.utils.errors import ConfigError

_FILE_WIDTH = 140
"""Width in characters if the output is not a terminal."""
_NUM_SHOWN = 8
_ANSWER_CHARS = 60
_TOLERANCE = 1e-6
"""Largest difference of rewards that count as equal. Stored rewards have all digits, but grouped sums may differ."""


def refuse_existing(file: Path) -> None:
    """Check that a file can be written as a new one.

    Raises:
        ConfigError: the file exists, or its folder does not.
    """
    if file.exists():
        raise ConfigError(f"{file} exists, and rewards are only written to a new file. Choose another with --output.")
    if not file.parent.is_dir():
        raise ConfigError(f"{file.parent} is no folder. Choose another file with --output.")


def write_file(file: Path, samples: Iterable[Regraded]) -> None:
    """Write one line for each sample."""
    write_atomically(file, (json.dumps(_line(each), ensure_ascii=False) + "\n" for each in samples))


def _line(each: Regraded) -> dict[str, object]:
    stored = each.sample.row
    return {
        "file": each.sample.file.name,
        "line": each.sample.line,
        **{key: stored.get(key) for key in ("idx", "group", "sample", "task_name")},
        "environment": each.environment,
        "stored_reward": each.sample.reward,
        "reward": each.reward,
        "reward_components": each.components,
        "penalized_reward": each.penalized_reward,
        "penalties": each.penalties,
        "error": each.error,
        "diverged": each.diverged,
    }


def is_changed(each: Regraded) -> bool:
    """Return whether the reward differs from the stored one. A missing reward differs from every reward."""
    old, new = each.sample.reward, each.reward
    if old is None or new is None:
        return old is not new
    return abs(old - new) > _TOLERANCE


def write_tables(samples: Sequence[Regraded]) -> None:
    """Write a line for each file, and the most frequent and the largest changes, to standard output."""
    is_file = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    console = Console(file=sys.stdout, width=_FILE_WIDTH if is_file else None)
    columns = ("file", "samples", "changed", "mean before", "mean now", "no reward before", "no reward now", "diverged")
    console.print(_table(columns, _file_lines(samples)))
    changed = [each for each in samples if is_changed(each)]
    if changed:
        counted = Counter((_text(each.sample.reward), _text(each.reward)) for each in changed)
        lines = [(before, now, str(number)) for (before, now), number in counted.most_common(_NUM_SHOWN)]
        console.print(_table(("before", "now", "samples"), lines))
        largest = sorted(changed, key=_size, reverse=True)[:_NUM_SHOWN]
        titles = ("sample", "before", "now", "answer, or why there is no reward")
        console.print(_table(titles, map(_change_line, largest)))
    console.print(Text(f"{len(changed)} of {len(samples)} rewards changed."))
    reviewed = [each for each in samples if each.penalties is not None]
    if reviewed:
        before = sum(any((each.sample.row.get("penalties") or {}).values()) for each in reviewed)
        now = sum(any((each.penalties or {}).values()) for each in reviewed)
        console.print(Text(f"{now} of {len(reviewed)} training samples are penalized now, {before} were before."))


def _table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for title in columns:
        table.add_column(title, overflow="fold")
    for line in lines:
        table.add_row(*map(Text, line))
    return table


def _file_lines(samples: Sequence[Regraded]) -> Iterator[tuple[str, ...]]:
    for name, group in groupby(samples, key=lambda each: each.sample.file.name):
        found = list(group)
        before, now = [each.sample.reward for each in found], [each.reward for each in found]
        numbers = (len(found), sum(map(is_changed, found)))
        means = (_mean(before), _mean(now))
        missing = (before.count(None), now.count(None), sum(each.diverged is not None for each in found))
        yield (name, *map(str, numbers), *means, *map(str, missing))


def _change_line(each: Regraded) -> tuple[str, ...]:
    why = each.error or _end_of_answer(each)
    return each.sample.place, _text(each.sample.reward), _text(each.reward), why


def _mean(rewards: Sequence[float | None]) -> str:
    known = [reward for reward in rewards if reward is not None]
    return f"{fmean(known):.4f}" if known else "-"


def _text(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:.4g}"


def _size(each: Regraded) -> float:
    """Return the size of a change, which is largest for a reward that appears or disappears."""
    old, new = each.sample.reward, each.reward
    return float("inf") if old is None or new is None else abs(old - new)


def _end_of_answer(each: Regraded) -> str:
    return content_text(each.sample.row["content"][-1]["content"])[-_ANSWER_CHARS:].replace("\n", " ")


logger = logging.getLogger(__name__)

type Work = tuple[StoredSample, DatumSpec]


def regrade(arguments: argparse.Namespace) -> None:
    """Compute the rewards that a command line requests, write them and show the differences.

    Raises:
        ConfigError, DataError: the command line, the configuration, the data or a stored sample cannot be used.
    """
    files = sample_files(arguments.folder, arguments.only)
    output: Path = arguments.output or files[0].parent / "regraded.jsonl"
    refuse_existing(output)
    config = _configuration(arguments.config, arguments.overrides)
    samples = [sample for file in files for sample in read_samples(file)]
    by_environment = _by_environment(samples, arguments.environment)
    _check_names(by_environment, config)
    tokenizer = get_tokenizer(config.policy.tokenizer)
    data = setup_response_data(tokenizer, config.data, config.env)
    review = None
    if isinstance(config, GRPOMasterConfig):
        data = with_effort_levels(data, config.effort_levels, config.grpo.seed, tokenizer, config.data)
        review = ReviewSettings(config.reward_penalties).make(tokenizer)
    graded = _graded({name: _with_data(found, data) for name, found in by_environment.items()}, config)
    if isinstance(review, AnswerReview):
        review_again(graded, review)
    graded.sort(key=lambda each: (files.index(each.sample.file), each.sample.line))
    write_file(output, graded)
    write_tables(graded)
    logger.info("New rewards are in %s", output)


def _configuration(file: Path, overrides: Sequence[str]) -> RolloutMasterConfig:
    """Load the configuration of a run that samples."""
    algorithm = algorithm_of(file)
    schema = ALGORITHMS[algorithm]
    if not issubclass(schema, RolloutMasterConfig):
        raise ConfigError(f"{file} is for {algorithm}, which rewards no samples. Give the file of a GRPO run.")
    config = load_config(file, overrides, schema=schema)
    assert isinstance(config, MasterConfig)
    return config


def _by_environment(samples: Sequence[StoredSample], name: str | None) -> dict[str, list[StoredSample]]:
    """Group samples by the environment that computes the new reward: the named environment, or the run's."""
    groups: dict[str, list[StoredSample]] = {}
    for sample in samples:
        groups.setdefault(name or str(sample.row["task_name"]), []).append(sample)
    return groups


def _check_names(environments: Mapping[str, object], config: RolloutMasterConfig) -> None:
    """Check that the configuration has the environments."""
    for name in environments:
        if name not in config.env:
            known = ", ".join(sorted(config.env)) or "none"
            raise ConfigError(
                f"env has no environment {name!r}, which the samples need; there are: {known}. Add its section to the "
                "configuration, or choose one with --environment."
            )


def _with_data(samples: Sequence[StoredSample], data: RunData) -> list[Work]:
    """Give each sample the datum of its row, reading each row once."""
    sets = {"train": data.train, "validation": data.all_validation}
    read: dict[tuple[str, int], DatumSpec] = {}
    for sample in samples:
        rows, idx = sets[sample.phase], int(sample.row["idx"])
        if rows is None or idx >= len(rows):
            raise ConfigError(
                f"{sample.place} is an answer to row {idx} of the {sample.phase} data, which has "
                f"{0 if rows is None else len(rows)} rows here. Give the configuration of the run."
            )
        if (sample.phase, idx) not in read:
            read[sample.phase, idx] = rows[idx]
    return [(sample, read[sample.phase, int(sample.row["idx"])]) for sample in samples]


def _graded(work: Mapping[str, Sequence[Work]], config: RolloutMasterConfig) -> list[Regraded]:
    """Start the environments and play the samples again."""
    cluster = config.cluster
    init_ray(optimizations=cluster.optimizations)
    graded: list[Regraded] = []
    with ExitStack() as resources:
        loop = EventLoopThread()
        resources.callback(loop.close)
        for name, samples in work.items():
            started = environment_of(name, env_class_path(name, config.env[name]))
            environment = start_environment(started, config.env[name], cluster, resources)
            limit_s = cluster.timeouts.rollout_s
            graded += loop.run(replay_all(samples, name, environment), limit_s, f"The rewards of {name!r}")
    return graded
