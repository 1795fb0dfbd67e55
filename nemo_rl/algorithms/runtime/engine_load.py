"""Count the open requests of each engine while a step samples, to show how evenly engines work.

`policy.generation.vllm_cfg.enable_vllm_metrics_logger` switches it on, for engines of any kind. Only requests that this
process sends are counted, not those of runners in other processes.
"""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from nemo_rl.config import PolicyConfig
from nemo_rl.models.generation.interfaces import GenerationInterface


def engine_load(
    policy: PolicyConfig, engines: GenerationInterface, threads: ExitStack
) -> Callable[[], dict[str, float]]:
    """Return a function that returns the load of the engines since its last call.

    Args:
        policy: section of the model that engines sample from.
        engines: the engines.
        threads: ends the thread that counts.
    """
    assert policy.generation is not None, "engine_settings checks this"
    section = policy.generation.vllm_cfg
    if not section.enable_vllm_metrics_logger:
        return engines.load_metrics
    counts = RequestCounts(engines, section.vllm_metrics_logger_interval)
    counts.start()
    threads.callback(counts.stop)
    return counts.since_last_call


@dataclass
class RequestCounts:
    """Counts open requests from time to time on a thread."""

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
        """Return `GenerationInterface.load_metrics`, and the open requests of each engine since the last call.

        Returns:
            `engine.<i>.open_requests_mean` and `engine.<i>.open_requests_max` of engine i, besides the load.
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
