"""Sample trajectories from prompts, with one coroutine per sample that calls engine and environment in turn.

The samples of one prompt form a group, the unit of work.

    collect(), stream() (training thread) ─► event loop: one _play_group per prompt, then post-processing
    start_group() ─► event loop: one play_group in the background, which outlives the call
        _play_group: one task per sample (`samples.SamplePlayer`), then post-processing where the environment allows it

Samples never wait for each other, so a long sample does not delay short ones. A sample does not wait until its episode
is closed, because an environment that handles one call at a time may be busy with another sample. Training, validation
and evaluation use the same code, for one turn and for many turns.

The deadline of a collection is `RolloutLimits.timeout_s` after its start. A group that is started alone has the same
deadline. Collections and such groups do not wait for each other's samples or episodes.
"""

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.compat.public_names import public_names
from nemo_rl.config.schema.agents import AgentEndpointConfig
from nemo_rl.data.messages.content import TextRules
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.event_loop import CLEAN_UP_S, BackgroundTask, EventLoopThread
from nemo_rl.experience.idle_shares import BusySeconds
from nemo_rl.experience.metrics import mean_metrics
from nemo_rl.experience.penalties import Review, nothing
from nemo_rl.experience.post_processing import post_process
from nemo_rl.experience.progress import GroupProgress, StoredSamples, states_of
from nemo_rl.experience.samples import CLOSING_S, Closings, EnvironmentPort, RolloutKey, RolloutLimits, SamplePlayer
from nemo_rl.experience.trajectory import Rollouts, Trajectory
from nemo_rl.models.generation.interfaces import GenerationInterface, SamplingParams
from nemo_rl.optimizations.process_tuning import search_all_objects_rarely
from nemo_rl.optimizations.switch import Choice, is_on
from nemo_rl.utils.errors import ConfigError, DeadlineExceededError

__getattr__ = public_names(__name__)

_MANY_SAMPLES = 4096
"""Number of samples of a collection above which full garbage collections took a third of the driver's time."""


class Collection:
    """Iterable over the groups of a collection (a prompt's samples in order), each when it is finished.

    Environments may correct rewards in place after all groups are finished and before the iteration ends.

    Args:
        groups: Generator that yields the groups and returns the metrics.
    """

    def __init__(self, groups: Generator[list[Trajectory], None, dict[str, float]]):
        self._groups = groups
        self.metrics: dict[str, float] = {}
        """Metrics of environments. Empty until all groups are finished."""

    def __iter__(self) -> Iterator[list[Trajectory]]:
        self.metrics = yield from self._groups


