"""Build the engines of a configuration.

Only this module turns `policy.generation` into `EngineSettings`. Invariant: engine libraries are imported only in the
actors, not here.
"""

from dataclasses import replace
from pathlib import Path

from nemo_rl.config import ClusterConfig, GenerationConfig, PolicyConfig
from nemo_rl.config.rules.engines import misplaced
from nemo_rl.data.images.families import media_tokens
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.models.capacity.memory import engine_memory
from nemo_rl.models.draft.choice import shape_of
from nemo_rl.models.generation.engine_group import EngineGroup
from nemo_rl.models.generation.interfaces import EngineSettings, SamplingParams
from nemo_rl.models.generation.registry import ENGINES, engine_class, engine_kind, reports_experts
from nemo_rl.models.generation.responses import stop_token_ids
from nemo_rl.models.generation.vllm.settings import kernel_variables
from nemo_rl.models.generation.vllm.speculation import proposes_by_trained_layers
from nemo_rl.models.huggingface.load import load_model_config, require_text_model, torch_dtype
from nemo_rl.models.huggingface.recurrent import has_states
from nemo_rl.models.huggingface.sizes import expert_parameters_of
from nemo_rl.models.quantization import FP8, WeightQuantization, weight_quantization
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.imports import import_dotted
from nemo_rl.utils.named_parts import check_own_keys

_WORKER = "nemo_rl.models.generation.worker.GenerationWorker"
_CPU_KV_CACHE_BYTES = 256 << 20
_CPU_BLOCK_TOKENS = 128
"""Largest block of vLLM's cache on the CPU in tokens. Models with attention only have smaller blocks."""
_CONCURRENT_CALLS = 64


def engine_settings(policy: PolicyConfig, cluster: ClusterConfig, seed: int, *, load_weights: bool) -> EngineSettings:
    """Build the settings of the engine that `policy.generation` describes.

    Args:
        load_weights: Whether to load the checkpoint at the start, for evaluation. In training, weights are synced, and
            engines load them only if a sync sends adapters alone.

    Raises:
        ConfigError: `policy.generation` is missing.
    """
    generation = policy.generation
    if generation is None:
        raise ConfigError("policy.generation is null, but this algorithm generates. Fill it in.")
    kind, engine = engine_kind(generation.backend), generation.engine
    quantization = weight_quantization(policy, cluster)
    kv_cache_mb = engine.kv_cache_memory_mb
    kv_cache_bytes = None if kv_cache_mb is None else kv_cache_mb << 20
    load_weights = load_weights or policy.sends_adapters
    if kv_cache_bytes is None and not cluster.uses_gpu:
        kv_cache_bytes = _cpu_kv_cache_bytes(policy, generation)
    return EngineSettings(
        backend=generation.backend,
        model_name=policy.model_name,
        tokenizer_name=policy.tokenizer.name,
        device=cluster.device,
        precision=engine_precision(policy),
        max_model_len=engine.max_model_len,
        kv_cache_bytes=kv_cache_bytes,
        gpu_memory_utilization=generation.memory_share,
        enforce_eager=engine.enforce_eager or not cluster.uses_gpu,
        can_sleep=cluster.uses_gpu and generation.colocated.enabled,
        sleep_level=2 if kind.drops_weights(generation) and not load_weights else 1,
        load_weights=load_weights,
        seed=seed % 2**31,
        tensor_parallel_size=engine.tensor_parallel_size,
        pipeline_parallel_size=engine.pipeline_parallel_size,
        expert_parallel_size=engine.expert_parallel_size,
        hf_overrides=dict(policy.hf_config_overrides or {}),
        quantization=quantization,
        engine_kwargs=kind.arguments(policy),
        env_vars=_kernel_variables(generation, quantization) | dict(engine.env_vars or {}),
        recomputes_cache=generation.weight_sync.recompute_kv_cache,
        optimizations=cluster.optimizations,
        reports_experts=policy.router_replay.enabled,
        draft=shape_of(policy) if policy.draft.enabled else None,
        media_tokens=sampled_never(policy),
        zero_mismatch=policy.zero_mismatch,
        trainer_ranks=policy.dtensor_cfg.tensor_parallel_size if policy.dtensor_cfg.enabled else 1,
        lora=policy.dtensor_cfg.lora_cfg if policy.sends_adapters else None,
        trains_mtp=proposes_by_trained_layers(policy),
    )


