"""Predict the memory of each group of devices in each phase of a run, from the configuration alone.

`forecast_memory` adds up the predictions of the training backends for the models (`TrainingBackend.predict_memory`) and
the memory of the engines. Models and engines that share devices take turns, as in `runtime.device_sharing`, also at the
start (`setup.roles.turns_of_start`). Therefore loading a checkpoint takes less memory than the phase "training" of the
model. Nothing is started, and no GPU or weights are needed: the `config.json` of each model is enough.

Invariant: a group of devices appears once, under the names of the models and engines on it.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from transformers import PretrainedConfig

from nemo_rl.config import (
    ClusterConfig,
    MasterConfig,
    PolicyConfig,
    PolicyGradientMasterConfig,
    Role,
    RolloutMasterConfig,
    RunConfig,
    SupervisedMasterConfig,
    model_ranks,
    sharing,
)
from nemo_rl.config.runs.service import ServiceMasterConfig
from nemo_rl.config.schema.service import ServiceConfig
from nemo_rl.host.capacity import machine_bytes
from nemo_rl.host.machine_load import query_gpus
from nemo_rl.models.adapters.slots import slot_sizes
from nemo_rl.models.capacity.memory import WIDE, EngineMemory, MemoryPlan, Moment, engine_memory
from nemo_rl.models.generation.factory import adapter_slot_bytes, engine_precision, engine_settings
from nemo_rl.models.generation.interfaces import EngineSettings
from nemo_rl.models.huggingface.load import load_model_config, torch_dtype
from nemo_rl.models.quantization import weight_quantization
from nemo_rl.models.training.backends import training_backend
from nemo_rl.utils.addresses import cluster_address
from nemo_rl.utils.errors import ConfigError

logger = logging.getLogger(__name__)

_WAYS_OUT = (
    "Less is needed with more ranks, smaller microbatches or, in {section}.{backend}, {tensor} and "
    "activation_checkpointing."
)


def log_memory(
    cluster: ClusterConfig, roles: Mapping[str, Role], available: float | None, rows_per_sample: int = 1
) -> str:
    """Log the predicted memory of each model's ranks, and warn if it is more than the ranks have.

    Args:
        roles: Models of the run by name, including the policy.
        available: Bytes of memory of a rank (`memory_of_a_rank`). None if unknown.
        rows_per_sample: Number of rows of a sample: 2 for pairs.

    Returns:
        The predictions in one line.

    Raises:
        ConfigError: Weights and optimizer state of a model do not fit.
    """
    told = []
    for name, num_ranks in sorted(model_ranks(cluster, roles).items(), key=lambda item: item[0] != "policy"):
        section, trains, keeps_reference = roles[name].section, roles[name].trains, roles[name].keeps_reference
        plan = training_backend(section).predict_memory(
            section,
            num_ranks,
            trains=trains,
            keeps_reference=keeps_reference,
            on_gpu=cluster.uses_gpu,
            rows_per_sample=rows_per_sample,
        )
        if plan is None:
            told.append(f"{name}: its backend does not predict memory")
            continue
        ranks = "its rank" if num_ranks == 1 else f"each of {num_ranks} ranks"
        told.append(f"{name}: {plan.peak / 2**30:.3g} GiB at most on {ranks}")
        table = plan.table(f"Predicted memory of {name}")
        logger.info("Predicted memory of %s", f"{told[-1]}, in {plan.peak_moment!r}.", extra={"details": table})
        _compare_memory(name, section, plan, available)
    return "; ".join(told)


def _compare_memory(name: str, section: PolicyConfig, plan: MemoryPlan, available: float | None) -> None:
    """Warn if a rank's predicted memory exceeds its memory. Refuse the run if the state alone does not fit."""
    if available is None or plan.peak <= available:
        return
    ways_out = ways_to_less(name, section)
    has = f"of the {available / 2**30:.3g} GiB that it has"
    if plan.certain > available:
        raise ConfigError(
            f"weights and optimizer state of {name} take {plan.certain / 2**30:.3g} GiB on each rank, {has}. {ways_out}"
        )
    logger.warning("%s will need about %.3g GiB on each rank, %s. %s", name, plan.peak / 2**30, has, ways_out)


def ways_to_less(name: str, section: PolicyConfig) -> str:
    """Return a sentence about the configuration keys that reduce the memory of a model's ranks."""
    tensor = section.backend_section.size_keys.get("tp", "tensor parallelism")
    return _WAYS_OUT.format(section=name, backend=section.backend_key, tensor=tensor)


