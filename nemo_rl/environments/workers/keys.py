"""Keys that the library reads from the section of any environment; the environment gets them too.

Invariant: a wrong value is refused before Ray starts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from nemo_rl.utils.errors import ConfigError

WORKER_KEYS = ("num_workers", "step_timeout_s", "max_memory_gb", "max_open_episodes")


@dataclass(frozen=True)
class WorkerKeys:
    """How an environment is run.

    Attributes:
        num_workers: actors of a class with `EnvironmentInterface.pooled`; of others the key is their own.
        step_timeout_s: deadline of a step, of the opening and of the closing of an episode.
        max_memory_gb: GiB that an actor and the processes it started may use together; None: no limit.
        max_open_episodes: episodes that are open at the same time in all actors; None: no limit.
    """

    num_workers: int = 1
    step_timeout_s: float = 600.0
    max_memory_gb: float | None = None
    max_open_episodes: int | None = None


def worker_keys(name: str, section: Mapping[str, Any], step_timeout_s: float) -> WorkerKeys:
    """Read the keys from an environment's section.

    Args:
        name: name of the environment, for errors.
        section: its section.
        step_timeout_s: deadline if the section has none (`cluster.timeouts.environment_s`).

    Raises:
        ConfigError: a value has the wrong type, or is not positive.
    """
    given: dict[str, Any] = {key: section[key] for key in WORKER_KEYS if section.get(key) is not None}
    for key, value in given.items():
        kind: type | tuple[type, ...] = (int, float) if key in ("step_timeout_s", "max_memory_gb") else int
        if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < math.inf:
            wanted = "an integer" if kind is int else "a number"
            raise ConfigError(f"env.{name}.{key}={value!r} must be {wanted} above 0, or null.")
    return WorkerKeys(**{"step_timeout_s": step_timeout_s, **given})


def section_of(section: Mapping[str, Any] | BaseModel) -> dict[str, Any]:
    """Return the section of an environment as a dict, which the environment gets."""
    return section.model_dump() if isinstance(section, BaseModel) else dict(section)
