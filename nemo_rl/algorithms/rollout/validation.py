"""Validate the policy on held-out prompts, with the same rollouts as in training.

    overlap.validation=stop             training waits until all answers are graded
    overlap.validation=hold_updates     training goes on; the next weights reach the engines after the validation
    overlap.validation=through_updates  training goes on; answers continue with new weights

Invariant: the random numbers of a sample depend only on its prompt and the run's seed, not on `val_batch_size` or the
order of prompts, so two validations of the same weights give the same numbers, and the curves of two runs can be
compared. With `policy.zero_mismatch`, this holds for other batches and numbers of engines too, in all bits.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_rl.algorithms.rollout.refit import Refitter
from nemo_rl.algorithms.runtime.validations import InTurn, Validation, ValidationResult
from nemo_rl.config import RolloutTrainingConfig
from nemo_rl.config.base.names import VERSION_METRICS
from nemo_rl.data.datasets.setup import RunData
from nemo_rl.data.loader import build_loader
from nemo_rl.data.prompt_identity import PromptIdentities
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.event_loop import BackgroundTask
from nemo_rl.experience.metrics import mean_metrics, validation_metrics
from nemo_rl.experience.rollouts import RolloutKey, RolloutRunner
from nemo_rl.experience.trajectory import Rollouts, Trajectory
from nemo_rl.experience.trajectory_log import TrajectoryLog, turns_to_show
from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.utils.logger import print_message_log_samples


@dataclass(frozen=True)
class Validator:
    """Validate on a fixed set of prompts."""

    batches: Iterable[BatchedDataDict[Any]]
    """Collated prompts. Each validation iterates over them again."""
    runner: RolloutRunner
    """Runner that samples the answers."""
    sampling: SamplingParams
    """Sampling parameters."""
    num_generations: int
    """Number of samples per prompt."""
    run_seed: int
    tasks: Collection[str] = ()
    """Names of the run's environments. If there are several, each has its own metrics."""
    name_of: Callable[[int], str | None] = lambda idx: None
    """Function that returns the name of a row's data set, or None. Each named data set has its own metrics."""

    def validate(self) -> Rollouts:
        """Sample answers to all validation prompts. Return trajectories, and metrics for the prefix `validation/`."""
        identities = PromptIdentities()
        return self._joined(
            [
                self.runner.collect(prompts, self.num_generations, self.sampling, self._key(identities.of(prompts)))
                for prompts in self.batches
            ]
        )

    async def play(self, batches: Sequence[BatchedDataDict[Any]]) -> Rollouts:
        """Validate with prompts that are already loaded, as a coroutine."""
        identities = PromptIdentities()
        return self._joined(
            [
                await self.runner.play(prompts, self.num_generations, self.sampling, self._key(identities.of(prompts)))
                for prompts in batches
            ]
        )

    def _key(self, prompts: tuple[str, ...]) -> RolloutKey:
        return RolloutKey(self.run_seed, "validation", step=0, prompts=prompts)

    def _joined(self, collections: Sequence[Rollouts]) -> Rollouts:
        """Renumber the groups of all batches in one sequence, and compute the metrics."""
        trajectories: list[Trajectory] = []
        for collection in collections:
            offset = trajectories[-1].group_index + 1 if trajectories else 0
            for trajectory in collection.trajectories:
                trajectory.group_index += offset
            trajectories += collection.trajectories
        metrics = mean_metrics(collections) | validation_metrics(trajectories, self.num_generations)
        return Rollouts(trajectories, metrics | self._by_group(trajectories))

    def _by_group(self, trajectories: list[Trajectory]) -> dict[str, float]:
        """Return the metrics of each environment, if there are several, and of each data set with a name."""
        groups: dict[str, list[Trajectory]] = defaultdict(list)
        for trajectory in trajectories:
            if len(self.tasks) > 1:
                groups[trajectory.task_name].append(trajectory)
            if (name := self.name_of(trajectory.idx)) is not None:
                groups[name].append(trajectory)
        metrics: dict[str, float] = {}
        for group, own in groups.items():
            found = validation_metrics(own, self.num_generations)
            metrics |= {f"{group}/{name}": value for name, value in found.items()}
        return metrics


@dataclass(frozen=True)
class ValidationReport:
    """Writer of the samples of a validation to the log, which also prints some of them."""

    trajectory_log: TrajectoryLog
    """Log that the samples are written to."""
    num_printed: int
    """Number of samples to print."""

    def write(self, step: int, trajectories: list[Trajectory]) -> None:
        """Write the samples of the validation after a step."""
        self.trajectory_log.write_validation(step, trajectories)
        if self.num_printed:
            logs = [turns_to_show(t) for t in trajectories]
            rewards = [t.reward if t.reward is not None else math.nan for t in trajectories]
            print_message_log_samples(logs, rewards, self.num_printed, step)