def memory_of_a_rank(
    cluster: ClusterConfig, gpu_size: float | None = None, host_size: float | None = None
) -> float | None:
    """Return the bytes of a GPU, or of a rank's share of a machine without GPUs. None if unknown.

    Args:
        cluster: The machines. On GPUs, `gpu_memory_gb` overrides what is measured.
        gpu_size: Measured bytes of the smallest GPU. If None, a GPU of this machine is measured.
        host_size: Measured bytes of the smallest machine. If None, this machine is measured.
    """
    if cluster.uses_gpu and cluster.gpu_memory_gb is not None:
        return cluster.gpu_memory_gb * 2**30
    measured = gpu_size if cluster.uses_gpu else host_size
    if measured is None and cluster_address():
        return None
    if cluster.uses_gpu:
        return measured or gpu_bytes()
    return (measured or machine_bytes()) / cluster.policy_ranks_per_node


def gpu_bytes() -> float | None:
    """Return the bytes of the smallest GPU of this process, or None if the driver does not report them."""
    try:
        return min(float(total) for (total,) in query_gpus("memory.total")) * 2**20
    except ValueError:
        return None


DEFAULT_GPU_GB = 80
"""Assumed memory of a GPU in gibibytes, for machines without a GPU if `cluster.gpu_memory_gb` is not set."""
USABLE_SHARE = 0.93
"""Share of a GPU's memory that predictions may use. CUDA contexts, NCCL's buffers and fragmentation use the rest."""
_ASLEEP = 3 * 2.0**30
"""Estimated bytes that a sleeping engine keeps on a GPU: its CUDA context, CUDA graphs and NCCL's buffers."""
_SYNC_BUCKETS = 2
_BYTES_OF_TRAINED = 16
"""Bytes for each number of an adapter: the number, two moments and a gradient in float32."""
_STAYING = ("weights", "optimizer state")


def device_bytes(cluster: ClusterConfig) -> float:
    """Return the bytes of one GPU, or of a policy rank's share of this machine.

    Configured values are used first, then measured values of this machine, then `DEFAULT_GPU_GB`.
    """
    return memory_of_a_rank(cluster) or DEFAULT_GPU_GB * 2**30


@dataclass(frozen=True)
class MemoryForecast:
    """The memory that a run will need."""

    groups: Mapping[str, MemoryPlan]
    """Memory plan of one device (on CPUs, of one process) of each group of devices. The key of a group consists of the
    models and engines on it, such as "policy + generation". The `moments` of a plan are the phases of the run with
    their bytes by kind: "training", "log-probs", "generation", "weight sync", and for every other model "<name>'s
    training" and "<name>'s scores". A frozen model has only the phase of scores. `peak_moment` is the phase that needs
    the most memory, and `peak` its bytes. `host` is the host memory of the device's process in the same phases."""
    cache_tokens: float | None
    """Number of tokens that fit into the key-value cache of an engine. None without engines."""
    shortfalls: Sequence[str]
    """Descriptions of what does not fit, with sizes and the keys to change. Empty if everything fits."""


def forecast_memory(config: RunConfig, device: float) -> MemoryForecast:
    """Predict the memory of a run.

    Args:
        config: A checked configuration. Its models are folders, or hub models whose configuration this machine can load
            (`models.capacity.hub_configs.with_local_configs`).
        device: Bytes of a device (`device_bytes`). Engines use a share of it.

    Raises:
        ConfigError: A model's configuration cannot be read.
    """
    service = config.service if isinstance(config, ServiceMasterConfig) else None
    forecast = _Forecast(config.cluster, config.policy, device, service)
    groups = forecast.groups(config)
    tokens = None if config.policy.generation is None else forecast.cache_tokens()
    problems = [_too_large(config, group, plan, device) for group, plan in groups.items()]
    return MemoryForecast(groups, tokens, [*filter(None, problems), *_cache_too_small(config.policy, tokens)])


