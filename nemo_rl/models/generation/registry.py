"""The engines by name.

Invariant: no engine library is imported here but by `make_engine`, in the actor.
"""

from collections.abc import Callable
from dataclasses import dataclass

from nemo_rl.models.generation.interfaces import Engine, EngineSettings
from nemo_rl.models.generation.vllm.settings import CPU_SEQUENCES, engine_environment
from nemo_rl.utils.named_parts import Registry


@dataclass(frozen=True)
class EngineKind:
    """One entry of the registry.

    Attributes:
        path: dotted path of a class as `interfaces.Engine`, constructed with `EngineSettings`.
        environment: environment variables of its process on a device ("cpu" or "cuda"), set before any import.
        rank_path: the same for the workers of an engine behind its first, where they take another class.
        check: dotted path of a function of the sections `policy` and `cluster`, which refuses a model that the engine
            cannot serve before any worker is started, by a `ConfigError`; needs no engine library.
        cpu_sequences: how many sequences it runs at once on the CPU at the most, if it has such a limit.
    """

    path: str
    environment: Callable[[str], dict[str, str]] = lambda device: {}
    rank_path: str | None = None
    check: str | None = None
    cpu_sequences: int | None = None


ENGINES = {
    "vllm": EngineKind(
        "nemo_rl.models.generation.vllm.engine.VllmEngine",
        engine_environment,
        "nemo_rl.models.generation.vllm.ranks.VllmRank",
        "nemo_rl.models.generation.vllm.check.check_model",
        CPU_SEQUENCES,
    ),
    "hf": EngineKind("nemo_rl.models.generation.hf.engine.HfEngine"),
    "megatron": EngineKind(
        "nemo_rl.models.generation.megatron.engine.MegatronEngine",
        check="nemo_rl.models.generation.megatron.check.check_model",
    ),
}
"""Engines that `policy.generation.backend` may name; any other value is the path of a user's class."""

ENGINE_CLASSES: Registry[Engine] = Registry("engine", Engine, {name: kind.path for name, kind in ENGINES.items()})


def engine_kind(backend: str) -> EngineKind:
    """The engine that `policy.generation.backend` names."""
    return ENGINES.get(backend) or EngineKind(backend)


def make_engine(settings: EngineSettings, place: int = 0) -> Engine:
    """Build what the settings name for a worker at a place of its engine."""
    engine: Engine = engine_class(settings.backend, place)(settings)
    return engine


def engine_class(backend: str, place: int = 0) -> type:
    """Import the class of an engine's worker.

    Args:
        backend: `policy.generation.backend`.
        place: place of the worker in its engine; at 0 it takes the requests.

    Raises:
        ConfigError: the path leads to no class of an engine that can be imported.
    """
    what = f"policy.generation.backend={backend!r}"
    rank_path = engine_kind(backend).rank_path
    if place and rank_path:
        of_ranks: type = ENGINE_CLASSES.load(rank_path, what)
        return of_ranks
    return ENGINE_CLASSES.class_of(backend, what)