@dataclass
class _Running:
    """A validation in the background."""

    step: int
    task: BackgroundTask[Rollouts]
    limit_s: float
    started: float = field(default_factory=time.perf_counter)
    ended: float | None = None
    waited_s: float = 0.0

    def __post_init__(self) -> None:
        self.task.future.add_done_callback(lambda _: self._end())

    def _end(self) -> None:
        self.ended = time.perf_counter()

    def wait(self) -> None:
        """Wait for the end, and add the waiting time. A failure is raised by the task's result, not here."""
        started = time.perf_counter()
        self.task.wait(self.limit_s)
        woken = time.perf_counter()
        # # This thread may wake up later than the validation ends.
        self.waited_s += max(0.0, min(woken, self.ended or woken) - started)


@dataclass
class BackgroundValidation:
    """Validation that runs while training continues (`runtime.validations.Validation`).

    All prompts are loaded before it starts.
    """

    validator: Validator
    """Validator that samples the answers."""
    ensure_fresh: Callable[[], None]
    """Object that sends the policy's weights to the engines."""
    report: ValidationReport
    """Writes the samples."""
    _running: _Running | None = field(default=None, init=False)

    def start(self, step: int) -> None:
        """Send the weights to the engines, and start the validation in the background (`Validation.start`)."""
        self.ensure_fresh()
        batches, runner = list(self.validator.batches), self.validator.runner
        # With `through_updates`, `wait_for_groups` does not wait for the validation: a checkpoint must not wait for it.
        task = runner.start(self.validator.play(batches), f"the validation after step {step}", through_updates=True)
        self._running = _Running(step, task, limit_s=len(batches) * runner.group_limit_s)

    def wait(self) -> None:
        """Wait for the running validation, if there is one. `finished` raises its failure.

        Raises:
            DeadlineExceededError: The validation has not ended within the time limits of all of its batches.
        """
        if self._running is not None:
            self._running.wait()

    def finished(self, *, wait: bool) -> ValidationResult | None:
        """Return the result of the validation once it has ended (`Validation.finished`).

        The metrics `min_weight_version` and `max_weight_version` are the oldest and newest weights that wrote answers.
        """
        running = self._running
        if running is None or not (wait or running.task.is_done):
            return None
        running.wait()
        self._running = None
        rollouts = running.task.result(running.limit_s)
        self.report.write(running.step, rollouts.trajectories)
        ended = running.ended or time.perf_counter()
        metrics = rollouts.metrics | _version_metrics(rollouts.trajectories)
        return ValidationResult(running.step, metrics, ended - running.started, running.waited_s)

    def cancel(self) -> None:
        """Cancel the running validation (`Validation.cancel`)."""
        if self._running is not None:
            self._running.task.cancel()
            self._running = None


def _version_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the oldest and newest weight versions that wrote answers, or no metrics without answers."""
    versions = [span.version for trajectory in trajectories for span in trajectory.all_weight_versions]
    if not versions:
        return {}
    oldest, newest = VERSION_METRICS
    return {oldest: float(min(versions)), newest: float(max(versions))}


def make_validation(
    data: RunData,
    algorithm: RolloutTrainingConfig,
    sampling: SamplingParams,
    runner: RolloutRunner,
    report: ValidationReport,
    refitter: Refitter,
) -> Validation | None:
    """Build the validation of a run, or return None without validation data."""
    prompts = data.all_validation
    if prompts is None:
        return None
    rows = prompts.first_rows(algorithm.max_val_samples or len(prompts))
    batch_size = min(algorithm.val_batch_size or len(rows), len(rows))
    validator = Validator(
        build_loader(rows, batch_size, shuffle=False, seed=algorithm.seed, drop_last=False),
        runner,
        sampling,
        algorithm.val_num_generations_per_prompt,
        algorithm.seed,
        sorted(set(data.task_env.values())),
        prompts.name_of,
    )
    return overlapped(algorithm.overlap.validation, validator, report, refitter)


def overlapped(choice: str, validator: Validator, report: ValidationReport, refitter: Refitter) -> Validation:
    """Return a validation that runs during training, or one for which training waits.

    Args:
        choice: Value of `overlap.validation`.
        refitter: Sends the policy's weights to the engines. With `hold_updates` it first waits for the validation.
    """
    if choice == "stop":

        def validate(step: int) -> dict[str, float]:
            refitter.ensure_fresh()
            rollouts = validator.validate()
            report.write(step, rollouts.trajectories)
            return rollouts.metrics

        return InTurn(validate)
    validation = BackgroundValidation(validator, refitter.ensure_fresh, report)
    if choice == "hold_updates":
        refitter.before_update.append(validation.wait)
    return validation
