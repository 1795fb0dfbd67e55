"""The choice of what moves weights to the engines, and when engines get only the parts that they read."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl.algorithms.rollout.refit import Refitter
from nemo_rl.algorithms.rollout.sync_setup import choose_transport, make_refitter
from nemo_rl.algorithms.runtime.device_sharing import MemorySharing
from nemo_rl.config import ClusterConfig, GRPOMasterConfig, load_config
from nemo_rl.weight_sync.transport import TransportSpec
from nemo_rl.weight_sync.verify import SyncReceipt

CONFIG = "examples/configs/grpo_math_cpu.yaml"
ENGINES: Any = SimpleNamespace(workers_per_engine=2)
POLICY: Any = SimpleNamespace(worker_group=None)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("device", "num_nodes", "colocated", "transport"),
    [
        ("cuda", 1, True, "cuda_ipc"),
        ("cuda", 2, True, "cuda_ipc"),
        ("cuda", 1, False, "collective"),
        ("cpu", 1, True, "shared_memory"),
        ("cpu", 1, False, "shared_memory"),
        ("cpu", 2, False, "collective"),
    ],
)
def test_weights_go_through_memory_that_both_sides_have(
    device: str, num_nodes: int, colocated: bool, transport: str
) -> None:
    cluster = ClusterConfig.build(device=device, num_nodes=num_nodes, gpus_per_node=1 if device == "cuda" else 0)
    assert choose_transport("auto", cluster, colocated) == transport
    assert choose_transport("shared_memory", cluster, colocated) == "shared_memory"


@pytest.mark.parametrize(
    ("overrides", "sends_parts"),
    [
        ((), True),
        (("policy.generation.weight_sync.send_parts=false",), False),
        (("policy.generation.vllm_cfg.precision=fp8",), False),
    ],
)
def test_engines_of_several_workers_get_parts_unless_blocks_of_float8_do_not_end_with_them(
    overrides: tuple[str, ...], sends_parts: bool
) -> None:
    config = load_config(CONFIG, ["policy.generation.backend=vllm", *overrides], schema=GRPOMasterConfig)
    cluster = config.cluster.model_copy(update={"num_nodes": 2})
    refitter = make_refitter(config.policy, cluster, POLICY, ENGINES, MemorySharing())
    assert refitter._lanes.wants_reads == sends_parts


@pytest.mark.fast
def test_a_sync_is_described_by_its_largest_receiver() -> None:
    receipts = [SyncReceipt("one", 3, 10, 2_500_000), SyncReceipt("two", 3, 12, 1_000_000)]
    engines: Any = SimpleNamespace(
        workers_per_engine=1,
        membership=7,
        weight_version=0,
        exclusively=nullcontext,
        with_replacements=lambda once: receipts,
    )
    policy: Any = SimpleNamespace(weight_version=3, held=nullcontext)
    refitter = Refitter(policy, engines, TransportSpec("shared_memory", run_id="t"), 1.0)
    refitter.sync()
    assert engines.weight_version == 3
    sizes = refitter.last_sync
    assert (sizes["sync_mb"], sizes["num_tensors"]) == (2.5, 12.0)
    assert sizes["sync_mb_per_s"] * sizes["sync_s"] == pytest.approx(2.5, rel=0.01)


class Trial(Refitter):
    """Syncs whose engines read one tensor and compute what is given; remembers which syncs are trials."""

    def __init__(self, computed: list[bytes]) -> None:
        engines: Any = SimpleNamespace(
            workers_per_engine=2, membership=1, exclusively=nullcontext, with_replacements=lambda once: once()
        )
        policy: Any = SimpleNamespace(weight_version=1, held=nullcontext)
        super().__init__(policy, engines, TransportSpec("collective", run_id="t"), 1.0)
        self.trials: list[bool] = []
        self._results = iter(computed)

    def _transfer(self, is_trial: bool = False) -> list[SyncReceipt]:
        self.trials.append(is_trial)
        return [SyncReceipt("one", 1)]

    def _on_engines(self, method: str, *args: Any) -> list[Any]:
        return [method]

    def _wait(self, calls: list[Any], phase: str) -> list[Any]:
        return [{"weight": "block"}] * 2

    def _computed(self) -> list[Any]:
        return [[], [next(self._results)] * 2]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("computed", "trials"),
    [([b"same", b"same"], [False, True, False]), ([b"same", b"other"], [False, True, False, False])],
)
def test_parts_are_sent_on_trial_first(computed: list[bytes], trials: list[bool]) -> None:
    """Tensors of a trial are NaN where nothing was sent, so that an engine that reads more computes something else."""
    refitter = Trial(computed)
    refitter.sync()
    refitter.sync()
    assert refitter.trials == trials
