"""Serve adapters on one base model with policy ranks and generation engines.

    create, run_pass, update, save, score ─► one thread ─► AdapterPolicy: the ranks with base, adapters, optimizers
    publish, load_sampler ─────────────────► the same ───► the ranks keep a copy, and each engine gets one
    sample ────────────────────────────────► the event loop ─► EngineGroup: the engines with base and samplers

Calls of the ranks run one after another, in the order in which they arrive. The ranks score prompts, so that scores are
those of the training passes. Engines that die are replaced, and get all samplers again.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from nemo_rl.config import ClusterConfig, PolicyConfig, report_findings
from nemo_rl.config.rules.engines import check_zero_mismatch
from nemo_rl.config.rules.models import trust_models
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, init_ray
from nemo_rl.models.adapters.tensors import AdapterShape, AdapterTensors
from nemo_rl.models.adapters.training import AdamParams
from nemo_rl.models.generation.engine_group import EngineGroup
from nemo_rl.models.generation.factory import (
    check_engine_adapters,
    check_engine_model,
    engine_settings,
    make_engines,
)
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult, SamplingParams
from nemo_rl.models.generation.responses import stop_token_ids
from nemo_rl.models.huggingface.load import load_model_config
from nemo_rl.models.huggingface.sizes import expert_parameters_of
from nemo_rl.models.huggingface.tensor_files import download_models
from nemo_rl.models.policy.adapter_policy import AdapterPolicy, check_adapter_policy
from nemo_rl.models.policy.workers.adapter_rank import NamedLoss, Refusal
from nemo_rl.serving.fused_passes import PassQueue
from nemo_rl.serving.interfaces import (
    AdapterModels,
    LossSpec,
    ModelLimits,
    PassResult,
    PromptScores,
    RequestError,
    ScoreRequest,
    TrainingDatum,
)
from nemo_rl.serving.model_requests import (
    check_prompt,
    check_sampling,
    check_shape,
    check_update,
    named_loss,
    pass_result,
    prompt_scores,
    rows_of,
    score_rows,
)
from nemo_rl.utils.errors import ConfigError, DataError, GenerationError


class ServedModels(AdapterModels):
    """The adapters of one base model.

    Args:
        policy: ranks with the base and the adapters.
        engines: engines with the base and the samplers.
        limits: what the base accepts.
        timeout_s: seconds for the transfer of a sampler to the engines.
        resources: stack that ends all processes when it is closed.
        fused_models: largest number of adapters whose passes share the base.
    """

    def __init__(
        self,
        policy: AdapterPolicy,
        engines: EngineGroup,
        limits: ModelLimits,
        timeout_s: float,
        resources: ExitStack,
        fused_models: int = 1,
    ) -> None:
        self.limits = limits
        self._policy, self._engines, self._timeout_s, self._resources = policy, engines, timeout_s, resources
        self._adapters: set[str] = set()
        self._samplers: dict[str, AdapterTensors] = {}
        self._turns = ThreadPoolExecutor(1, thread_name_prefix="ranks")
        self._passes = PassQueue(self._run_passes, fused_models)
        engines.load_weights = self._give_all

    async def create(self, adapter: str, shape: AdapterShape) -> None:
        """Add an adapter (`AdapterModels.create`)."""
        check_shape(shape)
        await self._turn(self._policy.create, self._unused(adapter), shape)
        self._adapters.add(adapter)

    async def run_pass(
        self, adapter: str, data: Sequence[TrainingDatum], loss: LossSpec, *, backward: bool
    ) -> PassResult:
        """Compute a loss (`AdapterModels.run_pass`)."""
        self._require(adapter)
        named = named_loss(loss)
        rows = await asyncio.to_thread(rows_of, data, named, self.limits)
        return pass_result(data, *await self._passes.run(adapter, rows, named, backward=backward))

    async def update(self, adapter: str, params: AdamParams) -> dict[str, float]:
        """Make an update (`AdapterModels.update`)."""
        self._require(adapter)
        check_update(params)
        norm = await self._turn(self._policy.update, adapter, params)
        return {"grad_norm": norm}

    async def save(self, adapter: str, folder: Path, *, with_optimizer: bool) -> None:
        """Write an adapter (`AdapterModels.save`). The optimizer's state includes the gradients since its update."""
        self._require(adapter)
        await self._turn(self._policy.save, adapter, folder, with_optimizer=with_optimizer)

    async def load(self, adapter: str, folder: Path, *, with_optimizer: bool) -> AdapterShape:
        """Add the adapter of a folder (`AdapterModels.load`)."""
        shape = await self._turn(self._policy.load, self._unused(adapter), folder, with_optimizer=with_optimizer)
        self._adapters.add(adapter)
        return shape

    async def drop(self, adapter: str) -> None:
        """Forget an adapter (`AdapterModels.drop`)."""
        self._require(adapter)
        self._adapters.discard(adapter)
        await self._turn(self._policy.drop, adapter)

    async def publish(self, adapter: str, sampler: str) -> None:
        """Make a sampler from an adapter (`AdapterModels.publish`)."""
        self._require(adapter)
        await self._turn(self._add_sampler, self._unused(sampler), self._policy.keep_sampler, adapter)

    async def load_sampler(self, sampler: str, folder: Path) -> None:
        """Make a sampler from a folder (`AdapterModels.load_sampler`)."""
        await self._turn(self._add_sampler, self._unused(sampler), self._policy.load_sampler, folder)

    async def save_sampler(self, sampler: str, folder: Path) -> None:
        """Write the adapter of a sampler (`AdapterModels.save_sampler`)."""
        self._require_sampler(sampler)
        await self._turn(self._policy.save_sampler, sampler, folder)

    async def drop_sampler(self, sampler: str) -> None:
        """Forget a sampler (`AdapterModels.drop_sampler`)."""
        self._require_sampler(sampler)
        del self._samplers[sampler]

        def forget() -> None:
            self._policy.drop_sampler(sampler)
            self._on_engines("drop_adapter", sampler)

        await self._turn(forget)

    async def sample(
        self, sampler: str | None, prompt: Sequence[int], params: SamplingParams, seed: int
    ) -> GenerationResult:
        """Draw one response (`AdapterModels.sample`)."""
        self._require_sampler(sampler)
        token_ids = check_prompt(prompt, self.limits).tolist()
        check_sampling(params, len(token_ids), self.limits)
        try:
            return await self._engines.generate(GenerationRequest(token_ids, params, seed, adapter=sampler))
        except GenerationError as error:
            raise RequestError(str(error)) from error

    async def score(self, sampler: str | None, prompt: Sequence[int], request: ScoreRequest) -> PromptScores:
        """Score a prompt (`AdapterModels.score`)."""
        self._require_sampler(sampler)
        token_ids = check_prompt(prompt, self.limits)
        rows = score_rows(token_ids, request, self.limits)

        def compute() -> PromptScores:
            if len(token_ids) == 1:
                width = 1 if request.targets is None else 1 + np.shape(request.targets)[1]
                return prompt_scores(1, request, np.empty((0, width), np.float32), None)
            scores = self._policy.score(sampler, rows)[0].numpy()
            top = None
            if request.top_k:
                logprobs, ids = self._policy.most_likely(sampler, rows, request.top_k)
                top = logprobs[0], ids[0]
            return prompt_scores(len(token_ids), request, scores, top)

        return await self._turn(compute)

    def close(self) -> None:
        """End all processes."""
        self._turns.shutdown(wait=False, cancel_futures=True)
        self._resources.close()

    async def _turn[**P, R](self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function after those that arrived before.

        Raises:
            RequestError: the ranks refused the request.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._turns, lambda: work(*args, **kwargs))
        except DataError as error:
            raise RequestError(str(error)) from error

    async def _run_passes(
        self, rows: Mapping[str, BatchedDataDict[Any]], loss: NamedLoss, backward: bool
    ) -> dict[str, tuple[float, Tensor] | Refusal]:
        return await self._turn(self._policy.run_passes, rows, loss, backward=backward)

    def _add_sampler(self, sampler: str, keep: Callable[..., AdapterTensors], source: str | Path) -> None:
        self._samplers[sampler] = keep(sampler, source)
        self._on_engines("add_adapter", sampler, self._samplers[sampler])

    def _on_engines(self, method: str, *args: Any) -> None:
        """Call a method of all engines. If an engine has died, its replacement gets all samplers."""

        def call() -> None:
            calls = self._engines.call_all(method, *args)
            self._engines.workers.get_all_worker_results(calls, self._timeout_s, method.replace("_", " "))

        num_restarts = self._engines.num_restarts
        self._engines.with_replacements(call)
        if self._engines.num_restarts != num_restarts:
            self._give_all()

    def _give_all(self) -> None:
        """Give all samplers to all engines. Engines that have them replace them by equal ones."""
        for sampler, tensors in list(self._samplers.items()):
            self._on_engines("add_adapter", sampler, tensors)

    def _require(self, adapter: str) -> None:
        if adapter not in self._adapters:
            raise RequestError(f"There is no adapter {adapter!r}.")

    def _require_sampler(self, sampler: str | None) -> None:
        if sampler is not None and sampler not in self._samplers:
            raise RequestError(f"There is no sampler {sampler!r}.")

    def _unused(self, name: str) -> str:
        if name in self._adapters or name in self._samplers:
            raise ValueError(f"The name {name!r} is used already.")
        return name


