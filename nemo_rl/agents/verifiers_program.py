"""Play tasks of environments of the package verifiers, version 0.4, in an agent program.

    seed, split ─► task ─► Env.run_slot ─► Episode ─► reward, metrics, answer
                              │ calls of the harness
                              ▼
                  the package's own server ─► endpoint of the run, with the key of the sample

The package's server keeps a client for each key until the server stops. For this reason an environment is replaced
after `_EPISODES` episodes, and stops after the last of these episodes. Invariant: a reward is the result of all reward
functions of the task. A sample whose episode failed or was not completely scored gets an error.
"""

import asyncio
import contextlib
import importlib
import os
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from nemo_rl.agents.programs.interfaces import AgentError, AgentTask
from nemo_rl.host.boundary import raised_as
from nemo_rl.utils.errors import ConfigError

_EPISODES = 64
_KEY_VARIABLE = "NEMO_RL_SAMPLE_{}_API_KEY"
"""Name of the variable with a sample's key. The package hides variables with API_KEY from processes it starts."""
_SCORED_TIMEOUT = "agent_timeout"
"""The only deadline of the package after which an episode is still scored."""
_PLACE = "env.agent.kwargs"


class VerifiersProgram:
    """A program for `env.agent.program` that plays tasks of a verifiers environment. It needs rows of `episodes`.

    Args:
        env: the package's block `[env]`: `taskset` with its `id`, one section for each agent, `id` and limits.
        select: the package's block `[select]`, which says which tasks are played, or None for all tasks.
        validation_env: the block `[env]` for validation, or None for `env`.
        validation_select: the block `[select]` for validation, or None for `select`.

    Raises:
        ConfigError: the package is missing, or the environment cannot be constructed, has no task or repeats episodes.
    """

    def __init__(
        self,
        env: Mapping[str, Any],
        select: Mapping[str, Any] | None = None,
        validation_env: Mapping[str, Any] | None = None,
        validation_select: Mapping[str, Any] | None = None,
    ) -> None:
        package = _package()
        self._package = package
        train = _Environment(package, env, select, "env")
        self._environments = {"train": train, "validation": train}
        if validation_env is not None or validation_select is not None:
            held_out, key = (env, "env") if validation_env is None else (validation_env, "validation_env")
            chosen = select if validation_select is None else validation_select
            self._environments["validation"] = _Environment(package, held_out, chosen, key)

    async def __call__(self, task: AgentTask) -> dict[str, Any]:
        """Play the task that a row's seed determines, and return its reward, its metrics and the last reply.

        Raises:
            AgentError: the row has no seed, or the episode has no reward.
        """
        if "seed" not in task.row:
            raise AgentError("the row has no seed; use data.train.dataset_name=episodes with verifiers")
        environment = self._environments[task.row.get("split", "train")]
        with _key_variable(task.api_key) as variable:
            client = self._package.EvalClientConfig(base_url=task.base_url, api_key_var=variable)
            context = self._package.clients.ModelContext(model=task.model, client=client)
            episode = await environment.play(task.row["seed"], context)
        return _result_of(episode, client)

    async def shutdown(self) -> None:
        """Stop the servers of the environments."""
        for environment in set(self._environments.values()):
            await environment.shutdown()


