"""Find engines by name.

Invariant: only `make_engine`, which runs in the actor, imports engine libraries.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nemo_rl.config import GenerationConfig, PolicyConfig
from nemo_rl.models.accepted_rows import AcceptedRows
from nemo_rl.models.generation.interfaces import Engine, EngineSettings
from nemo_rl.models.generation.vllm.settings import CPU_SEQUENCES, engine_environment
from nemo_rl.utils.named_parts import Registry


def _own_arguments(policy: PolicyConfig) -> dict[str, Any]:
    return policy.sampling.vllm_kwargs | policy.sampling.engine_kwargs


def vllm_arguments(policy: PolicyConfig) -> dict[str, Any]:
    """Return the arguments of a vLLM engine that are not in `EngineSettings`: keys of `vllm_cfg`, and `vllm_kwargs`."""
    generation = policy.sampling
    cache = generation.engine.kv_cache_dtype
    own = {
        "logprobs_mode": generation.vllm_cfg.logprobs_mode,
        "enable_prefix_caching": generation.vllm_cfg.enable_prefix_caching,
        "kv_cache_dtype": None if cache == "auto" else cache,
    }
    return {key: value for key, value in own.items() if value is not None} | generation.vllm_kwargs


def _sglang_drops(generation: GenerationConfig) -> bool:
    server = generation.sglang_cfg.sglang_server_config
    return server.needs_offload and not server.cpu_weight_backup


@dataclass(frozen=True)
class EngineKind:
    """Properties of an engine that the registry names."""

    path: str
    """Dotted path of a class with the methods of `interfaces.Engine`, constructed with `EngineSettings`."""
    environment: Callable[[str], dict[str, str]] = lambda device: {}
    """Function from a device ("cpu" or "cuda") to environment variables, which are set before any import."""
    rank_path: str | None = None
    """Dotted path of the class of all workers of an engine but the first, if it differs from the first one's."""
    replica_paths: tuple[str, str] | None = None
    """Dotted paths of two classes, for engines of several replicas: the class of the engine's first worker, and that of
    the first workers of all other replicas."""
    check: str | None = None
    """Dotted path of a function of the sections `policy` and `cluster`. It runs before any worker starts, and raises a
    `ConfigError` if the engine cannot serve the model. It imports no engine library."""
    cpu_sequences: int | None = None
    """Largest number of sequences that run concurrently on the CPU. None without such a limit."""
    path_without_mismatch: str | None = None
    """Dotted path of the class for `EngineSettings.zero_mismatch`, if it is another one."""
    accepts_inputs: bool = False
    """Whether the engine accepts rows with further inputs and position rules (`data.model_rows`)."""
    accepts_images: bool = False
    """Whether the engine accepts rows with images (`data.images.rows`) although it accepts no other inputs."""
    accepts_grammars: bool = False
    """Whether the engine obeys `SamplingParams.grammar`."""
    reports_experts: bool = False
    """Whether the engine returns the experts of tokens (`EngineSettings.reports_experts`)."""
    speculates: bool = False
    """Whether the engine can propose tokens with a draft model or MTP layers that the policy trains."""
    has_adapters: bool = False
    """Whether the engine computes adapters (`EngineSettings.holds_adapters`, `EngineSettings.lora`)."""
    check_adapters: str | None = None
    """Dotted path of a function like `check`, which refuses adapters that the engine cannot compute."""
    slot_bytes: str | None = None
    """Dotted path of a function from `EngineSettings` to the bytes that a rank reserves for adapters. None reserves
    nothing."""
    arguments: Callable[[PolicyConfig], dict[str, Any]] = _own_arguments
    """Function from the section `policy` to further arguments of the engine (`EngineSettings.engine_kwargs`)."""
    drops_weights: Callable[[GenerationConfig], bool] = lambda generation: False
    """Function that returns whether engines of a training run lose their weights when they sleep and need a sync."""


