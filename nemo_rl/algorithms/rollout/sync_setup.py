"""Choose how weights get from the policy to the engines, and how the first sync is checked.

What cannot work is refused by `config.rules.training` before anything starts.
"""

import uuid

from nemo_rl.algorithms.rollout.refit import Refitter
from nemo_rl.algorithms.rollout.sync_probe import ROUNDING, SyncProbe
from nemo_rl.algorithms.runtime.memory import MemorySharing
from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.models.generation.engine_group import EngineGroup
from nemo_rl.models.generation.factory import engine_precision
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.weight_stream import PolicyWeightStream
from nemo_rl.weight_sync.interfaces import TransportName, TransportSpec


def make_refitter(
    config: PolicyConfig, cluster: ClusterConfig, policy: Policy, engines: EngineGroup, memory: MemorySharing
) -> Refitter:
    """Choose the weight transport.

    Args:
        config: the section of the policy.
        cluster: the machines.
        policy: where weights come from.
        engines: where they go.
        memory: who has the devices.
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
    stream = PolicyWeightStream(policy, engine_precision(config), timeout_s)
    return Refitter(stream, engines, spec, timeout_s, memory)


def make_probe(
    config: PolicyConfig, cluster: ClusterConfig, policy: Policy, engines: EngineGroup, refitter: Refitter
) -> SyncProbe:
    """The check of the first sync; arguments as `make_refitter`."""
    generation = config.generation
    assert generation is not None, "engine_settings checks this"
    formats = {config.precision, engine_precision(config)}
    return SyncProbe(
        policy,
        engines,
        refitter,
        generation.weight_sync.max_mult_prob_error,
        cluster.timeouts.weight_sync_s,
        max(formats, key=ROUNDING.__getitem__),
    )


def choose_transport(asked: str, cluster: ClusterConfig, colocated: bool) -> TransportName:
    """What `weight_sync.transport=auto` means here; `config.rules.training` refuses what cannot work."""
    if asked != "auto":
        return asked  # type: ignore[return-value]
    if cluster.uses_gpu:
        return "cuda_ipc" if colocated else "collective"
    return "shared_memory" if cluster.num_nodes == 1 else "collective"