class _Environment:
    """An environment and its tasks. `place` is the configuration key of the environment, for errors."""

    def __init__(self, package: Any, env: Mapping[str, Any], select: Mapping[str, Any] | None, key: str) -> None:
        self._package, self._place = package, f"{_PLACE}.{key}"
        cannot = f"{self._place}={dict(env)} with select={select} cannot be loaded"
        with raised_as(lambda error: ConfigError(f"{cannot}: {error}")):  # the environment is user code
            self._config = package.resolve_env_config(_plain(env))
            taskset = package.load_environment(self._config).taskset.select(
                package.SelectConfig(**_plain(select or {}))
            )
            if not taskset.bounded:
                raise ValueError("the taskset is infinite; give a limit in `select`")
            self._tasks = list(taskset)
        if not self._tasks:
            raise ConfigError(f"{self._place}={dict(env)} with select={select} has no task.")
        _refuse_retries(package, self._config, self._place)
        self._server: _EnvironmentServer | None = None
        self._servers: set[_EnvironmentServer] = set()

    async def play(self, seed: int, context: Any) -> Any:
        """Play the task of a seed, and return its episode."""
        task = self._tasks[seed // 2 % len(self._tasks)]  # the last bit of the seed is the split
        async with self._serving() as environment:
            return await environment.run_slot(*environment.slots(task), context)

    async def shutdown(self) -> None:
        """Stop all servers, including those with running episodes."""
        await asyncio.gather(*(server.stop() for server in self._servers))

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[Any]:
        server = self._server
        if server is None or server.is_used_up:
            server = self._server = _EnvironmentServer(self._package.load_environment(self._config))
            self._servers.add(server)
        server.enter()
        try:
            await server.ready()
            yield server.environment
        finally:
            if server.leave():
                self._servers.discard(server)
                await server.stop()


class _EnvironmentServer:
    """An environment that serves up to `_EPISODES` episodes in its own asyncio task."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self._num_entered = self._num_open = 0
        self._is_ready = asyncio.Event()
        self._ends = asyncio.Event()
        self._running = asyncio.create_task(self._serve())

    @property
    def is_used_up(self) -> bool:
        """True if the server accepts no further episode."""
        return self._num_entered >= _EPISODES or self._running.done()

    def enter(self) -> None:
        """Count an episode that begins."""
        self._num_entered += 1
        self._num_open += 1

    def leave(self) -> bool:
        """Count an episode that has ended, and return whether the server is no longer needed."""
        self._num_open -= 1
        return self._num_open == 0 and self.is_used_up

    async def ready(self) -> None:
        """Wait until the server is ready, and raise its error if it cannot be started."""
        starting = asyncio.create_task(self._is_ready.wait())
        try:
            await asyncio.wait({starting, self._running}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            starting.cancel()
        if self._running.done():
            self._running.result()

    async def stop(self) -> None:
        """Let the task end, and wait for its end."""
        self._ends.set()
        await asyncio.wait({self._running})

    async def _serve(self) -> None:
        async with self.environment.serving():
            self._is_ready.set()
            await self._ends.wait()


def _package() -> Any:
    """Import the package."""
    try:
        return importlib.import_module("verifiers.v1")
    except ModuleNotFoundError as error:
        if error.name not in ("verifiers", "verifiers.v1"):
            raise
        raise ConfigError(
            "VerifiersProgram needs verifiers 0.4 in the Python of the environment. Set "
            'cluster.venvs.agent.packages=["verifiers==0.4.0","openai==2.54.0","mcp==2.0.0","mcp-types==2.0.0"].'
        ) from None


@contextlib.contextmanager
def _key_variable(key: str) -> Iterator[str]:
    """Put a key into the environment variable from which the package reads the key, and yield the variable's name."""
    name = _KEY_VARIABLE.format(uuid.uuid4().hex)
    os.environ[name] = key
    try:
        yield name
    finally:
        del os.environ[name]


def _plain(block: Any) -> Any:
    """Copy a block as dicts and lists, because the package changes blocks in place."""
    if isinstance(block, Mapping):
        return {key: _plain(value) for key, value in block.items()}
    return [_plain(value) for value in block] if isinstance(block, (list, tuple)) else block


def _refuse_retries(package: Any, config: Any, place: str) -> None:
    """Raise a `ConfigError` if the package would repeat episodes, whose calls would then share one reward."""
    agents = {name: value for name, value in config if isinstance(value, package.AgentConfig)}
    for name, section in {"": config, **agents}.items():
        if section.retries.max_retries or any(rule.max_retries for rule in section.retries.rules):
            key = ".".join(part for part in (place, name, "retries") if part)
            raise ConfigError(f"{key} repeats episodes, and the calls of all of them would get one reward; remove it.")


def _result_of(episode: Any, client: Any) -> dict[str, Any]:
    """Return reward, metrics and last reply of an episode whose policy was called through `client`."""
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        said = "; ".join(f"{error.type}: {error.message}" for error in errors)
        raise AgentError(f"the episode failed: {said or 'the package gives no reason'}")
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len(trained) != 1:
        names = ", ".join(trace.agent.name for trace in trained) or "none"
        raise AgentError(f"a sample has one reward, and the episode has {len(trained)} trained agents: {names}")
    for trace in episode.traces:
        if not trace.agent.trainable and trace.agent.config.client == client:
            raise AgentError(
                f"the agent {trace.agent.name} is not trained, but calls the policy; give {_PLACE}.env."
                f"{trace.agent.name} a model and a client"
            )
    return _scores(trained[0])


def _scores(trace: Any) -> dict[str, Any]:
    if trace.is_timeout and trace.stop_condition != _SCORED_TIMEOUT:
        raise AgentError(f"the episode was not scored to its end: {trace.stop_condition}")
    missing = [name for name, reward in trace.rewards.items() if reward is None]
    if missing:
        raise AgentError(f"the episode was not scored by {', '.join(missing)}")
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    rewards = {name: reward.score for name, reward in trace.rewards.items()}
    return {
        "reward": trace.reward if rewards else None,
        "answer": trace.last_reply,
        "metrics": {"turns": trace.num_turns, **metrics, **rewards},
    }
