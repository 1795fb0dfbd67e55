"""Compute the rewards of stored samples again: configuration, data, environments, replay, report."""

import argparse
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from nemo_rl.commands.regrade.penalties import review_again
from nemo_rl.commands.regrade.replay import Regraded, replay_all
from nemo_rl.commands.regrade.report import refuse_existing, write_file, write_tables
from nemo_rl.commands.regrade.stored_samples import StoredSample, read_samples, sample_files
from nemo_rl.config import GRPOMasterConfig, MasterConfig, RolloutMasterConfig, load_config
from nemo_rl.config.loading.algorithms import ALGORITHMS, algorithm_of
from nemo_rl.data.datasets.setup import RunData, setup_response_data
from nemo_rl.data.effort_levels import with_effort_levels
from nemo_rl.data.interfaces import DatumSpec
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.virtual_cluster import init_ray
from nemo_rl.environments.registry import env_class_path
from nemo_rl.environments.user_environments import environment_of, start_environment
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.penalties.review import AnswerReview, ReviewSettings
from nemo_rl.utils.errors import ConfigError

logger = logging.getLogger(__name__)

type Work = tuple[StoredSample, DatumSpec]


def regrade(arguments: argparse.Namespace) -> None:
    """Compute the rewards that a command line asks for, write them and show the differences.

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
    """Group samples by the environment that rewards them now: the named one, or that of the run."""
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
    """Give each sample the datum of its row; each row is read once.

    Raises:
        ConfigError: the data has no such row.
    """
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
            started = environment_of(name, env_class_path(name))
            environment = start_environment(started, config.env[name], cluster, resources)
            limit_s = cluster.timeouts.rollout_s
            graded += loop.run(replay_all(samples, name, environment), limit_s, f"The rewards of {name!r}")
    return graded
