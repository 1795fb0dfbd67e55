"""Predicted memory of every kind of device of a run, by phase, from the configuration alone.

`forecast_memory` adds up what the training backends predict for the models (`TrainingBackend.predict_memory`) and what
engines take, for models and engines that take turns on the same devices as `runtime.memory` lets them. Starts nothing
and needs neither a GPU nor weights: a model is its `config.json`.

Invariant: a group of devices appears once, under the names of what runs on it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PretrainedConfig

from nemo_rl.algorithms.setup.memory_check import memory_of_a_rank, ways_to_less
from nemo_rl.algorithms.setup.preflight import SECTIONS
from nemo_rl.config import (
    ClusterConfig,
    EvalMasterConfig,
    GRPOMasterConfig,
    MasterConfig,
    PolicyConfig,
    RolloutMasterConfig,
    TeacherConfig,
    model_ranks,
)
from nemo_rl.models.capacity.engine_memory import EngineMemory, engine_memory
from nemo_rl.models.capacity.memory import MemoryPlan, Moment
from nemo_rl.models.generation.factory import engine_precision, engine_settings
from nemo_rl.models.huggingface.load import load_model_config, torch_dtype
from nemo_rl.models.training.backends import training_backend

DEFAULT_GPU_GB = 80
"""Gibibytes of a GPU that is not here and that `cluster.gpu_memory_gb` does not describe."""
USABLE_SHARE = 0.93
"""What is left of a GPU beside CUDA contexts, NCCL's buffers and fragmentation, which no prediction has."""
_SYNC_BUCKETS = 2
_STAYING = ("weights", "optimizer state")


def device_bytes(cluster: ClusterConfig) -> float:
    """Memory of one GPU, or of a policy rank's share of this machine: what the keys say, else what is here."""
    return memory_of_a_rank(cluster) or DEFAULT_GPU_GB * 2**30


@dataclass(frozen=True)
class MemoryForecast:
    """What a run will need of memory.

    Attributes:
        groups: a plan for one device (on CPUs one process) of each group of devices, by what runs there, such as
            "policy + generation". Its `moments` are the phases "training", "log-probs", "teacher's scores",
            "generation" and "weight sync", those that the run has, with bytes by kind; `peak_moment` and `peak` are
            the phase that needs most; `host` is what a device's process keeps in host memory meanwhile.
        cache_tokens: tokens that the key-value cache of an engine has room for; None without engines.
        shortfalls: what does not fit, with the numbers and what to change; empty if all of it does.
    """

    groups: Mapping[str, MemoryPlan]
    cache_tokens: float | None
    shortfalls: Sequence[str]


def forecast_memory(config: MasterConfig | EvalMasterConfig, device: float) -> MemoryForecast:
    """Predict the memory of a run.

    Args:
        config: a checked configuration; models are folders, or hub models whose configuration can be had from here
            (`models.capacity.hub_configs.with_local_configs`).
        device: bytes of a device, see `device_bytes`; the engines' share is a part of it.

    Raises:
        ConfigError: a model's configuration cannot be read.
    """
    forecast = _Forecast(config.cluster, config.policy, device)
    groups = forecast.groups(config)
    tokens = None if config.policy.generation is None else forecast.cache_tokens()
    problems = [_too_large(config, group, plan, device) for group, plan in groups.items()]
    return MemoryForecast(groups, tokens, [*filter(None, problems), *_cache_too_small(config.policy, tokens)])


def _too_large(config: MasterConfig | EvalMasterConfig, group: str, plan: MemoryPlan, device: float) -> str | None:
    usable = device * (USABLE_SHARE if config.cluster.uses_gpu else 1.0)
    if plan.peak <= usable:
        return None
    name = "teacher" if plan.peak_moment == "teacher's scores" else "policy"
    engines = plan.peak_moment in ("generation", "weight sync")
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


def rows_per_prompt(config: MasterConfig) -> int:
    """Sequences of a batch that begin with the same prompt."""
    return config.algorithm.num_generations_per_prompt if isinstance(config, RolloutMasterConfig) else 1


