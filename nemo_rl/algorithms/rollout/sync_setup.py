"""Choose how weights get from the policy to the engines, and how the first sync is checked.

`config.rules.training` refuses choices that cannot work before anything starts.
"""

import logging
import uuid
from collections.abc import Mapping
from contextlib import nullcontext

from nemo_rl.algorithms.rollout.refit import Refitter
from nemo_rl.algorithms.rollout.sync_probe import ROUNDING, SyncProbe
from nemo_rl.algorithms.runtime.device_sharing import MemorySharing
from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.models.generation.batches import VllmGeneration, cluster_config
from nemo_rl.models.generation.engine_group import EngineGroup
from nemo_rl.models.generation.factory import engine_precision
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.weight_stream import PolicyWeightStream
from nemo_rl.models.quantization.choice import FP8, SIMULATED, weight_quantization
from nemo_rl.utils.errors import ConfigError, NotBuiltError
from nemo_rl.utils.timer import Timer
from nemo_rl.weight_sync.transport import TransportName, TransportSpec

logger = logging.getLogger(__name__)


def make_refitter(
    config: PolicyConfig, cluster: ClusterConfig, policy: Policy, engines: EngineGroup, memory: MemorySharing
) -> Refitter:
    """Choose the weight transport.

    Args:
        config: the section of the policy.
        cluster: the machines.
        policy: the source of the weights.
        engines: their destination.
        memory: hands shared devices over.
    """
    generation = config.generation
    assert generation is not None, "engine_settings checks this"
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
    # Blocks of float8 values do not end where the parts do that an engine reads.
    return Refitter(stream, engines, spec, timeout_s, memory, sync.send_parts and quantization is None)


def refit_policy_generation(
    policy: Policy,
    policy_generation: EngineGroup | VllmGeneration,
    colocated_inference: bool,
    _refit_buffer_size_gb: float | None = None,
    timer: Timer | None = None,
    kv_scales: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Move the policy's weights to engines, with NeMo RL's arguments; a run does so itself when they are stale.

    Args:
        policy: the source of the weights.
        policy_generation: their destination: `Run.generation`, or engines that the program started.
        colocated_inference: whether both share the devices.
        _refit_buffer_size_gb: gibibytes moved at a time; None is `weight_sync.bucket_size_mb`.
        timer: records the time as `refit`.
        kv_scales: must be None.

    Returns:
        Seconds, sizes and the number of tensors, as `train/sync_*` of a run.

    Raises:
        ConfigError: the policy does not say how weights are moved (`policy.generation` is null).
        NotBuiltError: `kv_scales` is given.
        WeightSyncError: the weights did not arrive, or not as they were sent.
    """
    if kv_scales:
        raise NotBuiltError("kv_scales: calibrated scales of an fp8 key-value cache are not built yet; it has scale 1.")
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
    """Build the check of the first sync; arguments as `make_refitter`."""
    generation = config.generation
    assert generation is not None, "engine_settings checks this"
    formats = {config.precision, engine_precision(config)}
    if FP8 in (generation.engine.precision, generation.engine.kv_cache_dtype[:3]):
        formats.add(FP8)
    return SyncProbe(
        policy,
        engines,
        refitter,
        generation.weight_sync.max_mult_prob_error,
        cluster.timeouts.weight_sync_s,
        max(formats, key=ROUNDING.__getitem__),
    )


def choose_transport(asked: str, cluster: ClusterConfig, colocated: bool) -> TransportName:
    """Resolve `weight_sync.transport=auto`; `config.rules.training` refuses transports that cannot work."""
    if asked != "auto":
        return asked  # type: ignore[return-value]
    if cluster.uses_gpu:
        return "cuda_ipc" if colocated else "collective"
    return "shared_memory" if cluster.num_nodes == 1 else "collective"