def check_served(policy: PolicyConfig, cluster: ClusterConfig, fused_models: int = 1) -> None:
    """Check that the models of a configuration can be served. No process is started.

    Args:
        fused_models: largest number of adapters whose passes share the base.

    Raises:
        ConfigError: a setting is not supported. The message names it.
    """
    check_adapter_policy(policy)
    if policy.generation is None:
        raise ConfigError(
            "policy.generation is null, and a service samples. Set policy.generation.backend to vllm or hf."
        )
    if fused_models > 1 and expert_parameters_of(load_model_config(policy.model_name, policy.hf_config_overrides)):
        raise ConfigError(
            f"service.fused_models={fused_models}, but {policy.model_name} has experts, whose layers compute only some "
            "tokens of a pass. Set service.fused_models=1."
        )
    check_engine_adapters(policy, cluster)
    report_findings(check_zero_mismatch(policy, cluster))
    check_engine_model(policy, cluster)


def open_models(
    policy: PolicyConfig,
    cluster: ClusterConfig,
    seed: int,
    name: str = "served",
    max_rank: int = 64,
    fused_models: int = 1,
) -> ServedModels:
    """Start the ranks and engines of a base model, and block until they are ready.

    With `policy.zero_mismatch=true` the engines continue many rows at once, and the bits of a row do not depend on the
    others. Without it, a response may depend on the requests that are sampled at the same time in the last bits.

    Args:
        policy: the base in `model_name`, microbatches, and the engine in `generation`.
        cluster: devices and time limits.
        seed: seed of the ranks and engines. Requests have their own seeds.
        name: beginning of the names of the processes, which differs between the models of one Ray.
        max_rank: largest rank of an adapter.
        fused_models: largest number of adapters whose passes share the base. With 1, results do not depend on others.

    Raises:
        ConfigError: the configuration cannot be served.
        ResourceInsufficientError, DeadlineExceededError, WorkerDiedError: a process did not start.
    """
    trust_models([("model_name", "tokenizer.name", policy)])
    check_served(policy, cluster, fused_models)
    download_models([policy.model_name])
    init_ray(optimizations=cluster.optimizations)
    with ExitStack() as resources:
        places = _places(cluster, name)
        resources.callback(places.shutdown)
        plain = _at_temperature_one(policy)
        ranks = AdapterPolicy(places, plain, cluster, name_prefix=f"{name}_rank", seed=seed)
        resources.callback(ranks.shutdown)
        settings = engine_settings(policy, cluster, seed, load_weights=True)
        settings = replace(settings, can_sleep=False, holds_adapters=True, max_adapter_rank=max_rank)
        engines = make_engines(settings, places, cluster, name_prefix=f"{name}_engine")
        resources.callback(engines.shutdown)
        timeout_s = cluster.timeouts.weight_sync_s
        return ServedModels(ranks, engines, limits_of(policy), timeout_s, resources.pop_all(), fused_models)


