"""Join the sizes of all models and engines of a run into a proposal that fits.

Models next to the policy come first, then the policy, then the engines in the remaining memory. If no engine fits next
to the fastest sizes of the policy, slower sizes are tried. Invariant: a proposal has passed the rules of the
configuration, the checks of its backends and the forecast of memory that `--dry-run` makes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from nemo_rl.algorithms.setup.memory_forecast import USABLE_SHARE, MemoryForecast, forecast_memory
from nemo_rl.algorithms.setup.preflight import check_backends
from nemo_rl.commands.size.candidates import MOST_TOKENS, batching, rows_of_a_rank, values_of
from nemo_rl.commands.size.jobs import GpuKind, Job, with_values
from nemo_rl.commands.size.search import HEADROOM, EngineChoice, Fitting, Search, engine_choices
from nemo_rl.config import MasterConfig, PolicyGradientMasterConfig, RolloutMasterConfig
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.capacity.hub_configs import with_local_configs
from nemo_rl.utils.errors import ConfigError

_OF_ENGINES = ("engine's weights", "engine's workspace", "key-value cache")
_MOST_TRIED = 60
"""Largest number of policy sizes that are tried with engines, without sizes whose layout leaves engines no room."""
_LARGER_PASSES = (4, 2)


@dataclass(frozen=True)
class Proposal:
    """Parallel and batch sizes with which all models and engines of a run fit into GPU memory."""

    values: Mapping[str, Any]
    """Values by dotted key."""
    config: MasterConfig
    """Configuration of the run with these values, and with model configurations that exist on this machine."""
    models: Mapping[str, Fitting]
    """Sizes of each model, by name."""
    searches: Mapping[str, Search]
    """Search that found the sizes of each model, by name."""
    engine: EngineChoice | None
    """Sizes of the engines, or None if nothing is sampled."""
    forecast: MemoryForecast
    """Predicted memory."""
    headroom: float
    """Largest share of the usable memory that models may need."""

    @property
    def train_seconds(self) -> float:
        """Estimated seconds of all updates of a step, and of the passes of other models."""
        return sum(fitting.seconds.total * updates_of_a_step(self.config) for fitting in self.models.values())

    @property
    def seconds(self) -> float:
        """Estimated seconds of a step: the sum of sampling and training, or the longer of the two if they overlap."""
        sampling = self.engine.seconds if self.engine else 0.0
        overlaps = isinstance(self.config, RolloutMasterConfig) and self.config.algorithm.overlap.mode != "none"
        return max(sampling, self.train_seconds) if overlaps else sampling + self.train_seconds


def updates_of_a_step(config: MasterConfig) -> int:
    """Return the number of optimizer updates of a step."""
    if not isinstance(config, RolloutMasterConfig):
        return 1
    samples = config.algorithm.num_prompts_per_step * config.algorithm.num_generations_per_prompt
    return max(samples // config.policy.train_global_batch_size, 1)


def described(config: MasterConfig, gpu: GpuKind) -> MasterConfig:
    """Return a copy of a run whose model configurations exist on this machine and whose cluster has these GPUs.

    Raises:
        ConfigError: the sizes of the run cannot be searched.
    """
    if not config.cluster.uses_gpu:
        raise ConfigError(
            "cluster.device=cpu: sizes are predicted for GPUs only. Size the run for GPUs with cluster.device=cuda and "
            "cluster.gpus_per_node."
        )
    return with_values(with_local_configs(config), {"cluster.gpu_memory_gb": gpu.memory_gib})


def propose(config: MasterConfig, gpu: GpuKind, refused: list[str] | None = None) -> Proposal | None:
    """Find the fastest sizes that fit, or return None if no sizes fit.

    Args:
        config: the run, as `described` returns it, perhaps with changed keys.
        refused: gets the errors of backends that refused sizes which fit.

    Raises:
        ConfigError: a model or backend cannot be described.
    """
    errors = [] if refused is None else refused
    found = (_Placement(config, gpu, headroom, errors).find() for headroom in (HEADROOM, 1.0))
    return next(filter(None, found), None)


@dataclass(frozen=True)
class _Placement:
    config: MasterConfig
    gpu: GpuKind
    headroom: float
    refused: list[str]

    @property
    def device(self) -> float:
        """Bytes of a GPU."""
        return self.gpu.memory_gib * 2**30

    def find(self) -> Proposal | None:
        """Find the sizes of the other models, then of the policy and the engines, or return None if no sizes fit."""
        values: dict[str, Any] = {"cluster.gpu_memory_gb": self.gpu.memory_gib}
        models, searches = {}, {}
        for name in (name for name in self.config.models if name != "policy"):
            search = Search.of(Job(with_values(self.config, values), name, self.gpu), self.headroom)
            placed = next(search.fitting(), None)
            if placed is None:
                return None
            models[name], searches[name] = placed, search
            values |= values_of(search.job, placed.candidate)
        search = Search.of(Job(with_values(self.config, values), "policy", self.gpu), self.headroom)
        searches["policy"] = search
        without_room: set[tuple[ParallelLayout, bool]] = set()
        for fitting in islice(search.fitting(without_room), _MOST_TRIED):
            chosen = values | values_of(search.job, fitting.candidate)
            engines = self._engines(search.job, chosen)
            if not engines:  # a layout keeps the same on its devices for all microbatches
                without_room.add((fitting.candidate.layout, fitting.candidate.offload))
                continue
            found = self._complete(search.job, fitting, chosen, engines)
            if found is not None:
                more, engine, forecast = found
                changed = with_values(self.config, more)
                models["policy"] = fitting
                return Proposal(more, changed, models, searches, engine, forecast, self.headroom)
        return None

    def _engines(self, job: Job, chosen: Mapping[str, Any]) -> Sequence[EngineChoice | None]:
        """Return the engines that fit next to sizes of the models, or one None for a run without engines."""
        config = with_values(self.config, chosen)
        if config.policy.generation is None:
            return [None]
        return engine_choices(job, config, self._reserved(forecast_memory(config, self.device)))

    def _complete(
        self, job: Job, fitting: Fitting, chosen: dict[str, Any], engines: Sequence[EngineChoice | None]
    ) -> tuple[dict[str, Any], EngineChoice | None, MemoryForecast] | None:
        """Add microbatches of log-prob passes and engines to sizes of the models, or return None on a refusal."""
        if not self._is_proven(with_values(self.config, chosen)):
            return None
        chosen = chosen | self._passes(job, fitting, chosen)
        for engine in engines:
            values = chosen | (engine.values() if engine else {})
            config = with_values(self.config, values)
            if next(iter(config.findings()), None) is not None:
                continue
            forecast = forecast_memory(config, self.device)
            if not forecast.shortfalls:
                return values, engine, forecast
        return None

    def _passes(self, job: Job, fitting: Fitting, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Return the largest microbatch of log-prob passes that fits, up to four times the training microbatch."""
        config, candidate = with_values(self.config, chosen), fitting.candidate
        if not (isinstance(config, PolicyGradientMasterConfig) or config.keeps_reference):
            return {}
        most = min(MOST_TOKENS * candidate.layout.cp // job.length, rows_of_a_rank(job, candidate.layout))
        for factor in _LARGER_PASSES:
            values = batching(job, candidate.rows, candidate.rows * factor)
            if candidate.rows * factor > most:
                continue
            forecast = forecast_memory(with_values(config, values), self.device)
            held = (sum(plan.moments.get("log-probs", {}).values()) for plan in forecast.groups.values())
            if max(held) <= self.device * USABLE_SHARE * self.headroom:
                return values
        return {}

    def _reserved(self, forecast: MemoryForecast) -> float:
        """Return the bytes that models and a weight sync need on an engine's device."""
        shared = [plan for plan in forecast.groups.values() if "generation" in plan.moments]
        held = [plan.moments.get("weight sync", {}) for plan in shared]
        return max(sum(size for kind, size in each.items() if kind not in _OF_ENGINES) for each in held)

    def _is_proven(self, config: MasterConfig) -> bool:
        """Return whether the backends accept the models in a check that includes proofs on small models."""
        try:
            check_backends(config.models, config.model_cluster)
        except ConfigError as error:
            self.refused.append(str(error))
            return False
        return True


_COLOCATED = "policy.generation.colocated"
_MACHINES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_GPUS_OF_A_MACHINE = 8


def placements(engines: str, config: MasterConfig) -> list[dict[str, Any]]:
    """Return the values of the keys for each way to place the engines that is tried.

    Args:
        engines: value of `--engines`.

    Raises:
        ConfigError: the run has no engines to place, or the cluster has one GPU to divide.
    """
    if engines == "as-given":
        return [{}]
    if not isinstance(config, RolloutMasterConfig):
        raise ConfigError(f"--engines {engines} places engines, and this run samples nothing. Leave it out.")
    if engines == "colocated":
        return [{f"{_COLOCATED}.enabled": True}]
    if config.cluster.num_nodes * config.cluster.gpus_per_node < 2:
        raise ConfigError("--engines separate divides GPUs, and the cluster has one. Raise cluster.gpus_per_node.")
    return list(_divisions(config))


def placed(engines: str, config: MasterConfig, gpu: GpuKind, refused: list[str] | None = None) -> Proposal | None:
    """Propose the fastest sizes for the requested place of the engines.

    Args:
        engines: value of `--engines`.
        refused: as in `propose`.

    Raises:
        ConfigError: as in `placements` and `propose`.
    """
    ways = placements(engines, config)
    tried = [_with(keys, propose(with_values(config, keys), gpu, refused)) for keys in ways]
    return min((each for each in tried if each is not None), key=lambda each: each.seconds, default=None)


def smallest_cluster(engines: str, config: MasterConfig, gpu: GpuKind) -> tuple[int, int] | None:
    """Return nodes, and GPUs per node, of the smallest common cluster above this one with sizes that fit."""
    nodes, per_node = config.cluster.num_nodes, config.cluster.gpus_per_node
    more = [(1, gpus) for gpus in (2, 4, 8) if nodes == 1 and gpus > per_node]
    whole = max(per_node, _GPUS_OF_A_MACHINE) if nodes == 1 else per_node
    more += [(machines, whole) for machines in _MACHINES if machines > nodes]
    for machines, gpus in more:
        larger = with_values(config, {"cluster.num_nodes": machines, "cluster.gpus_per_node": gpus})
        ways = (with_values(larger, keys) for keys in placements(engines, larger))
        if any(_have_room(way, gpu) for way in ways) and placed(engines, larger, gpu) is not None:
            return machines, gpus
    return None


def _have_room(config: MasterConfig, gpu: GpuKind) -> bool:
    return all(Search.of(Job(config, name, gpu)).has_room() for name in config.models)


def _divisions(config: MasterConfig) -> Iterator[dict[str, Any]]:
    nodes, per_node = config.cluster.num_nodes, config.cluster.gpus_per_node
    off: dict[str, Any] = {f"{_COLOCATED}.enabled": False}
    total, key = (per_node, "gpus_per_node") if nodes == 1 else (nodes, "num_nodes")
    for engines in sorted({total // 4, total // 2, 3 * total // 4} - {0, total}):
        sizes = {f"{_COLOCATED}.resources.{key}": engines}
        yield off | sizes | ({f"{_COLOCATED}.resources.gpus_per_node": per_node} if nodes > 1 else {})


def _with(keys: dict[str, Any], found: Proposal | None) -> Proposal | None:
    """Add the keys for the place of the engines to a proposal."""
    if found is None:
        return None
    return Proposal(**{**vars(found), "values": {**keys, **found.values}})