@dataclass(frozen=True)
class _Forecast:
    cluster: ClusterConfig
    policy: PolicyConfig
    device: float

    def groups(self, config: MasterConfig | EvalMasterConfig) -> dict[str, MemoryPlan]:
        """The plan of each group of devices."""
        if isinstance(config, EvalMasterConfig):
            return {"generation": MemoryPlan({}, {"generation": self.engine()}, {})}
        ranks = dict(zip(SECTIONS, model_ranks(self.cluster, config.models), strict=False))
        name, plan = "policy", self.policy_phases(ranks["policy"], config)
        apart = {}
        for section in config.models[1:]:
            assert isinstance(section, TeacherConfig), "the second model of a run is a teacher"
            work = {"trains": False, "keeps_reference": False, "rows_per_prompt": rows_per_prompt(config)}
            teacher = self._predict(section, ranks["teacher"], **work)
            if section.colocated.enabled and self.cluster.uses_gpu:
                name, plan = f"{name} + teacher", self.with_teacher(plan, teacher)
            else:
                scores = {"teacher's scores": _held(teacher)}
                apart["teacher"] = MemoryPlan({}, scores, teacher.host, teacher.missing)
        return self.with_engines(name, plan) | apart

    def policy_phases(self, num_ranks: int, config: MasterConfig) -> MemoryPlan:
        """The trained model alone, by phase."""
        on_gpu, keeps_reference = self.cluster.uses_gpu, config.keeps_reference
        answers = rows_per_prompt(config)
        trained = self._predict(
            self.policy, num_ranks, trains=True, keeps_reference=keeps_reference, rows_per_prompt=answers
        )
        phases: dict[str, Moment] = {"training": _held(trained)}
        if keeps_reference or isinstance(config, GRPOMasterConfig):
            passing = self._predict(self.policy, num_ranks, trains=False, keeps_reference=True, rows_per_prompt=answers)
            stays = dict(trained.stays)
            if self.policy.offload_optimizer_for_logprob and on_gpu:
                stays.pop("optimizer state", None)
            phases["log-probs"] = {**stays, **passing.moments[passing.peak_moment]}
        return MemoryPlan({}, phases, trained.host, trained.missing)

    def _predict(self, section: PolicyConfig, num_ranks: int, **work: Any) -> MemoryPlan:
        plan = training_backend(section).predict_memory(section, num_ranks, on_gpu=self.cluster.uses_gpu, **work)
        unknown = "This training backend predicts no memory."
        return MemoryPlan({}, {"training": {}}, {}, unknown) if plan is None else plan

    def with_teacher(self, policy: MemoryPlan, teacher: MemoryPlan) -> MemoryPlan:
        """A frozen model on the policy's devices: its weights and the policy's optimizer state take turns."""
        scores = {f"teacher's {kind}": size for kind, size in _held(teacher).items()}
        moments = {**policy.moments, "teacher's scores": _resting(policy) | scores}
        host = {**policy.host, "teacher's weights": teacher.certain}
        missing = " ".join(dict.fromkeys(filter(None, (policy.missing, teacher.missing))))
        return MemoryPlan({}, moments, host, missing)

    def with_engines(self, name: str, policy: MemoryPlan) -> dict[str, MemoryPlan]:
        """The trained model's devices, and those of the engines: the same where they take turns."""
        if self.policy.generation is None:
            return {name: policy}
        engine = self.engine()
        if not (self.policy.generation.colocated.enabled and self.cluster.uses_gpu):
            stays = {kind: size for kind, size in policy.moments["training"].items() if kind in _STAYING}
            moments = {**policy.moments, "weight sync": {**stays, **self.transfer()}}
            apart = MemoryPlan({}, {"generation": engine}, {})
            return {name: MemoryPlan({}, moments, policy.host, policy.missing), "generation": apart}
        awake = {**_resting(policy), **engine}
        moments = {**policy.moments, "generation": awake, "weight sync": {**awake, **self.transfer()}}
        state = policy.moments["training"].get("optimizer state", 0.0)
        state += policy.host.get("optimizer state", 0.0)
        host = {**policy.host, "optimizer state": state, "engine's weights": engine["engine's weights"]}
        return {f"{name} + generation": MemoryPlan({}, moments, host, policy.missing)}

    def transfer(self) -> Moment:
        """Buffers of a weight sync: the largest tensor whole, which most models' vocabulary is, and buckets."""
        generation, text = self.policy.generation, self._model.get_text_config()
        assert generation is not None, "asked for a run that generates"
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
        assert self.policy.generation is not None, "asked for a run that generates"
        return engine_memory(self._model, self.policy.generation, self._itemsize)

    @cached_property
    def _cache_bytes(self) -> float:
        """Of a rank: as given, or what the engine's share of the device leaves."""
        settings = engine_settings(self.policy, self.cluster, 0, load_weights=False)
        if settings.kv_cache_bytes is not None:
            return settings.kv_cache_bytes
        return self.device * settings.gpu_memory_utilization - self._engine.weights - self._engine.workspace

    def cache_tokens(self) -> float:
        """Tokens that the cache has room for; negative where not even weights and workspace have."""
        return self._cache_bytes / self._engine.cache_per_token

    def engine(self) -> Moment:
        """A rank of an engine at work; its cache is as large as it may be."""
        return {
            "engine's weights": self._engine.weights,
            "engine's workspace": self._engine.workspace,
            "key-value cache": max(self._cache_bytes, 0.0),
        }


def _resting(policy: MemoryPlan) -> dict[str, float]:
    """What a trained model leaves on a device while others work: its weights."""
    return {kind: size for kind, size in policy.moments["training"].items() if kind == "weights"}


def _held(plan: MemoryPlan) -> dict[str, float]:
    """What a rank holds when it holds most."""
    return {**plan.stays, **plan.moments[plan.peak_moment]}


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"
