"""Find the environment class at a dotted path, with or without `@ray.remote`, and start its actor.

The driver imports the class, to fail early, and the environment's process imports it again. Invariant: the result is
always a plain class. The library keeps the resources of a Ray decorator, and sets restarts and concurrency itself.
"""

import inspect
import math
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from pydantic import BaseModel
from ray import cloudpickle
from ray.actor import ActorClass, ActorHandle
from ray.exceptions import GetTimeoutError, RayError

from nemo_rl.environments.interfaces import EnvironmentInterface
from nemo_rl.utils.errors import ConfigError, DeadlineExceededError
from nemo_rl.utils.named_parts import Registry

WORKER_KEYS = ("num_workers", "step_timeout_s", "max_memory_gb", "max_open_episodes")


@dataclass(frozen=True)
class WorkerKeys:
    """Keys of an environment's section that the library reads: the number of processes and their limits."""

    num_workers: int = 1
    """Number of actors of a class with `EnvironmentInterface.pooled`. Other classes may use this key for themselves."""
    step_timeout_s: float = 600.0
    """Deadline in seconds of a step, and of the opening or the closing of an episode."""
    max_memory_gb: float | None = None
    """GiB that an actor and the processes that it started may use together, or None for no limit."""
    max_open_episodes: int | None = None
    """Largest number of open episodes in all actors together, or None for no limit."""


def worker_keys(name: str, section: Mapping[str, Any], step_timeout_s: float) -> WorkerKeys:
    """Read the keys of `WorkerKeys` from an environment's section.

    Args:
        name: name of the environment, for errors.
        step_timeout_s: deadline if the section has none (`cluster.timeouts.environment_s`).

    Raises:
        ConfigError: a value has the wrong type, or is not positive.
    """
    given: dict[str, Any] = {key: section[key] for key in WORKER_KEYS if section.get(key) is not None}
    for key, value in given.items():
        is_count = key not in ("step_timeout_s", "max_memory_gb")
        if not _is_above_zero(value) or (is_count and not isinstance(value, int)):
            wanted = "an integer" if is_count else "a number"
            raise ConfigError(f"env.{name}.{key}={value!r} must be {wanted} above 0, or null.")
    return WorkerKeys(**{"step_timeout_s": step_timeout_s, **given})


