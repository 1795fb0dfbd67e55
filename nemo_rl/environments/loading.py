"""Find the environment class that a dotted path names, decorated with `@ray.remote` or not.

This runs in the driver, to fail early, and again in the environment's process. Invariant: the result is always a plain
class; of a Ray decorator only the resources are kept, while the library sets restarts and concurrency.
"""

from typing import Any

from ray.actor import ActorClass

from nemo_rl.environments.interfaces import EnvironmentInterface
from nemo_rl.utils.named_parts import Registry

EnvironmentClass = type[EnvironmentInterface[Any]]

ENVIRONMENTS: Registry[Any] = Registry(
    "environment",
    EnvironmentInterface,
    advice="Or register a name for it with nemo_rl.environments.utils.register_env(name, path).",
)
"""Environments by dotted path; `environments.registry` adds the built-in names."""

_KEPT_OPTIONS = ("num_cpus", "num_gpus", "memory", "resources", "runtime_env")


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
    """Return the plain class of an environment class with `@ray.remote` or without, or of an environment object.

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
    """Return whether this is an environment object; Ray's decorated classes count as instances too."""
    return isinstance(found, EnvironmentInterface) and not isinstance(found, ActorClass)


def class_path(env_class: EnvironmentClass) -> str | None:
    """Return the dotted path under which another process can import the class; None if there is none."""
    if env_class.__module__ == "__main__" or "<locals>" in env_class.__qualname__:
        return None
    return f"{env_class.__module__}.{env_class.__qualname__}"