def sampled_never(policy: PolicyConfig) -> tuple[int, ...]:
    """Return the ids of tokens that stand for images, which a policy that reads images never draws."""
    return media_tokens(load_model_config(policy.model_name, policy.hf_config_overrides)) if policy.is_vlm else ()


def _cpu_kv_cache_bytes(policy: PolicyConfig, generation: GenerationConfig) -> int:
    """Return the cache size for twice the concurrent sequences, so that none is evicted, up to 256 MiB.

    Models with states get 256 MiB, because states may be larger than keys and values.
    """
    sequences = engine_kind(generation.backend).cpu_sequences
    if sequences is None:
        return _CPU_KV_CACHE_BYTES
    model = load_model_config(policy.model_name, policy.hf_config_overrides)
    if not hasattr(model.get_text_config(), "num_attention_heads") or has_states(model):
        return _CPU_KV_CACHE_BYTES
    per_token = engine_memory(model, generation, torch_dtype(engine_precision(policy)).itemsize).cache_per_token
    blocks = -(-generation.engine.max_model_len // _CPU_BLOCK_TOKENS)
    needed = int(2 * sequences * blocks * _CPU_BLOCK_TOKENS * per_token)
    return min(needed, _CPU_KV_CACHE_BYTES) if needed else _CPU_KV_CACHE_BYTES


def _kernel_variables(generation: GenerationConfig, quantization: WeightQuantization | None) -> dict[str, str]:
    if quantization is None or quantization.simulated:
        return {}
    wanted = generation.vllm_cfg
    return kernel_variables(use_deep_gemm=wanted.use_deep_gemm, powers_of_two=wanted.pow2_activation_scaling_factors)


def engine_precision(policy: PolicyConfig) -> str:
    """Return the number format of engines and of the weights sent to them, except float8 weights."""
    precision = policy.sampling.engine.precision
    return policy.precision if precision in ("auto", FP8) else precision


def check_engine_model(policy: PolicyConfig, cluster: ClusterConfig) -> None:
    """Refuse an engine that does not exist, or a model that it cannot serve. No process is started.

    Raises:
        ConfigError: `policy.generation.backend` names a class that cannot be imported, the engine's own check refuses
            the model, the model has no part for text alone, or the experts of the model cannot be reported
            (`policy.router_replay`).
    """
    if policy.generation is None:
        return
    kind = engine_kind(policy.generation.backend)
    if policy.generation.backend not in ENGINES:
        own = engine_class(policy.generation.backend)
        check_own_keys(own, "policy.generation.engine_kwargs", policy.generation.engine_kwargs)
    else:  # a user's engine may support other models
        require_text_model(load_model_config(policy.model_name, policy.hf_config_overrides), policy.model_name)
    _check_router_replay(policy)
    if policy.draft.enabled and not kind.speculates:
        raise ConfigError(
            "policy.draft.enabled=true trains a draft model for vLLM's speculative decoding, but "
            f"policy.generation.backend={policy.generation.backend}. Set it to vllm, or policy.draft.enabled=false."
        )
    num_mtp_layers = policy.megatron_cfg.mtp_num_layers if policy.megatron_cfg.enabled else 0
    if num_mtp_layers and not kind.speculates:
        raise ConfigError(
            f"policy.megatron_cfg.mtp_num_layers={num_mtp_layers} needs engines that support these layers, but "
            f"policy.generation.backend={policy.generation.backend}. Set it to vllm, or mtp_num_layers=0."
        )
    if kind.check is not None:
        named = f"{kind.check} of policy.generation.backend"
        refuse = import_dotted(kind.check, ConfigError, named, "It is part of nemo_rl.")
        refuse(policy, cluster)
    if policy.sends_adapters:
        check_engine_adapters(policy, cluster)


def check_engine_adapters(policy: PolicyConfig, cluster: ClusterConfig) -> None:
    """Refuse settings with which an engine does not compute adapters. No process is started.

    Raises:
        ConfigError: the message names the setting.
    """
    backend = policy.sampling.backend
    kind = engine_kind(backend)
    if not kind.has_adapters:
        having = " or ".join(name for name, each in ENGINES.items() if each.has_adapters)
        raise ConfigError(f"policy.generation.backend={backend} has no adapters. Set it to {having}.")
    if kind.check_adapters is not None:
        named = f"{kind.check_adapters} of policy.generation.backend"
        refuse = import_dotted(kind.check_adapters, ConfigError, named, "It is part of nemo_rl.")
        refuse(policy, cluster)


def adapter_slot_bytes(settings: EngineSettings) -> float:
    """Return the bytes that a rank of an engine reserves for adapters, however many there are."""
    path = engine_kind(settings.backend).slot_bytes
    if path is None:
        return 0.0
    named = f"{path} of policy.generation.backend"
    found: float = import_dotted(path, ConfigError, named, "It is part of nemo_rl.")(settings)
    return found


def _check_router_replay(policy: PolicyConfig) -> None:
    """Refuse router replay if the engine does not report experts or the model has none."""
    if not policy.router_replay.enabled:
        return
    backend = policy.sampling.backend
    if not reports_experts(backend):
        raise ConfigError(
            f"policy.router_replay.enabled=true needs an engine that reports the experts of each token; "
            f"policy.generation.backend={backend} does not. Set policy.generation.backend=vllm (a class of your own "
            "has the attribute reports_experts=True), or policy.router_replay.enabled=false."
        )
    if not expert_parameters_of(load_model_config(policy.model_name, policy.hf_config_overrides)):
        raise ConfigError(
            f"policy.router_replay.enabled=true, but policy.model_name={policy.model_name!r} has no experts. Set "
            "policy.router_replay.enabled=false."
        )


def sampling_params(policy: PolicyConfig, eos_token_id: int | None, *, validation: bool) -> SamplingParams:
    """Build the sampling parameters of training or validation.

    Args:
        eos_token_id: The tokenizer's end-of-sequence token. `stop_token_ids` adds other ids that end a response.
        validation: Whether the `val_*` keys are used.

    Raises:
        ConfigError: The model cannot be found.
    """
    generation = policy.sampling
    top_k = generation.val_top_k if validation else generation.top_k
    return SamplingParams(
        temperature=generation.val_temperature if validation else generation.temperature,
        top_k=None if top_k in (None, -1, 0) else top_k,
        top_p=generation.val_top_p if validation else generation.top_p,
        max_new_tokens=generation.max_new_tokens,
        stop_token_ids=stop_token_ids(
            policy.model_name, eos_token_id, generation.stop_token_ids, policy.hf_config_overrides
        ),
        stop_strings=tuple(generation.stop_strings or ()),
        bad_words=tuple(generation.bad_words or ()),
    )


def make_engines(
    settings: EngineSettings,
    where: RayVirtualCluster,
    cluster: ClusterConfig,
    num_engines_file: str | None = None,
    name_prefix: str | None = None,
    samples: int = 0,
) -> EngineGroup:
    """Start one worker on every bundle, and block until all engines are built.

    Args:
        where: The bundles. An engine's workers are on one machine, or use whole machines (`config.rules.engines`).
        cluster: Section with time limits and restarts.
        num_engines_file: Value of `policy.generation.num_engines_file`.
        name_prefix: Beginning of the names of the workers. If None, the name of the backend.
        samples: Number of samples of a training step for all engines together. 0 if unknown.

    Raises:
        ConfigError: The bundles of the machines cannot be divided into engines.
    """
    counts, size = where.bundle_counts, settings.num_workers
    wrong = misplaced(settings.tensor_parallel_size, size, counts)
    if wrong is not None:
        raise ConfigError(
            f"{size} ranks of an engine (tensor_parallel_size={settings.tensor_parallel_size}, pipeline_parallel_size="
            f"{settings.pipeline_parallel_size}, expert_parallel_size={settings.expert_parallel_size}) on machines "
            f"with {counts} bundles {wrong}"
        )
    timeouts = cluster.timeouts
    per_engine = -(-samples * size // sum(counts))
    settings = replace(settings, workers_on_machine=max(counts), samples=per_engine)
    builder = RayWorkerBuilder(_WORKER, settings).asynchronous(_CONCURRENT_CALLS)
    workers = RayWorkerGroup(
        where,
        builder.in_environment(cluster.venvs.get("generation"), "generation", timeouts.venv_s),
        name_prefix=name_prefix or f"{settings.backend}_engine",
        env_vars=engine_kind(settings.backend).environment(settings.device) | settings.env_vars,
        setup_timeout_s=timeouts.setup_s,
        call_timeout_s=timeouts.weight_sync_s,
        ranks_per_unit=settings.num_workers,
    )
    return EngineGroup(
        workers,
        timeouts.setup_s,
        cluster.max_actor_restarts,
        turn_timeout_s=timeouts.train_s + timeouts.setup_s + timeouts.weight_sync_s,
        workers_per_engine=settings.num_workers,
        silence_s=timeouts.engine_silence_s,
        num_engines_file=Path(num_engines_file) if num_engines_file else None,
    )
