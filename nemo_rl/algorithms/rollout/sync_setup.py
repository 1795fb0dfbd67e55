"""Choose how weights get from the policy to the engines, and check the first sync.

`config.rules.training` has already refused impossible choices.
"""

import logging
import uuid
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from nemo_rl.algorithms.rollout.refit import Refitter
from nemo_rl.algorithms.runtime.device_sharing import MemorySharing
from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.data.model_rows import ROW_INPUTS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.losses.objectives import bounded_exp
from nemo_rl.models.batch_rows import BatchRows, stale_tokens
from nemo_rl.models.generation.batches import VllmGeneration, cluster_config
from nemo_rl.models.generation.engine_group import EngineGroup
from nemo_rl.models.generation.factory import engine_precision
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.weight_stream import PolicyWeightStream
from nemo_rl.models.quantization import FP8, SIMULATED, weight_quantization
from nemo_rl.utils.errors import ConfigError, NotBuiltError, WeightSyncError
from nemo_rl.utils.timer import Timer
from nemo_rl.weight_sync.transport import TransportName, TransportSpec

logger = logging.getLogger(__name__)

MAX_COMPARED_TOKENS = 32
ROUNDING = {"float32": 1e-4, "float16": 0.003, "bfloat16": 0.01, "fp8": 0.05}
"""Relative difference of hidden states that one layer's rounding can cause, by number format."""


class SyncProbe:
    """Check that compares the log-probabilities of the policy and of the engines in the first batch.

    Args:
        refitter: Object that wakes the engines, and puts them to sleep if they share a device with the policy.
        max_error: Largest mean of `exp(|log p_trainer - log p_engine|)` over the sampled tokens. If None, no check.
        timeout_s: Time limit for answers of the engines, in seconds.
        precision: The less precise of the number formats of policy and engines.
    """

    def __init__(
        self,
        policy: Policy,
        generation: EngineGroup,
        refitter: Refitter,
        max_error: float | None,
        timeout_s: float,
        precision: str,
    ):
        self._policy = policy
        self._generation = generation
        self._refitter = refitter
        self._max_error = max_error
        self._timeout_s = timeout_s
        self._rounding = ROUNDING[precision]
        self._membership: int | None = None

    def check(self, batch: BatchedDataDict[Any], num_stale_B: Tensor | None = None) -> None:
        """Compare the log-probabilities, unless these engines have been compared before.

        Only tokens that the current weights sampled are compared. If a batch has none, the next batch is compared.

        Args:
            batch: `input_ids`, `input_lengths`, `token_mask` and `generation_logprobs`, or stored rows.
            num_stale_B: `StepBatch.num_stale_B`.

        Raises:
            WeightSyncError: The engines compute other log-probabilities than the policy.
        """
        membership = self._generation.membership
        if self._max_error is None or self._membership == membership:
            return
        batch = BatchRows.of(batch).to_compare()
        if num_stale_B is not None:
            stale_BT = stale_tokens(batch, num_stale_B[: batch.size])
            batch = BatchedDataDict({**batch, "token_mask": batch["token_mask"] * ~stale_BT})
        if not batch["token_mask"].any():
            return
        errors_BT = self._errors(batch)
        error = float(errors_BT.sum() / batch["token_mask"].sum())
        if not error <= self._max_error:
            raise WeightSyncError(self._explanation(batch, errors_BT, error))
        self._membership = membership
        logger.info("Engines sample from the policy: mult_prob_error %.6f in the first batch.", error)

    def _errors(self, batch: BatchedDataDict[Any]) -> Tensor:
        """Compute `exp(|log p_trainer - log p_engine|)` at sampled tokens, and 0 elsewhere, as `[B, T]`."""
        difference_BT = self._policy.get_logprobs(batch)["logprobs"] - batch["generation_logprobs"]
        return torch.where(batch["token_mask"] > 0, bounded_exp(difference_BT.abs()), 0.0)

    def _explanation(self, batch: BatchedDataDict[Any], errors_BT: Tensor, error: float) -> str:
        row = int((errors_BT.sum(1) / batch["token_mask"].sum(1).clamp(min=1)).argmax())
        length = min(int(batch["input_lengths"][row]), MAX_COMPARED_TOKENS)
        token_ids = batch["input_ids"][row, :length].tolist()
        only_tokens = ROW_INPUTS not in batch
        suspects = self._suspects(token_ids) if only_tokens else "Layers are compared for rows without images only."
        return (
            f"The engines do not sample from the policy: after the weight sync mult_prob_error is {error:.4g}, at most "
            f"policy.generation.weight_sync.max_mult_prob_error={self._max_error} is allowed; nothing was learned from "
            f"this batch. {suspects} Use another engine (policy.generation.backend=hf), the trainer's "
            "precision in the engine (policy.generation.engine.precision), or raise the limit if the difference is "
            "rounding."
        )

    def _suspects(self, token_ids: list[int]) -> str:
        """Return sentences that name, for each engine, the first layer whose output differs from the policy's."""
        self._refitter.ensure_fresh()
        workers = self._generation.workers
        calls = self._generation.call_all("layer_outputs", token_ids)
        of_workers = workers.get_all_worker_results(calls, self._timeout_s, "comparing layers")
        self._refitter.before_training()
        names, of_policy = self._policy.layer_outputs(token_ids)
        return " ".join(
            f"Engine {index}: {suspect_layer(names, of_policy, outputs, self._rounding)}."
            for index, outputs in enumerate(self._generation.of_engines(of_workers))
        )


