"""Start the actors of an environment, and divide episodes among them."""

import asyncio
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from nemo_rl.environments.interfaces import EnvironmentInterface, EpisodeStart, StepResult
from nemo_rl.environments.workers.client import EnvironmentClient
from nemo_rl.environments.workers.loading import EnvironmentClass, WorkerKeys

if TYPE_CHECKING:
    from nemo_rl.data.interfaces import LLMMessageLogType
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict


@dataclass(eq=False)
class _Worker:
    """One actor, and the number of its episodes."""

    client: EnvironmentClient
    num_episodes: int = 0


class EnvironmentPool:
    """Several actors of one environment, with the methods of `EnvironmentClient`.

    Args:
        max_open_episodes: largest number of open episodes, or None for no limit. Others wait until one is closed.
    """

    def __init__(self, clients: Sequence[EnvironmentClient], max_open_episodes: int | None = None) -> None:
        self.name = clients[0].name
        self._workers = [_Worker(client) for client in clients]
        self._max_open_episodes = max_open_episodes
        self._place: ContextVar[_Worker | None] = ContextVar(f"place in {self.name}", default=None)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._free: asyncio.Semaphore | None = None

    @property
    def num_restarts(self) -> int:
        """The number of times that an actor was replaced."""
        return sum(worker.client.num_restarts for worker in self._workers)

    @property
    def num_calls(self) -> int:
        """The number of Ray calls to all actors."""
        return sum(worker.client.num_calls for worker in self._workers)

    @property
    def post_processes_groups(self) -> bool:
        """True if groups are post-processed one by one (`EnvironmentInterface.post_processes_groups`)."""
        return self._workers[0].client.post_processes_groups

    @property
    def reads_chat(self) -> bool:
        """True if the prompt's messages are read (`EnvironmentInterface.reads_chat`)."""
        return self._workers[0].client.reads_chat

    @property
    def continues_episodes(self) -> bool:
        """True if a new process can continue episodes (`EnvironmentInterface.continues_episodes`)."""
        return self._workers[0].client.continues_episodes

    @property
    def agent_section(self) -> Mapping[str, Any] | None:
        """Section of an environment that runs agents, or None (`EnvironmentClient.agent_section`)."""
        return self._workers[0].client.agent_section

    @property
    def reads_collections(self) -> bool:
        """True if whole collections are read (`EnvironmentClient.reads_collections`)."""
        return self._workers[0].client.reads_collections

    async def open_episode(self, metadata: Any, seed: int | None = None) -> EpisodeStart[Any]:
        """Choose an actor for the episode and open the episode there, after waiting if too many episodes are open."""
        return await (await self._take_place()).open_episode(metadata, seed)

    async def step(self, message_log: "LLMMessageLogType", metadata: Any) -> StepResult:
        """Take one turn of a conversation. If the episode was never opened, choose an actor first."""
        place = self._place.get()
        client = place.client if place is not None else await self._take_place()
        return await client.step(message_log, metadata)

    async def close_episode(self, metadata: Any) -> None:
        """Close the episode, and let a waiting one be opened. Do nothing if the episode has no actor."""
        place = self._place.get()
        if place is None:
            return
        self._place.set(None)
        try:
            await place.client.close_episode(metadata)
        finally:
            place.num_episodes -= 1
            if self._free is not None:
                self._free.release()

    async def global_post_process_and_metrics(
        self, batch: "BatchedDataDict[Any]"
    ) -> tuple["BatchedDataDict[Any]", dict[str, float | int]]:
        """Let the first actor correct rewards and return metrics of whole collections."""
        return await self._workers[0].client.global_post_process_and_metrics(batch)

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Stop all actors and everything they started, so that later steps raise. A second call does nothing.

        Args:
            timeout_s: Time limit in seconds for the environment's own `shutdown`, after which an actor is killed.
        """
        for worker in self._workers:
            worker.client.shutdown(timeout_s)

    async def _take_place(self) -> EnvironmentClient:
        """Wait until the limit allows one more episode, and return the client of the actor with the fewest episodes."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # no episode outlives its event loop
            self._loop = loop
            self._free = None if self._max_open_episodes is None else asyncio.Semaphore(self._max_open_episodes)
            for worker in self._workers:
                worker.num_episodes = 0
        if self._free is not None:
            await self._free.acquire()
        worker = min(self._workers, key=lambda each: each.num_episodes)
        worker.num_episodes += 1
        self._place.set(worker)
        return worker.client


type Environment = EnvironmentClient | EnvironmentPool


def start_workers(
    name: str,
    env_class: str | EnvironmentClass | EnvironmentInterface[Any],
    cfg: dict[str, Any],
    keys: WorkerKeys,
    *,
    start_timeout_s: float = 300.0,
    max_restarts: int = 10,
    runtime_env: Mapping[str, Any] | None = None,
) -> Environment:
    """Start the actors of an environment in the background. Several actors are started if its class is `pooled`.

    Args:
        name: For logs and errors, usually the task name.
        env_class: A class, its dotted path, or an environment object.
        cfg: Argument of the class's constructor.
        keys: Number of actors, and their limits.
        start_timeout_s: See `EnvironmentClient`.
        max_restarts: See `EnvironmentClient`; the limit is that of each actor.
        runtime_env: See `EnvironmentClient`.

    Raises:
        ConfigError: There is no such class.
    """
    start = partial(
        EnvironmentClient,
        name,
        env_class,
        cfg,
        step_timeout_s=keys.step_timeout_s,
        start_timeout_s=start_timeout_s,
        max_restarts=max_restarts,
        runtime_env=runtime_env,
        max_memory_gb=keys.max_memory_gb,
    )
    first = start()
    num_workers = keys.num_workers if first.is_pooled else 1
    if num_workers == 1 and keys.max_open_episodes is None:
        return first
    return EnvironmentPool([first, *(start() for _ in range(1, num_workers))], keys.max_open_episodes)