ENGINES = {
    "vllm": EngineKind(
        "nemo_rl.models.generation.vllm.engine.VllmEngine",
        engine_environment,
        "nemo_rl.models.generation.vllm.ranks.VllmRank",
        (
            "nemo_rl.models.generation.vllm.replicas.VllmReplicas",
            "nemo_rl.models.generation.vllm.replicas.VllmReplica",
        ),
        "nemo_rl.models.generation.vllm.check.check_model",
        CPU_SEQUENCES,
        accepts_images=True,
        accepts_grammars=True,
        reports_experts=True,
        speculates=True,
        has_adapters=True,
        check_adapters="nemo_rl.models.generation.vllm.adapters.check.check_adapters",
        slot_bytes="nemo_rl.models.generation.vllm.adapters.check.slot_bytes",
        arguments=vllm_arguments,
        drops_weights=lambda generation: generation.vllm_cfg.sleep_level == 2,
    ),
    "hf": EngineKind(
        "nemo_rl.models.generation.hf.HfEngine",
        path_without_mismatch="nemo_rl.models.generation.hf.ContinuousHfEngine",
        check="nemo_rl.models.generation.hf.check_model",
        accepts_inputs=True,
        has_adapters=True,
    ),
    "megatron": EngineKind(
        "nemo_rl.models.generation.megatron.engine.MegatronEngine",
        rank_path="nemo_rl.models.generation.megatron.engine.MegatronRank",
        check="nemo_rl.models.generation.megatron.check.check_model",
        arguments=lambda policy: {"megatron_cfg": policy.megatron_cfg},
    ),
    "sglang": EngineKind(
        "nemo_rl.models.generation.sglang.engine.SglangEngine",
        check="nemo_rl.models.generation.sglang.server.check_model",
        arguments=lambda policy: {"sglang_cfg": policy.sampling.sglang_cfg},
        drops_weights=_sglang_drops,
    ),
}
"""Engines by their names in `policy.generation.backend`. Any other value is the dotted path of a user's class."""

ENGINE_CLASSES: Registry[Engine] = Registry("engine", Engine, {name: kind.path for name, kind in ENGINES.items()})


def engine_kind(backend: str) -> EngineKind:
    """Return the entry of the engine that `policy.generation.backend` names."""
    return ENGINES.get(backend) or EngineKind(backend)


def engine_rows(backend: str) -> AcceptedRows:
    """Return which rows an engine accepts. For a user's engine, its class attribute `accepts_inputs` decides.

    Raises:
        ConfigError: the path of the class cannot be imported.
    """
    known = ENGINES.get(backend)
    accepts = known.accepts_inputs if known else bool(getattr(engine_class(backend), "accepts_inputs", False))
    images = accepts or (known is not None and known.accepts_images)
    return AcceptedRows(f"policy.generation.backend={backend}", inputs=accepts, positions=accepts, images=images)


def grammar_refusal(backend: str) -> str | None:
    """Return why an engine does not accept requests with a grammar, or None if it does.

    Raises:
        ConfigError: the path of the class cannot be imported.
    """
    known = ENGINES.get(backend)
    if known.accepts_grammars if known else getattr(engine_class(backend), "accepts_grammars", False):
        return None
    return (
        f"policy.generation.backend={backend} draws any token, so it cannot keep an answer to a form (response_format, "
        'structured_outputs, or a tool_choice that demands a call). Leave the form out (for tool_choice "auto"), or '
        "set policy.generation.backend=vllm."
    )


def reports_experts(backend: str) -> bool:
    """Return whether an engine returns the experts of tokens.

    Raises:
        ConfigError: the path of the class cannot be imported.
    """
    known = ENGINES.get(backend)
    return known.reports_experts if known else bool(getattr(engine_class(backend), "reports_experts", False))


def make_engine(settings: EngineSettings, place: int = 0) -> Engine:
    """Build the engine of the settings, for the worker at this position."""
    engine: Engine = _class_at(settings, place)(settings)
    return engine


def _class_at(settings: EngineSettings, place: int) -> type:
    """Return the class of the worker at a position in an engine. The worker at position 0 gets the requests."""
    kind, what = engine_kind(settings.backend), _named(settings.backend)
    path = kind.rank_path if place else kind.path_without_mismatch if settings.zero_mismatch else None
    if settings.num_replicas > 1 and place % settings.replica_size == 0 and kind.replica_paths:
        path = kind.replica_paths[min(place, 1)]
    if path is None:
        return engine_class(settings.backend)
    of_worker: type = ENGINE_CLASSES.load(path, what)
    return of_worker


def engine_class(backend: str) -> type:
    """Import the class of an engine.

    Args:
        backend: Value of `policy.generation.backend`.

    Raises:
        ConfigError: No class can be imported from the path.
    """
    return ENGINE_CLASSES.class_of(backend, _named(backend))


def _named(backend: str) -> str:
    return f"policy.generation.backend={backend!r}"
