"""Measure the throughput of a step: tokens and operations per second, per device, and the utilisation of GPUs.

`Session` logs the result under `performance/`, with NeMo RL's names where it has such metrics. Tokens are counted
without padding. The number of operations follows `models.huggingface.sizes`. The time of forward and backward passes is
measured in the policy's ranks, so rates are also right if gradients are computed while the step still samples.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.host.capacity import usable_cores
from nemo_rl.models.generation.interfaces import GenerationInterface
from nemo_rl.models.huggingface.sizes import peak_tflops
from nemo_rl.models.policy.workers.costs import PassCosts, PassWork, WorkCount

logger = logging.getLogger(__name__)

_HALF = ("bfloat16", "float16")


class Worker(Protocol):
    """Interface of a model whose forward and backward passes are counted, such as `Policy`."""

    work: WorkCount


@dataclass
class Throughput:
    """Compute the throughput of a run's steps."""

    policy: Worker
    """The model that is trained."""
    precision: str
    """Number format in which the model computes."""
    policy_devices: int
    """Number of GPUs of the policy. On CPUs, the number of its ranks."""
    devices: int
    """Number of GPUs of the run. On CPUs, the number of cores of this machine."""
    uses_gpu: bool
    """Whether the devices are GPUs."""
    samples_in_phase: bool = True
    """Whether all answers of a step are sampled in the phase `generation`, so that its time gives a rate. False if
    sampling also runs during other phases."""
    _told: PassCosts | None = field(default=None, init=False)

    @classmethod
    def of(
        cls, policy: Worker, precision: str, num_ranks: int, cluster: ClusterConfig, samples_in_phase: bool = True
    ) -> "Throughput":
        """Return an object that measures a policy of `num_ranks` ranks on a cluster."""
        devices = cluster.num_nodes * cluster.gpus_per_node if cluster.uses_gpu else usable_cores()
        return cls(policy, precision, num_ranks, devices, cluster.uses_gpu, samples_in_phase)

    def begin_step(self) -> None:
        """Discard passes since the last step, such as those of a validation."""
        self.policy.work.take()

    def of_step(self, metrics: Mapping[str, float], timings: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of a step, and start to count the next step.

        Args:
            metrics: Metrics of the step: `total_num_tokens`, `num_samples`, `mean_gen_tokens_per_sample` are used.
            timings: Seconds of the step's phases: `total_step_time` and `generation` are used.
        """
        seconds, tokens, samples = timings["total_step_time"], metrics.get("total_num_tokens", 0.0), _samples(metrics)
        rates = {"tokens_per_sec": tokens / seconds, "samples_per_sec": samples / seconds}
        generated = samples * metrics.get("mean_gen_tokens_per_sample", 0.0)
        if self.samples_in_phase and generated and timings.get("generation"):
            rates["generation_tokens_per_sec"] = generated / timings["generation"]
        unit = "gpu" if self.uses_gpu else "core"
        found = rates | {f"{name}_per_{unit}": rate / self.devices for name, rate in rates.items()}
        passes = self.policy.work.take()
        trained, scored = passes["training"], passes["scoring"]
        of_passes = {
            "policy_training": _rate(trained),
            "policy_and_reference_logprobs": _rate(scored),
            "training_worker_group": _rate(
                PassWork(trained.lengths + scored.lengths, trained.seconds + scored.seconds)
            ),
        }
        found |= {f"{name}_tokens_per_sec": rate for name, rate in of_passes.items() if rate}
        if self.uses_gpu:
            found |= {
                f"{name}_tokens_per_sec_per_gpu": rate / self.policy_devices for name, rate in of_passes.items() if rate
            }
        shared = {"policy_training": trained, "policy_and_reference_logprobs": scored}
        found |= {f"{name}_shared_tokens": float(work.shared_tokens) for name, work in shared.items() if work.lengths}
        return found | self._operations(trained, scored)

    def _operations(self, trained: PassWork, scored: PassWork) -> dict[str, float]:
        """Return the operations per second. Return nothing without passes, or if operations cannot be counted."""
        if not trained.lengths and not scored.lengths:
            return {}
        costs = self.policy.work.costs
        self._tell_once(costs)
        if costs.flops is None:
            return {}
        found: dict[str, float] = {}
        operations = {"train": costs.flops.training(trained.lengths), "logprob": costs.flops.forward(scored.lengths)}
        for name, work in (("train", trained), ("logprob", scored)):
            if work.lengths:
                found[f"{name}_tflops"] = operations[name] / work.seconds / 1e12
        if not self.uses_gpu:
            return found
        found |= {
            f"{name.removesuffix('_tflops')}_flops_per_gpu": rate / self.policy_devices for name, rate in found.items()
        }
        peak = self._peak(costs)
        if peak is not None:
            for name in ("train", "logprob"):
                if f"{name}_flops_per_gpu" in found:
                    found[f"{name}_fp_utilization"] = found[f"{name}_flops_per_gpu"] / peak
        return found

    def _peak(self, costs: PassCosts) -> float | None:
        """Return the TFLOP/s of the device at full utilisation, or None if it is unknown."""
        name = costs.device
        return peak_tflops(name) if name and self.precision in _HALF else None

    def _tell_once(self, costs: PassCosts) -> None:
        """Log why a metric is missing, once per reason."""
        if costs == self._told:
            return
        self._told = costs
        if costs.flops is None:
            logger.info("The model's operations cannot be counted, so no FLOP/s are reported (%s).", costs.reason)
        elif self.uses_gpu and self._peak(costs) is None:
            why = f"the peak of {costs.device} is not known" if self.precision in _HALF else f"it is {self.precision}"
            logger.info("No utilisation (MFU) is reported: %s.", why)


def _samples(metrics: Mapping[str, float]) -> float:
    return metrics.get("num_samples", 0.0)


def _rate(work: PassWork) -> float:
    return work.tokens / work.seconds if work.seconds else 0.0


def engine_load(
    policy: PolicyConfig, engines: GenerationInterface, threads: ExitStack
) -> Callable[[], dict[str, float]]:
    """Return a function that returns the load of the engines since its last call.

    Args:
        policy: Section of the model that the engines use.
        threads: Stack that ends the thread that counts open requests.
    """
    section = policy.sampling.vllm_cfg
    if not section.enable_vllm_metrics_logger:
        return engines.load_metrics
    counts = OpenRequestCounter(engines, section.vllm_metrics_logger_interval)
    counts.start()
    threads.callback(counts.stop)
    return counts.since_last_call


@dataclass
class OpenRequestCounter:
    """Thread that counts the open requests of each engine at regular intervals."""

    engines: GenerationInterface
    interval_s: float
    """Seconds between two counts."""
    _counts: list[list[int]] = field(default_factory=list, init=False)
    _guard: threading.Lock = field(default_factory=threading.Lock, init=False)
    _stopped: threading.Event = field(default_factory=threading.Event, init=False)

    def start(self) -> None:
        """Begin to count."""
        threading.Thread(target=self._run, name="open-requests", daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()

    def since_last_call(self) -> dict[str, float]:
        """Return `GenerationInterface.load_metrics`, and statistics of the open requests since the last call.

        Returns:
            The load, and for each engine i `engine.<i>.open_requests_mean` and `engine.<i>.open_requests_max`.
        """
        with self._guard:
            counts, self._counts = self._counts, []
        found = self.engines.load_metrics()
        for index in range(min(map(len, counts), default=0)):
            of_engine = [count[index] for count in counts]
            found[f"engine.{index}.open_requests_mean"] = sum(of_engine) / len(of_engine)
            found[f"engine.{index}.open_requests_max"] = float(max(of_engine))
        return found

    def _run(self) -> None:
        while not self._stopped.wait(self.interval_s):
            count = self.engines.open_requests()
            with self._guard:
                self._counts.append(count)