def warn_of_shortfalls(config: RunConfig, device: float, gpu_size: float | None, host_size: float | None) -> None:
    """Log the reasons for which a dry run would fail, and a use of host memory above a rank's share of the machine.

    Args:
        config: A checked configuration of a run on GPUs.
        device: Bytes of a GPU.
        gpu_size: Measured bytes of the smallest GPU.
        host_size: Measured bytes of the smallest machine.
    """
    cluster = config.cluster
    if cluster.gpu_memory_gb and gpu_size and device > gpu_size:
        logger.warning(
            "cluster.gpu_memory_gb=%g describes larger GPUs than this machine has (%.3g GiB); remove the key to "
            "compare with these.",
            *(cluster.gpu_memory_gb, gpu_size / 2**30),
        )
    forecast = forecast_memory(config, device)
    for problem in forecast.shortfalls:
        logger.warning("%s", problem)
    group, kept = max(
        ((group, sum(plan.host.values())) for group, plan in forecast.groups.items()), key=lambda each: each[1]
    )
    share = None if host_size is None else host_size / cluster.policy_ranks_per_node
    if share is not None and kept > share:
        logger.warning(
            "%s keeps %.3g GiB per GPU in host memory, but a GPU's share of the machine's is %.3g GiB. To keep less, "
            "train without a reference (loss_fn.reference_policy_kl_penalty=0) or cpu_offload, or use more machines.",
            *(group, kept / 2**30, share / 2**30),
        )


def _too_large(config: RunConfig, group: str, plan: MemoryPlan, device: float) -> str | None:
    usable = device * (USABLE_SHARE if config.cluster.uses_gpu else 1.0)
    if plan.peak <= usable:
        return None
    engines = plan.peak_moment in ("generation", "weight sync")
    name = next((model for model in config.models if _is_phase_of(model, plan.peak_moment)), "policy")
    way_out = _LESS_ENGINE if engines else ways_to_less(name, getattr(config, name))
    return (
        f"{group} needs {_gib(plan.peak)} GiB of each device in the phase {plan.peak_moment!r}, "
        f"{_gib(plan.peak - usable)} GiB more than the {_gib(usable)} GiB that are usable. {way_out}"
    )


def _cache_too_small(policy: PolicyConfig, tokens: float | None) -> list[str]:
    if policy.generation is None or tokens is None or tokens >= policy.generation.engine.max_model_len:
        return []
    return [
        f"the key-value cache of an engine has room for {max(tokens, 0.0):.0f} tokens, less than one answer of "
        f"max_model_len={policy.generation.engine.max_model_len}. Give engines more devices (tensor_parallel_size) or "
        "a larger share of them (gpu_memory_utilization)."
    ]


_LESS_ENGINE = (
    "Less is needed with a smaller gpu_memory_utilization of the engines, with engines on devices of their own, or "
    "with more policy ranks."
)


def rows_per_prompt(config: RunConfig) -> int:
    """Return how many sequences of a batch start with the same prompt."""
    return config.algorithm.num_generations_per_prompt if isinstance(config, RolloutMasterConfig) else 1


def rows_per_sample(config: RunConfig) -> int:
    """Return the number of batch rows per sample: 2 for pairs of answers."""
    pairs = isinstance(config, SupervisedMasterConfig) and config.section in ("dpo", "rm")
    return 1 + (pairs and getattr(config.algorithm, "preference_loss", "") != "kto")


def _rows(config: RunConfig) -> dict[str, int]:
    return {"rows_per_prompt": rows_per_prompt(config), "rows_per_sample": rows_per_sample(config)}


