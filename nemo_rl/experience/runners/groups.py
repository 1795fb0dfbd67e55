"""Define the groups that a runner actor samples, and their form in calls between actor and driver.

driver: exchange.GroupExchange ── submit([(number, task)], given up) ──► OpenGroups: a task for each group
        FinishedGroups, reference of the tokens ◄── collect ──────────── groups finished since the last call
"""

import asyncio
import pickle
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ray import cloudpickle

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.tensor_transport import pack_tensors
from nemo_rl.experience.idle_shares import BusySeconds
from nemo_rl.experience.rollouts import RolloutKey
from nemo_rl.experience.runners.stored import split
from nemo_rl.experience.trajectory import Rollouts, Trajectory
from nemo_rl.host.boundary import Boundary
from nemo_rl.models.batch_rows import PackedRows
from nemo_rl.models.generation.interfaces import SamplingParams

_TOKENS_OF_A_CALL = 1_000_000
"""Number of tokens after which a call takes no further groups. The tokens of a call use about 10 MB of the object store
until a step has trained on all of them."""

_MOST_UNWANTED = 10_000


@dataclass(frozen=True)
class GroupTask:
    """A group to sample."""

    prompt: BatchedDataDict[Any]
    """The prompt, as a collated batch of one row."""
    num_generations: int
    """Number of samples."""
    sampling: SamplingParams
    key: RolloutKey
    """Key of the rollouts, an argument of `RolloutRunner.play_group`."""


@dataclass(frozen=True)
class GroupError:
    """The error of a group, in a form that can be sent."""

    pickled: bytes
    """The pickled exception. Empty if it cannot be pickled."""
    text: str
    """Traceback of the exception in the runner."""

    @classmethod
    def of(cls, error: Exception) -> "GroupError":
        """Prepare an exception for sending."""
        text = "".join(traceback.format_exception(error))
        with Boundary(Exception):  # an exception may hold any object
            return cls(cloudpickle.dumps(error), text)
        return cls(b"", text)

    def exception(self) -> Exception:
        """Return the exception with its traceback as a note, or a `RuntimeError` if it cannot be unpickled."""
        with Boundary(Exception) as caught:  # this process may lack the exception's modules
            error = pickle.loads(self.pickled)
        if caught or not isinstance(error, Exception):
            return RuntimeError(f"A rollout runner raised an error that cannot be sent:\n{self.text}")
        error.add_note(f"Raised in a rollout runner:\n{self.text}")
        return error


@dataclass(frozen=True)
class FinishedGroups:
    """Groups that the driver takes in one call."""

    groups: list[tuple[int, Rollouts | GroupError]]
    """The number of each group, with its samples and the environments' metrics, or with its error. Only validation
    samples contain their tokens."""
    busy: BusySeconds
    """Seconds of work of the runner's engines and environments since the runner's start."""


class OpenGroups:
    """Running groups of an actor, and finished groups that the driver has not collected, on one event loop.

    Args:
        play: function that samples a group.
    """

    def __init__(self, play: Callable[[GroupTask], Coroutine[Any, Any, Rollouts]]) -> None:
        self._play = play
        self._running: dict[int, asyncio.Task[None]] = {}
        self._finished: deque[tuple[int, str, Rollouts | Exception]] = deque()
        self._has_news = asyncio.Event()
        self._unwanted: deque[int] = deque(maxlen=_MOST_UNWANTED)
        """Numbers of groups that were given up before they arrived. Calls of an actor can change their order."""

    def start(self, number: int, task: GroupTask) -> None:
        """Start to sample a group, unless it has already started or was given up."""
        if number in self._running or number in self._unwanted:
            return
        self._running[number] = asyncio.get_running_loop().create_task(self._finish(number, task))

    def give_up(self, number: int) -> None:
        """End a group that no caller waits for."""
        running = self._running.pop(number, None)
        if running is None:
            self._unwanted.append(number)
        else:
            running.cancel()

    async def _finish(self, number: int, task: GroupTask) -> None:
        outcome: Rollouts | Exception
        try:
            with Boundary(Exception) as caught:  # the driver raises it
                outcome = await self._play(task)
            if caught:
                outcome = caught.take()
        except asyncio.CancelledError:
            if number not in self._running:
                raise  # the group was given up
            outcome = RuntimeError("A part of the group was cancelled in the rollout runner.")
        self._running.pop(number, None)
        self._finished.append((number, task.key.phase, outcome))
        self._has_news.set()

    async def take(self, timeout_s: float) -> list[tuple[int, str, Rollouts | Exception]]:
        """Wait up to `timeout_s` for finished groups, and return the number, phase and outcome of each."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._has_news.wait(), timeout_s)
        taken, num_tokens = [], 0
        while self._finished and num_tokens < _TOKENS_OF_A_CALL:
            taken.append(self._finished.popleft())
            outcome = taken[-1][2]
            num_tokens += 0 if isinstance(outcome, Exception) else sum(each.length for each in outcome.trajectories)
        if not self._finished:
            self._has_news.clear()
        return taken


def for_driver(
    taken: Sequence[tuple[int, str, Rollouts | Exception]], *, reads_collections: bool
) -> tuple[list[tuple[int, Rollouts | GroupError]], PackedRows | None]:
    """Prepare finished groups for sending.

    Args:
        taken: Finished groups, as `OpenGroups.take` returns them.
        reads_collections: Whether an environment reads whole collections (`stored.split`).

    Returns:
        The groups, and the tokens of training groups. None if there is no such group.
    """
    with Boundary(Exception):  # texts and metadata come from environments
        return _packed(taken, reads_collections)
    return _packed([_sendable(each, reads_collections) for each in taken], reads_collections)


def _packed(
    taken: Sequence[tuple[int, str, Rollouts | Exception]], reads_collections: bool
) -> tuple[list[tuple[int, Rollouts | GroupError]], PackedRows | None]:
    played = [(number, phase, each) for number, phase, each in taken if isinstance(each, Rollouts)]
    trained = [each.trajectories for _, phase, each in played if phase == "train" and each.trajectories]
    light, packed = split(trained, reads_collections=reads_collections) if trained else ([], None)
    summaries = iter(light)
    groups: list[tuple[int, Rollouts | GroupError]] = [
        (number, GroupError.of(each)) for number, _, each in taken if isinstance(each, Exception)
    ]
    for number, phase, each in played:
        sent = [next(summaries) if phase == "train" else _sent(sample) for sample in each.trajectories]
        groups.append((number, replace(each, trajectories=sent)))
        # # Metadata may hold any object. Ray pickles all other values, which the library itself makes.
        cloudpickle.dumps([sample.extra_env_info for sample in sent])
    return groups, packed


def _sendable(
    taken: tuple[int, str, Rollouts | Exception], reads_collections: bool
) -> tuple[int, str, Rollouts | Exception]:
    """Return a finished group or, if it cannot be sent, its number with the error."""
    with Boundary(Exception) as caught:  # texts and metadata come from environments
        _packed([taken], reads_collections)
    return (taken[0], taken[1], caught.take()) if caught else taken


def _sent(sample: Trajectory) -> Trajectory:
    """Prepare a sample, including all of its tensors, for sending."""
    for conversation in sample.conversations:
        conversation.message_log = pack_tensors([dict(message) for message in conversation.message_log])
    sample.episode = None
    return sample
