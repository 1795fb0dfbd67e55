"""Measure the cost of a step in the driver when runner actors play the rollouts (`cluster.rollout_runners`).

    python tools/benchmarks/runners_at_scale.py                                # 10,240 samples of 1,024 tokens
    python tools/benchmarks/runners_at_scale.py --samples 1024 10240 102400 --tokens 1024 --runners 2 --engines 4

Ray, the runners and the environments' processes are real. Engines are actors whose answers are ready when a request
arrives. The parts of a step are those of `driver_at_scale.py`; their processor seconds are those of all threads of the
driver, so Ray's calls are in them. `fetch` is the time that one of 8 ranks needs to make the tensors of its rows. MiB
is the growth of the driver at its peak, without the shared memory of the object store.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import ray
import torch
from driver_at_scale import NUM_GENERATIONS, NUM_RANKS, PROMPT_TOKENS, ROOT, Answers, assign_credit, prompts
from transformers import AutoTokenizer

from nemo_rl.algorithms.rollout.batches import age_metrics, build_training_batch
from nemo_rl.config import ClusterConfig
from nemo_rl.data.messages.content import TextRules
from nemo_rl.data.packing import FixedSize
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.tensor_transport import pack_tensors
from nemo_rl.distributed.virtual_cluster import init_ray
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.workers.loading import import_path
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.metrics import rollout_metrics
from nemo_rl.experience.rollouts import RolloutKey, RolloutLimits
from nemo_rl.experience.runners.actor import RunnerSettings
from nemo_rl.experience.runners.client import RemoteRunner
from nemo_rl.experience.trajectory import Rollouts
from nemo_rl.models.batch_rows import BatchRows
from nemo_rl.models.generation.engine_group import EngineGroup
from nemo_rl.models.generation.interfaces import Collected, GenerationRequest, SamplingParams
from nemo_rl.models.policy.batching import count_valid, global_batches, shard_batch

_MIB = 1024


class InstantEngine:
    """Actor of an engine whose answers are ready when a request arrives.

    Args:
        tokens: of each answer.
    """

    def __init__(self, tokens: int) -> None:
        self._answers = Answers(tokens, AutoTokenizer.from_pretrained(ROOT / "examples/assets/tiny-chat"))
        self._ready: list[tuple[str, GenerationRequest]] = []
        self._has_news = asyncio.Event()

    async def call(self, method: str, content: Any) -> Collected:
        """Answer the calls `submit` and `collect` of an `EngineGroup`."""
        if method == "submit":
            self._ready += content
            self._has_news.set()
            return Collected([])
        await self._has_news.wait()
        self._has_news.clear()
        requests, self._ready = self._ready, []
        return Collected([(request_id, self._answers.receive(request)) for request_id, request in requests])


class InstantGrader(EnvironmentInterface[Any]):
    """Environment that rewards by the length of the answer."""

    post_processes_groups = True

    def __init__(self, cfg: dict[str, Any]) -> None:
        """Take a section of `env`."""

    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn[Any]:
        """See `EnvironmentInterface.step`."""
        count = len(metadata)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}] * count,
            metadata=metadata,
            next_stop_strings=[None] * count,
            rewards=torch.tensor([float(len(log[-1]["content"]) % 2) for log in message_log_batch]),
            terminateds=torch.ones(count, dtype=torch.bool),
            answers=None,
        )


class Rank:
    """Stands for a rank of the policy."""

    def fetch(self, rows: BatchedDataDict[Any]) -> float:
        """Return the seconds in which the tensors of some stored rows are made."""
        started = time.perf_counter()
        BatchRows.of(rows).whole()
        return time.perf_counter() - started


class _Engines:
    """Stands in for the `RayWorkerGroup` of the driver's `EngineGroup`, which sends no requests."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers

    def slot(self, worker_idx: int) -> SimpleNamespace:
        """Return a worker without a known place."""
        return SimpleNamespace(identity=None)


def peak_mib() -> float:
    """Return the largest private memory of this process, MiB; shared memory is left out."""
    with open("/proc/self/status") as lines:
        sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("RssAnon", "VmHWM"))}
    return int(sizes["RssAnon"]) / _MIB