def limits_of(policy: PolicyConfig) -> ModelLimits:
    """Return what the base model of a configuration accepts."""
    model = load_model_config(policy.model_name, policy.hf_config_overrides).get_text_config()
    eos = get_tokenizer(policy.tokenizer).eos_token_id
    return ModelLimits(
        max_context=min(policy.max_total_sequence_length, policy.sampling.engine.max_model_len),
        vocab_size=model.vocab_size,
        eos_ids=stop_token_ids(policy.model_name, eos, None, policy.hf_config_overrides),
    )


def _at_temperature_one(policy: PolicyConfig) -> PolicyConfig:
    """Return a section whose ranks score with the plain softmax."""
    assert policy.generation is not None, "checked before"
    plain: Mapping[str, Any] = {"temperature": 1.0, "top_k": None, "top_p": 1.0}
    return policy.model_copy(update={"generation": policy.generation.model_copy(update=plain)})


def _places(cluster: ClusterConfig, name: str) -> RayVirtualCluster:
    """Reserve a bundle for each rank, which an engine shares."""
    return RayVirtualCluster(
        [cluster.policy_ranks_per_node] * cluster.num_nodes,
        use_gpus=cluster.uses_gpu,
        max_colocated_worker_groups=2,
        num_gpus_per_node=max(cluster.gpus_per_node, 1),
        name=name,
        placement_group_strategy="STRICT_SPREAD",
        port_range_low=cluster.master_port_range_low,
        port_range_high=cluster.master_port_range_high,
    )
