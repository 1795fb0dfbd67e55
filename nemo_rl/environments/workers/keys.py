"""Keys that the library reads from the section of any environment; the environment gets them too.

Invariant: a wrong value is refused before Ray starts.
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from nemo_rl.utils.errors import ConfigError

WORKER_KEYS = ("num_workers", "step_timeout_s", "max_memory_gb", "max_open_episodes")


@dataclass(frozen=True)
class WorkerKeys:
    """Processes of an environment, and their bounds."""

    num_workers: int = 1
    """Actors of a class with `EnvironmentInterface.pooled`; of others the key is their own."""
    step_timeout_s: float = 600.0
    """Deadline of a step, of the opening and of the closing of an episode."""
    max_memory_gb: float | None = None
    """GiB that an actor and the processes it started may use together; None: no limit."""
    max_open_episodes: int | None = None
    """Episodes that are open at the same time in all actors; None: no limit."""


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
        is_count = key not in ("step_timeout_s", "max_memory_gb")
        if not _is_above_zero(value) or (is_count and not isinstance(value, int)):
            wanted = "an integer" if is_count else "a number"
            raise ConfigError(f"env.{name}.{key}={value!r} must be {wanted} above 0, or null.")
    return WorkerKeys(**{"step_timeout_s": step_timeout_s, **given})


def _is_above_zero(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def section_of(section: Mapping[str, Any] | BaseModel) -> dict[str, Any]:
    """Return the section of an environment as a dict, which the environment gets."""
    return section.model_dump() if isinstance(section, BaseModel) else dict(section)


def own_keys(section: Mapping[str, Any], config_class: type | None) -> dict[str, Any]:
    """Return the keys of a section that are the environment's own: all but those above that its class does not name.

    Args:
        section: the section.
        config_class: `EnvironmentInterface.config_class`.
    """
    named = set(inspect.signature(config_class).parameters) if config_class is not None else set()
    return {key: value for key, value in section.items() if key not in WORKER_KEYS or key in named}