def make_runner(options: argparse.Namespace) -> RemoteRunner:
    """Start engines and runners."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples/assets/tiny-chat")
    engine: Any = ray.remote(InstantEngine)
    workers = [engine.options(num_cpus=0, max_concurrency=64).remote(options.tokens) for _ in range(options.engines)]
    settings = RunnerSettings(
        engines=workers,
        workers_per_engine=1,
        environments={"task": ("runners_at_scale.InstantGrader", {})},
        cluster=ClusterConfig.build(device="cpu", gpus_per_node=0),
        tokenizer=tokenizer,
        limits=RolloutLimits(PROMPT_TOKENS + options.tokens + 1, max_turns=1, timeout_s=3600),
        text_rules=TextRules(),
        import_path=import_path({}),
        reads_collections=False,
    )
    group: Any = _Engines(workers)
    engines = EngineGroup(group, setup_timeout_s=3600, max_restarts=0)
    names: Any = {"task": SimpleNamespace(post_processes_groups=True)}
    return RemoteRunner(engines, names, settings, options.runners, EventLoopThread())


def measure(runner: RemoteRunner, samples: int, options: argparse.Namespace) -> dict[str, float]:
    """Return processor seconds of the parts as medians of steps, and the growth of the driver."""
    collect = partial(
        runner.collect,
        num_generations=NUM_GENERATIONS,
        sampling=SamplingParams(max_new_tokens=options.tokens),
    )
    rows = prompts(samples // NUM_GENERATIONS, vocab_size=500)
    collect(prompts(1, vocab_size=500), key=RolloutKey(0, "train", 0))
    before = peak_mib()
    taken = []
    for step in range(1, options.steps + 1):
        parts = take_step(partial(collect, rows, key=RolloutKey(0, "train", step)))
        taken.append(parts | {"MiB": peak_mib() - before})
    return {name: statistics.median(parts[name] for parts in taken) for name in taken[0]}


def take_step(collect: Callable[[], Rollouts]) -> dict[str, float]:
    """Run one step and return the processor seconds of each part, and the seconds in which a rank gets its rows."""
    parts: dict[str, float] = {}

    def timed[T](name: str, work: Callable[[], T]) -> T:
        start = time.process_time()
        value = work()
        parts[name] = time.process_time() - start
        return value

    started = time.perf_counter()
    found = timed("rollouts", collect)
    batch = timed("rows", partial(build_training_batch, found.trajectories, 0, mask_truncated=False))
    timed("metrics", lambda: rollout_metrics(found.trajectories) | age_metrics(found.trajectories, version=1))
    timed("advantages", partial(assign_credit, batch, found.trajectories))
    shards = timed("sending", partial(send, batch))
    parts["all"] = sum(parts.values())
    parts["wall"] = time.perf_counter() - started
    rank: Any = ray.remote(Rank)
    parts["fetch"] = ray.get(rank.options(num_cpus=0).remote().fetch.remote(shards[0]), timeout=600)
    return parts


def send(batch: BatchedDataDict[Any]) -> list[Any]:
    """Divide one update's rows over the ranks, and pass each rank's to Ray, as `Policy.train` does."""
    (rows,) = global_batches(batch, batch.size, allow_partial=False)
    count_valid(rows)
    return [ray.put(pack_tensors(shard)) for shard in shard_batch(rows, NUM_RANKS, FixedSize(8)).data]


def main() -> None:
    """Print one line for each number of samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[10_240])
    parser.add_argument("--tokens", type=int, default=1_024)
    parser.add_argument("--runners", type=int, default=1)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    init_ray(num_cpus=2)
    runner = make_runner(options)
    for samples in options.samples:
        parts = measure(runner, samples, options)
        shown = ", ".join(f"{name} {value:.2f}" for name, value in parts.items())
        sys.stdout.write(f"{samples:8,} samples of {options.tokens:,} tokens, {options.runners} runners: {shown}\n")
        sys.stdout.flush()
    runner.shutdown(timeout_s=10)
    ray.shutdown()


if __name__ == "__main__":
    main()
