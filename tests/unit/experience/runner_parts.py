"""Engines, an environment and settings for runner actors, so that they are tested without models."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
from transformers import AutoTokenizer

from nemo_rl.config import ClusterConfig
from nemo_rl.data.messages.content import TextRules
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.workers.loading import import_path
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.rollouts import RolloutLimits
from nemo_rl.experience.runners.actor import RunnerSettings
from nemo_rl.experience.runners.client import RemoteRunner
from nemo_rl.models.generation.engine_group import EngineGroup
from nemo_rl.models.generation.interfaces import Collected, GenerationResult, VersionSpan

SILENCE_S = 6.0
"""Seconds after which a runner counts as hung."""
_A = 64
"""Id of the token "a"; the other letters follow."""
_TOKENIZER = Path(__file__).resolve().parents[3] / "examples/assets/tiny-chat"


class SeededEngine:
    """Actor of an engine whose answers follow from the seeds of the requests.

    Args:
        delay_s: seconds to each answer.
    """

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._finished: list[Any] = []
        self._news = asyncio.Event()

    async def call(self, method: str, content: Any) -> Collected:
        """Answer the calls `submit` and `collect` of an `EngineGroup`."""
        if method == "submit":
            for request_id, request in content:
                asyncio.get_running_loop().call_later(self._delay_s, self._finish, request_id, request)
            return Collected([])
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), content)
        self._news.clear()
        results, self._finished = self._finished, []
        return Collected(results)

    def _finish(self, request_id: str, request: Any) -> None:
        ids = [_A + request.seed % 26, _A + request.seed // 26 % 26]
        result = GenerationResult(ids, [-0.25, -0.5], "stop", [VersionSpan(0, 0)])
        self._finished.append((request_id, result))
        self._news.set()


class LetterGrader(EnvironmentInterface[Any]):
    """Plays two turns, and rewards each by the first letter of the answer."""

    post_processes_groups = True

    def __init__(self, cfg: dict[str, Any]) -> None:
        """Take a section of `env`."""

    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn[Any]:
        """See `EnvironmentInterface.step`."""
        count = len(metadata)
        turns = [sum(message["role"] == "assistant" for message in log) for log in message_log_batch]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "again"}] * count,
            metadata=metadata,
            next_stop_strings=[None] * count,
            rewards=torch.tensor([float(ord(log[-1]["content"][0]) % 3) for log in message_log_batch]),
            terminateds=torch.tensor([turn == 2 for turn in turns]),
            answers=None,
        )


class Workers:
    """Stands in for the `RayWorkerGroup` of the driver's `EngineGroup`.

    Args:
        nodes: Ray's id of the node of each engine.
        delay_s: as `SeededEngine`.
    """

    def __init__(self, nodes: Sequence[str], delay_s: float) -> None:
        self.nodes, self.delay_s = nodes, delay_s
        self.num_restarts = 0
        self.workers = [self._start() for _ in nodes]

    def _start(self) -> Any:
        engine: Any = ray.remote(SeededEngine)
        return engine.options(num_cpus=0, max_concurrency=64).remote(self.delay_s)

    def slot(self, worker_idx: int) -> SimpleNamespace:
        """Return where a worker runs."""
        return SimpleNamespace(identity=SimpleNamespace(node_id=self.nodes[worker_idx]))

    def restart_workers(self, worker_idxs: Sequence[int], timeout_s: float) -> None:
        """Start engines again."""
        self.num_restarts += len(worker_idxs)
        for index in worker_idxs:
            self.workers[index] = self._start()


def make_runner(workers: Workers, num_runners: int, loop: EventLoopThread) -> RemoteRunner:
    """Start runners for the engines."""
    timeouts = {"rollout_runner_silence_s": SILENCE_S}
    settings = RunnerSettings(
        engines=workers.workers,
        workers_per_engine=1,
        environments={"game": ("runner_parts.LetterGrader", {})},
        cluster=ClusterConfig.build(device="cpu", gpus_per_node=0, timeouts=timeouts),
        tokenizer=AutoTokenizer.from_pretrained(_TOKENIZER),
        limits=RolloutLimits(max_sequence_length=256, max_turns=2, timeout_s=120.0),
        text_rules=TextRules(),
        import_path=import_path({}),
        reads_collections=False,
    )
    group: Any = workers
    engines = EngineGroup(group, setup_timeout_s=60, max_restarts=3)
    names: Any = {"game": SimpleNamespace(post_processes_groups=True)}
    return RemoteRunner(engines, names, settings, num_runners, loop)