@dataclass(frozen=True)
class _Forecast:
    cluster: ClusterConfig
    policy: PolicyConfig
    device: float
    service: ServiceConfig | None = None

    def groups(self, config: RunConfig) -> dict[str, MemoryPlan]:
        """Return the plan of each group of devices."""
        if not config.models:
            if config.policy.generation is None:
                return {}  # another server has the model
            return {"generation": MemoryPlan({}, {"generation": self.engine()}, {})}
        ranks = model_ranks(config.model_cluster, config.models)
        if self.service is not None:
            return self.served(self.service, ranks["policy"])
        plans = {name: self.phases(name, role, ranks[name], config) for name, role in config.models.items()}
        together = sharing(config.models) if self.cluster.uses_gpu else {name: [name] for name in config.models}
        groups: dict[str, MemoryPlan] = {}
        for owner, names in together.items():
            idle = {name: self.left_when_idle(name, config.models[name], plans[name]) for name in names}
            group, plan = " + ".join(names), _in_turns({name: plans[name] for name in names}, idle)
            groups |= self.with_engines(group, plan) if owner == "policy" else {group: plan}
        return groups

    def served(self, service: ServiceConfig, num_ranks: int) -> dict[str, MemoryPlan]:
        """Predict a base with as many adapters and samplers as the service keeps in memory, all of the largest rank.

        Ranks and engines work at the same time, each on the rank's own device.
        """
        # A rank of 1 gives the activations. Each of the adapters has its own matrices.
        lora = self.policy.dtensor_cfg.lora_cfg.model_copy(update={"enabled": True, "dim": 1})
        section = self.policy.dtensor_cfg.model_copy(update={"lora_cfg": lora})
        passes = self._predict(
            self.policy.model_copy(update={"dtensor_cfg": section}), num_ranks, trains=True, keeps_reference=False
        )
        frozen = self._predict(self.policy, num_ranks, trains=False, keeps_reference=False)
        numbers = service.max_rank * sum(slot_sizes(self._model).values())
        samplers = service.max_resident_samplers * numbers
        ranks: Moment = {
            **passes.moments[passes.peak_moment],
            **frozen.stays,
            "adapters and their optimizers": service.max_resident_models * numbers * _BYTES_OF_TRAINED,
            "samplers": samplers * WIDE,
        }
        engine = {**self.engine(), "samplers": 0.0 if self.cluster.uses_gpu else float(samplers * self._itemsize)}
        if self.cluster.uses_gpu:
            whole = {"serving": {**ranks, **engine, "samplers": ranks["samplers"]}}
            return {"policy + generation": MemoryPlan({}, whole, {}, passes.missing)}
        apart = MemoryPlan({}, {"generation": engine}, {})
        return {"policy": MemoryPlan({}, {"training": ranks}, {}, passes.missing), "generation": apart}

    def left_when_idle(self, name: str, role: Role, plan: MemoryPlan) -> Moment:
        """Return the memory that a model keeps on its devices while another user of the devices works."""
        if name == "policy":
            return {kind: size for kind, size in plan.moments["training"].items() if kind == "weights"}
        if not role.trains or training_backend(role.section).offloads_trained_weights:
            return {}
        return _of_model(name, {kind: size for kind, size in _state(plan).items() if kind == "weights"})

    def phases(self, name: str, role: Role, num_ranks: int, config: RunConfig) -> MemoryPlan:
        """Predict the phases of a single model: its training, and its forward passes for scores."""
        own = name == "policy"
        training, scores = ("training", "log-probs") if own else (f"{name}'s training", f"{name}'s scores")
        section, rows = role.section, _rows(config)
        plan = self._predict(section, num_ranks, trains=role.trains, keeps_reference=role.keeps_reference, **rows)
        if not role.trains:
            return MemoryPlan({}, {scores: _held(plan)}, plan.host, plan.missing)
        phases: dict[str, Moment] = {training: _held(plan)}
        if not own or role.keeps_reference or isinstance(config, PolicyGradientMasterConfig):
            passing = self._predict(section, num_ranks, trains=False, keeps_reference=True, **rows)
            stays = dict(plan.stays)
            if section.offload_optimizer_for_logprob and self.cluster.uses_gpu:
                stays.pop("optimizer state", None)
            phases[scores] = {**stays, **passing.moments[passing.peak_moment]}
        return MemoryPlan({}, phases, {**plan.host, **self._staged(plan, config)}, plan.missing)

    def _staged(self, plan: MemoryPlan, config: RunConfig) -> Moment:
        """Predict the copy of a trained model's state from which a checkpoint is written in the background."""
        saves = isinstance(config, MasterConfig) and config.checkpointing.enabled and config.checkpointing.is_async
        if not (saves and self.cluster.uses_gpu):
            return {}
        held = {**plan.host, **plan.stays}
        return {"copy for a checkpoint": sum(held.get(kind, 0.0) for kind in _STAYING)}

    def _predict(self, section: PolicyConfig, num_ranks: int, **work: Any) -> MemoryPlan:
        plan = training_backend(section).predict_memory(section, num_ranks, on_gpu=self.cluster.uses_gpu, **work)
        unknown = "This training backend predicts no memory."
        return MemoryPlan({}, {"training": {}}, {}, unknown) if plan is None else plan

    def with_engines(self, name: str, policy: MemoryPlan) -> dict[str, MemoryPlan]:
        """Add the engines to the policy's devices if they share them, or else as a separate group of devices."""
        if self.policy.generation is None:
            return {name: policy}
        engine = self.engine()
        if not (self.policy.generation.colocated.enabled and self.cluster.uses_gpu):
            stays = {kind: size for kind, size in policy.moments["training"].items() if kind in _STAYING}
            moments = {**policy.moments, "weight sync": {**stays, **self.transfer()}}
            apart = MemoryPlan({}, {"generation": engine}, {})
            return {name: MemoryPlan({}, moments, policy.host, policy.missing), "generation": apart}
        awake = {**_resting(policy), **engine}
        working = {phase: {**held, "sleeping engine": _ASLEEP} for phase, held in policy.moments.items()}
        moments = {**working, "generation": awake, "weight sync": {**awake, **self.transfer()}}
        state = policy.moments["training"].get("optimizer state", 0.0)
        state += policy.host.get("optimizer state", 0.0)
        host = {**policy.host, "optimizer state": state, "engine's weights": engine["engine's weights"]}
        return {f"{name} + generation": MemoryPlan({}, moments, host, policy.missing)}

    def transfer(self) -> Moment:
        """Predict the buffers of a weight sync: the buckets, and the largest tensor, which is usually an embedding."""
        generation, text = self.policy.sampling, self._model.get_text_config()
        whole = text.vocab_size * text.hidden_size * self._itemsize
        return {"whole tensor and buckets": whole + _SYNC_BUCKETS * generation.weight_sync.bucket_size_mb * 2.0**20}

    @cached_property
    def _model(self) -> PretrainedConfig:
        return load_model_config(self.policy.model_name, self.policy.hf_config_overrides)

    @property
    def _itemsize(self) -> int:
        return torch_dtype(engine_precision(self.policy)).itemsize

    @cached_property
    def _engine(self) -> EngineMemory:
        quantization = weight_quantization(self.policy, self.cluster)
        return engine_memory(self._model, self.policy.sampling, self._itemsize, quantization)

    @cached_property
    def _cache_bytes(self) -> float:
        """Bytes of a rank's key-value cache, as configured or as the engine's share of the device allows."""
        if self._settings.kv_cache_bytes is not None:
            return self._settings.kv_cache_bytes
        share = self.device * self._settings.gpu_memory_utilization
        return share - self._engine.weights - self._engine.workspace - self._slots

    @cached_property
    def _settings(self) -> EngineSettings:
        settings = engine_settings(self.policy, self.cluster, 0, load_weights=False)
        if self.service is None:
            return settings
        return replace(settings, holds_adapters=True, max_adapter_rank=self.service.max_rank)

    @cached_property
    def _slots(self) -> float:
        """Bytes that a rank of an engine reserves for adapters."""
        return adapter_slot_bytes(self._settings)

    def cache_tokens(self) -> float:
        """Return the number of tokens that fit into the cache. It is negative if weights and workspace do not fit."""
        return self._cache_bytes / self._engine.cache_per_token

    def engine(self) -> Moment:
        """Predict the memory of an engine's rank during generation, with the largest allowed cache."""
        return {
            "engine's weights": self._engine.weights,
            "engine's workspace": self._engine.workspace,
            "adapter slots": self._slots,
            "key-value cache": max(self._cache_bytes, 0.0),
        }