def suspect_layer(names: Sequence[str], expected: Sequence[Tensor], outputs: Sequence[Tensor], rounding: float) -> str:
    """Name the layer after which the hidden states of two models differ.

    Rounding makes the difference grow slowly from layer to layer. A jump shows a layer that computes something else.

    Args:
        expected: Hidden states `[T, D]` after each layer.
        outputs: Hidden states of the suspected model, in the same form. Empty if it cannot report them.
        rounding: Relative difference that rounding can cause.
    """
    if [output.shape for output in outputs] != [output.shape for output in expected]:
        return "its layers cannot be compared with the policy's"
    differences = [
        float((output - right).norm() / right.norm().clamp(min=1e-30))
        for output, right in zip(outputs, expected, strict=True)
    ]
    jumps = [now / max(before, rounding) for before, now in zip([0.0, *differences], differences, strict=False)]
    index = max(range(len(names)), key=lambda position: jumps[position])
    if jumps[index] <= 2:
        return "all decoder layers agree, so the final norm or the output head is suspect"
    place = f"{names[index]} or the embeddings before it" if index == 0 else names[index]
    return (
        f"{place} is suspect, its output differs by {differences[index]:.2g} of its size "
        f"({differences[index - 1] if index else 0.0:.2g} before it)"
    )


def make_refitter(
    config: PolicyConfig, cluster: ClusterConfig, policy: Policy, engines: EngineGroup, memory: MemorySharing
) -> Refitter:
    """Build the refitter with the configured transport.

    Args:
        memory: Object that gives shared devices to the policy or to the engines.
    """
    generation = config.sampling
    sync = generation.weight_sync
    timeout_s = cluster.timeouts.weight_sync_s
    spec = TransportSpec(
        name=choose_transport(sync.transport, cluster, generation.colocated.enabled),
        run_id=uuid.uuid4().hex[:12],
        device=cluster.device,
        bucket_size_bytes=sync.bucket_size_mb << 20,
        verify=sync.verify,
        timeout_s=timeout_s,
    )
    quantization = weight_quantization(config, cluster)
    if quantization is not None and quantization.simulated:
        logger.warning(SIMULATED)
    stream = PolicyWeightStream(policy, engine_precision(config), timeout_s, quantization)
    # A block of float8 values may extend over several of the parts that engines read.
    return Refitter(stream, engines, spec, timeout_s, memory, sync.send_parts and quantization is None)


def refit_policy_generation(
    policy: Policy,
    policy_generation: EngineGroup | VllmGeneration,
    colocated_inference: bool,
    _refit_buffer_size_gb: float | None = None,
    timer: Timer | None = None,
    kv_scales: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Send the policy's weights to engines, with NeMo RL's arguments. A run does this by itself.

    Args:
        policy_generation: Engines that get the weights: `Run.generation`, or engines that the program started.
        colocated_inference: Whether policy and engines share devices.
        _refit_buffer_size_gb: Gibibytes that are sent at a time. If None, the value of `weight_sync.bucket_size_mb`.
        timer: Timer that records the time as `refit`.
        kv_scales: Must be None.

    Returns:
        Seconds, sizes and the number of tensors, named as in `Refitter.last_sync`.

    Raises:
        ConfigError: The policy does not say how weights are moved (`policy.generation` is null).
        NotBuiltError: `kv_scales` is given.
        WeightSyncError: The weights did not arrive, or arrived with other values.
    """
    if kv_scales:
        raise NotBuiltError("kv_scales: calibrated scales of an fp8 key-value cache are not built yet; the scale is 1.")
    if isinstance(policy_generation, VllmGeneration):
        engines, config = policy_generation.engines, policy_generation.config.model_copy(deep=True)
    else:
        engines, config = policy_generation, policy.config.model_copy(deep=True)
    if config.generation is None:
        raise ConfigError("policy.generation is null, but weights are to be moved to engines. Fill it in.")
    config.generation.colocated.enabled = colocated_inference
    if _refit_buffer_size_gb:
        config.generation.weight_sync.bucket_size_mb = max(1, int(_refit_buffer_size_gb * 1024))
    cluster = cluster_config(policy.worker_group.cluster)
    of_run = engines.load_weights
    refitter = make_refitter(config, cluster, policy, engines, MemorySharing())
    engines.load_weights = of_run or engines.load_weights
    with timer.time("refit") if timer else nullcontext():
        refitter.sync()
    return refitter.last_sync


def make_probe(
    config: PolicyConfig, cluster: ClusterConfig, policy: Policy, engines: EngineGroup, refitter: Refitter
) -> SyncProbe:
    """Build the check of the first sync. Arguments are those of `make_refitter`."""
    generation = config.sampling
    formats = {config.precision, engine_precision(config)}
    if FP8 in (generation.engine.precision, generation.engine.kv_cache_dtype[:3]):
        formats.add(FP8)
    return SyncProbe(
        policy,
        engines,
        refitter,
        1.0 if config.zero_mismatch else generation.weight_sync.max_mult_prob_error,
        cluster.timeouts.weight_sync_s,
        max(formats, key=ROUNDING.__getitem__),
    )


def choose_transport(asked: str, cluster: ClusterConfig, colocated: bool) -> TransportName:
    """Return the configured transport. For `weight_sync.transport=auto`, it is chosen by the cluster."""
    if asked != "auto":
        return asked  # type: ignore[return-value]
    if cluster.uses_gpu:
        return "cuda_ipc" if colocated else "collective"
    return "shared_memory" if cluster.num_nodes == 1 else "collective"