def _is_above_zero(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def section_of(section: Mapping[str, Any] | BaseModel) -> dict[str, Any]:
    """Return the section of an environment as a dict, the form in which the environment gets it."""
    return section.model_dump() if isinstance(section, BaseModel) else dict(section)


def own_keys(section: Mapping[str, Any], config_class: type | None) -> dict[str, Any]:
    """Return the keys of a section without the keys of `WorkerKeys`, except those that `config_class` has too.

    Args:
        config_class: `EnvironmentInterface.config_class`.
    """
    named = set(inspect.signature(config_class).parameters) if config_class is not None else set()
    return {key: value for key, value in section.items() if key not in WORKER_KEYS or key in named}


EnvironmentClass = type[EnvironmentInterface[Any]]

ENVIRONMENTS: Registry[Any] = Registry(
    "environment",
    EnvironmentInterface,
    advice="Or register a name for it with nemo_rl.environments.utils.register_env(name, path).",
)
"""Environments by dotted path; `environments.registry` adds the built-in names."""

_KEPT_OPTIONS = ("num_cpus", "num_gpus", "memory", "resources", "runtime_env")
_COROUTINE_STEPS = 1000
"""Number of concurrent calls of `step` if it is a coroutine function and the class sets no number."""


def load_env_class(path: str) -> tuple[EnvironmentClass, dict[str, Any]]:
    """Import an environment class by its dotted path.

    Args:
        path: `package.module.Class`.

    Returns:
        The plain class and the Ray options of its own decorator (empty for a plain class).

    Raises:
        ConfigError: The path does not lead to a subclass of `EnvironmentInterface`.
    """
    return plain_env_class(ENVIRONMENTS.load(path, f"environment class {path!r}"))


def plain_env_class(found: Any) -> tuple[EnvironmentClass, dict[str, Any]]:
    """Return the plain class of an environment object, or of an environment class with or without `@ray.remote`.

    Raises:
        ConfigError: `found` is neither a subclass of `EnvironmentInterface` nor an object of one.
    """
    options: dict[str, Any] = {}
    if is_environment(found):
        return type(found), options
    if isinstance(found, ActorClass):
        decorated: Any = found  # Ray has no public way back from an ActorClass to its class
        decorator = decorated._default_options
        options = {name: decorator[name] for name in _KEPT_OPTIONS if name in decorator}
        found = decorated.__ray_metadata__.modified_class.__ray_actor_class__
    return ENVIRONMENTS.checked(found, repr(found)), options


def is_environment(found: Any) -> bool:
    """Return whether `found` is an environment object, and not a class that Ray has decorated."""
    return isinstance(found, EnvironmentInterface) and not isinstance(found, ActorClass)


def class_path(env_class: EnvironmentClass) -> str | None:
    """Return the dotted path under which another process can import the class, or None if there is none."""
    if env_class.__module__ == "__main__" or "<locals>" in env_class.__qualname__:
        return None
    return f"{env_class.__module__}.{env_class.__qualname__}"


@dataclass(frozen=True)
class EnvironmentTraits:
    """Facts about an environment's class that the driver needs."""

    concurrency: int
    """Number of calls that its actor runs at the same time."""
    hooks: frozenset[str]
    """Optional methods that the class overrides."""
    options: Mapping[str, Any]
    """Ray options of the class's decorator."""
    post_processes_groups: bool = False
    """Whether groups are post-processed one by one (`EnvironmentInterface.post_processes_groups`)."""
    is_async: bool = False
    """Whether `step` is a coroutine function."""
    steps_samples_alone: bool = False
    """Whether each sample is its own call of `step`."""
    reads_chat: bool = False
    """Whether the prompt's messages are read (`EnvironmentInterface.reads_chat`)."""
    continues_episodes: bool = True
    """Whether an episode can continue in another process."""
    reads_token_ids: bool = False
    """Whether token ids are read (`EnvironmentInterface.reads_token_ids`)."""
    pooled: bool = False
    """Whether several actors may run the environment (`EnvironmentInterface.pooled`)."""
    calls_own_code: bool = False
    """Whether functions of the user are called (`EnvironmentInterface.calls_own_code`)."""
    runs_agents: bool = False
    """Whether `step` runs a program that samples itself (`EnvironmentInterface.runs_agents`)."""


@dataclass(frozen=True)
class Host:
    """The class of an actor that hosts an environment."""

    actor: type
    """Class of the actor."""
    arguments: tuple[Any, ...] = ()
    """Last arguments of the actor's constructor."""


def traits_of(
    env_class: "str | EnvironmentClass | EnvironmentInterface[Any]",
    runtime_env: Mapping[str, Any],
    timeout_s: float = 300.0,
) -> EnvironmentTraits:
    """Return the traits of a class. If the class is given by its path, the Python environment of its actor imports it.

    Args:
        env_class: See `launch_environment_actor`.
        runtime_env: See `launch_environment_actor`.
        timeout_s: Time limit in seconds for starting Python in that environment and importing the class.

    Raises:
        ConfigError: There is no such class, or it cannot be imported there.
        DeadlineExceededError: The import took longer than `timeout_s`.
    """
    if not isinstance(env_class, str):
        return _traits(plain_env_class(env_class))
    if not runtime_env:
        return _traits(load_env_class(env_class))
    ask: Any = ray.remote(num_cpus=0, max_retries=0, runtime_env=dict(runtime_env))(_traits_there)
    try:
        return ray.get(ask.remote(env_class, import_path(runtime_env)), timeout=timeout_s)
    except GetTimeoutError as error:
        place = f"environment class {env_class!r}: the Python {runtime_env.get('py_executable')}"
        raise DeadlineExceededError(f"{place} did not start in {timeout_s:g} s.") from error
    except RayError as error:
        cause = getattr(error, "cause", None)
        raise ConfigError(str(cause if isinstance(cause, ConfigError) else error)) from error


def _traits_there(path: str, folders: Sequence[str]) -> EnvironmentTraits:
    extend_path(folders)
    return _traits(load_env_class(path))


def _traits(loaded: tuple[EnvironmentClass, dict[str, Any]]) -> EnvironmentTraits:
    plain_class, options = loaded
    is_async, alone = inspect.iscoroutinefunction(plain_class.step), plain_class.steps_samples_alone
    hooks, continues = own_hooks(plain_class), plain_class.continues_episodes
    return EnvironmentTraits(
        step_concurrency(plain_class),
        hooks,
        options,
        plain_class.post_processes_groups,
        is_async,
        is_async if alone is None else alone,
        plain_class.reads_chat,
        "close_episode" not in hooks if continues is None else continues,
        plain_class.reads_token_ids,
        pooled=plain_class.pooled,
        calls_own_code=plain_class.calls_own_code,
        runs_agents=plain_class.runs_agents,
    )


def launch_environment_actor(
    host: Host,
    env_class: "str | EnvironmentClass | EnvironmentInterface[Any]",
    cfg: dict[str, Any],
    traits: EnvironmentTraits,
    runtime_env: Mapping[str, Any],
) -> ActorHandle:
    """Start an actor that hosts the environment, and return before it is ready.

    The actor also searches the import path of this process, after its own. If it runs in another Python environment, it
    leaves out the installed packages of this process's environment.

    Args:
        host: The class of the actor.
        env_class: A class (plain or `@ray.remote`); its dotted path, which the actor then imports; or an environment
            object, which is copied into the actor.
        cfg: Argument of the class's constructor.
        traits: Traits of the class.
        runtime_env: Ray's runtime environment, whose values take precedence over those of the class's decorator.
    """
    hosted: Any = env_class
    if is_environment(env_class):
        hosted = cloudpickle.dumps(env_class)  # unpickled in the actor, where its class can be imported
    elif not isinstance(env_class, str):
        plain_class, _ = plain_env_class(env_class)
        hosted = class_path(plain_class) or plain_class
    options = {"num_cpus": 0, **traits.options, "max_concurrency": traits.concurrency, "max_restarts": 0}
    merged = {**traits.options.get("runtime_env", {}), **runtime_env}
    if merged:
        options["runtime_env"] = merged
    remote_class: Any = ray.remote(host.actor)
    return remote_class.options(**options).remote(hosted, cfg, import_path(merged), *host.arguments)


def import_path(runtime_env: Mapping[str, Any]) -> list[str]:
    """Return the folders that the actor searches for modules after its own."""
    own: tuple[str, ...] = ()
    if "py_executable" in runtime_env:
        own = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
        own += (f"{sys.base_prefix}/lib/python{sys.version_info.major}{sys.version_info.minor}.zip",)
    return [entry for entry in sys.path if entry and not f"{entry}/".startswith(tuple(f"{place}/" for place in own))]


def extend_path(folders: Sequence[str]) -> None:
    """Append folders to the import path of this process."""
    sys.path.extend(entry for entry in folders if entry not in sys.path)


def step_concurrency(plain_class: EnvironmentClass) -> int:
    """Return the number of calls that the actor of a class runs at the same time."""
    concurrency = plain_class.max_concurrent_steps
    if inspect.iscoroutinefunction(plain_class.step) and concurrency == 1:
        return _COROUTINE_STEPS
    return concurrency


def own_hooks(plain_class: EnvironmentClass) -> frozenset[str]:
    """Return the names of the optional methods that a class overrides."""
    optional = ("open_episode", "close_episode", "global_post_process_and_metrics")
    return frozenset(name for name in optional if getattr(plain_class, name) is not getattr(EnvironmentInterface, name))