def _is_phase_of(name: str, phase: str) -> bool:
    """Return whether a phase belongs to the named model. Phases of the policy have names without a model."""
    return phase in (f"{name}'s training", f"{name}'s scores")


def _in_turns(plans: Mapping[str, MemoryPlan], idle: Mapping[str, Moment]) -> MemoryPlan:
    """Join the phases of models that share devices. In a model's phases, all other models are idle."""
    if len(plans) == 1:
        return next(iter(plans.values()))
    moments: dict[str, Moment] = {}
    host: dict[str, float] = {}
    for name, plan in plans.items():
        left = {kind: size for other in plans if other != name for kind, size in idle[other].items()}
        for phase, held in plan.moments.items():
            moments[phase] = (dict(held) if name == "policy" else _of_model(name, held)) | left
        host |= plan.host if name == "policy" else _of_model(name, _state(plan))
    missing = " ".join(dict.fromkeys(filter(None, (plan.missing for plan in plans.values()))))
    return MemoryPlan({}, moments, host, missing)


def _of_model(name: str, held: Moment) -> dict[str, float]:
    """Return the bytes by kind, with the name of the model before each kind."""
    return {f"{name}'s {kind}": size for kind, size in held.items()}


def _state(plan: MemoryPlan) -> dict[str, float]:
    """Return weights and optimizer state. If the model is not the policy, they are in host memory while it is idle."""
    held = next(iter(plan.moments.values()))  # the first phase is the training, if there is one
    return {kind: held[kind] for kind in _STAYING if kind in held}


def _resting(shared: MemoryPlan) -> dict[str, float]:
    """Return the bytes that the policy and models on its devices keep there while engines work."""
    return {
        kind: size
        for kind, size in shared.moments["training"].items()
        if kind == "weights" or kind.endswith("'s weights")
    }


def _held(plan: MemoryPlan) -> dict[str, float]:
    """Return the bytes of a rank in its peak phase."""
    return {**plan.stays, **plan.moments[plan.peak_moment]}


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"