class RolloutRunner:
    """Sample rollouts and collect their trajectories.

    Args:
        environments: Environments by task name.
        tokenizer: Decodes responses without a text, and encodes observations.
        limits: Limits of tokens, turns and time.
        loop: Loop that runs the coroutines.
        text_rules: Rules that choose texts whose control tokens are encoded as ordinary text. If None, `TextRules()`.
        review: Function that stores its findings, such as penalties, on finished samples.
        endpoint: Section of the endpoint for agents. If None, its defaults.
    """

    def __init__(
        self,
        generation: GenerationInterface,
        environments: Mapping[str, EnvironmentPort],
        tokenizer: PreTrainedTokenizerBase,
        limits: RolloutLimits,
        loop: EventLoopThread,
        text_rules: TextRules | None = None,
        optimizations: Choice = "auto",
        review: Review = nothing,
        endpoint: AgentEndpointConfig | None = None,
    ):
        self._generation = generation
        self._review = review
        self._optimizations: Choice = optimizations
        self._environments = environments
        self._samples = SamplePlayer(generation, environments, tokenizer, limits, text_rules, endpoint)
        self._limits = limits
        self._loop = loop
        self._started: set[BackgroundTask[Rollouts]] = set()

    def collect(
        self,
        prompts: BatchedDataDict[Any],
        num_generations: int,
        sampling: SamplingParams,
        key: RolloutKey,
    ) -> Rollouts:
        """Sample as `stream` does, and return all trajectories with the metrics, ordered by prompt and sample."""
        collection = self.stream(prompts, num_generations, sampling, key)
        trajectories = [sample for group in collection for sample in group]
        trajectories.sort(key=lambda t: (t.group_index, t.sample_index))
        return Rollouts(trajectories, collection.metrics)

    def stream(
        self,
        prompts: BatchedDataDict[Any],
        num_generations: int,
        sampling: SamplingParams,
        key: RolloutKey,
    ) -> Collection:
        """Sample `num_generations` responses per prompt.

        Args:
            prompts: Collated `DatumSpec` rows.
            num_generations: Number of samples per prompt.
            key: Key of the collection.

        Raises:
            ConfigError: A prompt names an environment that is not running.
            DeadlineExceededError: The collection takes longer than the limit.
        """
        groups = self._loop.stream(
            partial(self._run_all, prompts, num_generations, sampling, key),
            self._limits.timeout_s,
            f"The rollouts of {key.phase} step {key.step} (cluster.timeouts.rollout_s)",
            self._generation.describe_open,
            prompts.size,
        )
        return Collection(groups)

    def start_group(
        self,
        prompts: BatchedDataDict[Any],
        row: int,
        num_generations: int,
        sampling: SamplingParams,
        key: RolloutKey,
    ) -> BackgroundTask[Rollouts]:
        """Start `play_group` in the background, and return immediately. The group ends within `group_limit_s`.

        Raises:
            ConfigError: the prompt names an environment that is not running.
        """
        self._check_environments([prompts["task_name"][row]])
        return self.start(
            self.play_group(prompts, row, num_generations, sampling, key),
            f"the sampling of prompt {key.first_group + row} of {key.phase} step {key.step}",
        )

    def start(
        self, group: Coroutine[Any, Any, Rollouts], name: str, *, through_updates: bool = False
    ) -> BackgroundTask[Rollouts]:
        """Start a coroutine that samples a group in the background, and return immediately.

        Args:
            group: Coroutine that samples within a time limit, such as `play_group` or `play`.
            name: Name of the task in errors and logs.
            through_updates: Whether the group continues through weight updates. If so, `wait_for_groups` skips it.
        """
        task = self._loop.start(group, name)
        if not through_updates:
            self._started = {task, *(other for other in self._started if not other.is_done)}
        return task

    def starting_together(self) -> AbstractContextManager[None]:
        """Begin all groups that are started in the `with` block at once, so that their requests are sent together."""
        return self._loop.together()

    @property
    def group_limit_s(self) -> float:
        """Number of seconds within which a started group ends, including the closing of its episodes."""
        return self._limits.timeout_s + CLOSING_S + 2 * CLEAN_UP_S

    def wait_for_groups(self) -> None:
        """Wait until no started group is running, except groups that continue while engines get new weights.

        Failures of groups are raised by the results of their tasks, not here.

        Raises:
            DeadlineExceededError: a group has not ended after `group_limit_s`.
        """
        for task in self._started:
            task.wait(self.group_limit_s)
        self._started.clear()

    def keep(self, rollouts: Rollouts) -> Rollouts:
        """Convert the group of a checkpoint to the form in which this runner returns sampled groups."""
        return rollouts

    def failed_group(self, prompts: BatchedDataDict[Any], row: int, num_generations: int, reason: str) -> Rollouts:
        """Return failed samples of one prompt, without responses and rewards.

        Args:
            prompts: Collated `DatumSpec` rows.
            row: Index of the prompt among the rows, which is the group's index.
            num_generations: Number of samples.
            reason: Text for `Trajectory.error` of each sample.
        """
        samples = _starts(prompts, row, num_generations)
        for sample in samples:
            sample.fail(reason)
        return self.keep(Rollouts(samples, {}))

    def stored_samples(self, groups: Sequence[GroupProgress]) -> list[StoredSamples | None]:
        """Return the samples of groups for a checkpoint, without interrupting them (`progress.states_of`).

        Raises:
            DeadlineExceededError: it takes longer than `RolloutLimits.timeout_s`.
        """

        def can_continue(sample: Trajectory) -> bool:
            return self._environments[sample.task_name].continues_episodes

        asking = self._loop.start(states_of(groups, self._generation, can_continue), "the storing of unfinished groups")
        asking.wait(self._limits.timeout_s)  # the step that takes a group raises its failure
        return asking.future.result()

    def busy_seconds(self) -> BusySeconds:
        """Return the seconds in which engines and environments have worked."""
        return BusySeconds(self._generation.busy_seconds(), self._samples.environments_busy.seconds)

    def post_process(self, groups: Sequence[Rollouts]) -> dict[str, float]:
        """Post-process groups that were sampled separately, with the environments that process whole collections.

        Returns:
            The metrics of the groups and of these environments.

        Raises:
            DeadlineExceededError: it takes longer than `RolloutLimits.timeout_s`.
        """
        return self._loop.run(self._post_process(groups), self._limits.timeout_s, "The post-processing of rollouts")

    async def play_group(
        self,
        prompts: BatchedDataDict[Any],
        row: int,
        num_generations: int,
        sampling: SamplingParams,
        key: RolloutKey,
        progress: GroupProgress | None = None,
    ) -> Rollouts:
        """Sample `num_generations` responses to one prompt. They are the same as in a collection of `prompts`.

        Returns after the group's episodes are closed, or at most `CLOSING_S` after the last answer. Environments with
        `post_processes_groups` have then corrected the rewards. Other environments correct rewards in `post_process`.

        Args:
            prompts: Collated `DatumSpec` rows.
            row: Index of the prompt among the rows, which is the group's index.
            num_generations: Number of samples.
            key: Key of the collection.
            progress: Stored states from which samples continue. It is updated for `stored_samples`.

        Raises:
            ConfigError: The prompt names an environment that is not running.
            DeadlineExceededError: The group takes longer than `RolloutLimits.timeout_s`.
        """
        self._check_environments([prompts["task_name"][row]])
        closings = Closings("group")
        playing = self._play_group(prompts, row, num_generations, sampling, key, closings, progress)
        try:
            return await self._within_limit(playing, f"prompt {key.first_group + row} of {key.phase} step {key.step}")
        finally:
            await closings.wait()

    async def play(
        self, prompts: BatchedDataDict[Any], num_generations: int, sampling: SamplingParams, key: RolloutKey
    ) -> Rollouts:
        """Sample as `collect` does, as a coroutine. Arguments and errors are those of `stream`."""
        samples: list[Trajectory] = []
        playing = self._run_all(prompts, num_generations, sampling, key, samples.extend)
        metrics = await self._within_limit(playing, f"{key.phase} step {key.step}")
        return Rollouts(sorted(samples, key=lambda t: (t.group_index, t.sample_index)), metrics)

    async def _within_limit[T](self, playing: Coroutine[Any, Any, T], what: str) -> T:
        """Run a coroutine to its end, or cancel it after `RolloutLimits.timeout_s`."""
        task = asyncio.ensure_future(playing)
        try:
            finished, _ = await asyncio.wait([task], timeout=self._limits.timeout_s)
            if not finished:
                is_open = await asyncio.to_thread(self._generation.describe_open)
                limit = f"{self._limits.timeout_s:g} s (cluster.timeouts.rollout_s)"
                raise DeadlineExceededError(
                    f"The rollouts of {what} did not finish within {limit}.\n{is_open}".rstrip()
                )
            return task.result()
        finally:
            if task.cancel():
                await asyncio.wait([task], timeout=CLEAN_UP_S)

    async def _run_all(
        self,
        prompts: BatchedDataDict[Any],
        num_generations: int,
        sampling: SamplingParams,
        key: RolloutKey,
        hand_over: Callable[[list[Trajectory]], None],
    ) -> dict[str, float]:
        if prompts.size * num_generations >= _MANY_SAMPLES and is_on("garbage_collection", self._optimizations):
            search_all_objects_rarely()
        self._check_environments(prompts["task_name"])
        closings = Closings("collection")

        async def play(row: int) -> Rollouts:
            group = await self._play_group(prompts, row, num_generations, sampling, key, closings)
            hand_over(group.trajectories)
            return group

        try:
            groups = await _all_or_first_failure(play(row) for row in range(prompts.size))
        finally:
            await closings.wait()
        return await self._post_process(groups)

    async def _play_group(
        self,
        prompts: BatchedDataDict[Any],
        row: int,
        num_generations: int,
        sampling: SamplingParams,
        key: RolloutKey,
        closings: Closings,
        progress: GroupProgress | None = None,
    ) -> Rollouts:
        """Sample and review answers to one prompt. Environments with `post_processes_groups` post-process them."""
        stops = (prompts.get("stop_strings") or [None] * prompts.size)[row]
        progress = progress or GroupProgress()
        playing = progress.begin(_starts(prompts, row, num_generations))
        samples = await _all_or_first_failure(
            self._samples.play(sample, sampling, stops, key, closings) for sample in playing
        )
        self._review(samples)
        progress.rollouts = Rollouts(samples, await post_process(self._by_unit(groups=True), samples))
        return progress.rollouts

    async def _post_process(self, groups: Sequence[Rollouts]) -> dict[str, float]:
        """Let environments post-process a collection whose groups are finished."""
        samples = [sample for group in groups for sample in group.trajectories]
        return mean_metrics(groups) | await post_process(self._by_unit(groups=False), samples)

    def _by_unit(self, *, groups: bool) -> dict[str, EnvironmentPort]:
        """Return the environments that post-process single groups, or those that post-process collections."""
        return {name: each for name, each in self._environments.items() if each.post_processes_groups == groups}

    def _check_environments(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._environments:
                raise ConfigError(
                    f"A prompt asks for environment {name!r}; running are {sorted(self._environments)}. Add it "
                    "under `env:` or change its `env_name`."
                )


async def _all_or_first_failure[T](coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently. After the first failure, cancel the others and raise the failure unchanged.

    Usually all coroutines fail for the same reason. The first failure is raised outside of the `except` block, so that
    it keeps its cause (the worker's traceback) and is not printed with hundreds of other failures.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(coroutine) for coroutine in coroutines]
    except ExceptionGroup as failures:
        failure = failures.exceptions[0]
    else:
        return [task.result() for task in running]
    raise failure


def _starts(prompts: BatchedDataDict[Any], group: int, num_generations: int) -> list[Trajectory]:
    """Make the empty trajectories of one prompt, each with its own copy of the message list."""
    messages, chats, inputs = prompts["message_log"][group], prompts.get("chat"), prompts.get("row_inputs")
    efforts = prompts.get("effort")
    shared = {
        "idx": int(prompts["idx"][group]),
        "task_name": prompts["task_name"][group],
        "prompt_length": sum(len(message["token_ids"]) for message in messages),
        "loss_multiplier": float(prompts["loss_multiplier"][group]),
        "extra_env_info": prompts["extra_env_info"][group],
        "chat": chats[group] if chats else None,
        "row_inputs": inputs[group] if inputs else None,
        "effort": efforts[group] if efforts else None,
    }
    return [
        Trajectory(group, sample, message_log=[dict(message) for message in messages], **shared)
        for sample in range(num_generations)
    ]
