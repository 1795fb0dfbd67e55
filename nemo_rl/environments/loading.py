"""Find the environment class behind a dotted path, decorated with `@ray.remote` or not.

Runs in the driver, to fail early, and again where the environment runs. Invariant: the result is always a plain class;
restarts and concurrency are ours, resources stay the user's.
"""

from typing import Any

from ray.actor import ActorClass

from nemo_rl.environments.interfaces import EnvironmentInterface
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.imports import import_dotted

EnvironmentClass = type[EnvironmentInterface[Any]]

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
    advice = "Give the dotted path of a class that Python can import from where the run was started."
    return plain_env_class(import_dotted(path, ConfigError, f"environment class {path!r}", advice))


def plain_env_class(found: Any) -> tuple[EnvironmentClass, dict[str, Any]]:
    """Take the `@ray.remote` off an environment class, if it has one; the class of an environment that is made already.

    Raises:
        ConfigError: `found` is not a subclass of `EnvironmentInterface`, nor an object of one.
    """
    options: dict[str, Any] = {}
    if is_environment(found):
        return type(found), options
    if isinstance(found, ActorClass):
        decorated: Any = found  # Ray has no public way back from an ActorClass to its class
        decorator = decorated._default_options
        options = {name: decorator[name] for name in _KEPT_OPTIONS if name in decorator}
        found = decorated.__ray_metadata__.modified_class.__ray_actor_class__
    if not (isinstance(found, type) and issubclass(found, EnvironmentInterface)):
        raise ConfigError(
            f"{found!r} is not an environment: derive it from nemo_rl.environments.interfaces.EnvironmentInterface."
        )
    return found, options


def is_environment(found: Any) -> bool:
    """Whether this is an environment that is made already; Ray lets its decorated classes pass for objects too."""
    return isinstance(found, EnvironmentInterface) and not isinstance(found, ActorClass)


def class_path(env_class: EnvironmentClass) -> str | None:
    """Return the dotted path another process can import the class by; None if there is none."""
    if env_class.__module__ == "__main__" or "<locals>" in env_class.__qualname__:
        return None
    return f"{env_class.__module__}.{env_class.__qualname__}"
