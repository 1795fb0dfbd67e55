"""Measure the cost of a step in the driver, with engines and environments that take no time.

    python tools/benchmarks/driver_at_scale.py                              # 10,240 samples of 1,024 tokens
    python tools/benchmarks/driver_at_scale.py --samples 10240 40960 102400 --tokens 256
    python tools/benchmarks/driver_at_scale.py --engines 1 8 64
    python tools/benchmarks/driver_at_scale.py --profile                    # and the functions that take the time

It runs the driver's own parts one after the other, as a step does: rollouts on the event loop with the group of engines
(`EngineGroup`), the batch's tensors, its metrics, advantages (GRPO), the division of the rows over 8 ranks, and the
pickling of each rank's rows. Engines' processes and an environment that answer immediately replace the workers;
requests are pickled and results unpickled, as Ray does it. What Ray adds for each call is not in the figures: there is
one call for some 16 samples.

Each line gives processor seconds of the parts and the growth of the process at its peak: once for the first step, which
allocates memory from the system, and as medians for the later steps.
"""

import argparse
import asyncio
import cProfile
import itertools
import multiprocessing
import pickle
import pstats
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nemo_rl.algorithms.credit.advantages import make_advantage_estimator
from nemo_rl.algorithms.grpo import CreditAssignment
from nemo_rl.algorithms.rollout.batches import age_metrics, build_training_batch
from nemo_rl.config import ClippedPGLossConfig, GRPOConfig
from nemo_rl.data.interfaces import Message
from nemo_rl.data.packing import FixedSize
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.tensor_transport import pack_tensors
from nemo_rl.environments.interfaces import EpisodeStart, StepResult
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.metrics import rollout_metrics
from nemo_rl.experience.rollouts import RolloutKey, RolloutLimits, RolloutRunner
from nemo_rl.experience.trajectory import Rollouts, Trajectory
from nemo_rl.models.batch_rows import BatchRows
from nemo_rl.models.generation.engine_group import EngineGroup
from nemo_rl.models.generation.interfaces import (
    Collected,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
    VersionSpan,
)
from nemo_rl.models.policy.batching import count_valid, global_batches, shard_batch

ROOT = Path(__file__).resolve().parents[2]
PROMPT_TOKENS = 64
NUM_GENERATIONS = 16
NUM_RANKS = 8
RESULTS_OF_A_CALL = 16
"""Answers that an engine returns together."""


class Answers:
    """Answers drawn in advance, as an engine's process sends them: a pickle, and arrays next to it."""

    def __init__(self, tokens: int, tokenizer: PreTrainedTokenizerBase):
        drawn = np.random.default_rng(0)
        self._sent = [self._make(drawn, tokens, tokenizer) for _ in range(64)]

    @staticmethod
    def _make(drawn: np.random.Generator, tokens: int, tokenizer: PreTrainedTokenizerBase) -> tuple[bytes, list[bytes]]:
        token_ids = drawn.integers(0, tokenizer.vocab_size, tokens, dtype=np.int32)
        result = GenerationResult(
            token_ids,
            -drawn.random(tokens, dtype=np.float32),
            "stop",
            [VersionSpan(0, 1)],
            text=tokenizer.decode(token_ids, skip_special_tokens=True),
        )
        return pickled(result)

    def receive(self, request: GenerationRequest) -> GenerationResult:
        """Unpickle the answer to a request, with arrays that are views of received bytes."""
        content, buffers = self._sent[request.seed % len(self._sent)]
        received = [memoryview(bytearray(buffer)).toreadonly() for buffer in buffers]
        result: GenerationResult = pickle.loads(content, buffers=received)
        return result


class InstantWorkers:
    """Stands in for the `RayWorkerGroup` of `EngineGroup`: engines whose answers are ready when a request arrives.

    Args:
        num_engines: workers, one for each engine.
        answers: to all requests.
    """

    def __init__(self, num_engines: int, answers: Answers):
        self.workers = list(range(num_engines))
        self._answers = answers
        self._ready: list[deque[tuple[str, GenerationRequest]]] = [deque() for _ in self.workers]
        self._polls: dict[int, asyncio.Future[Any]] = {}

    def run_single_worker_single_data(self, method: str, worker: int, *arguments: Any) -> asyncio.Future[Any]:
        """Answer the calls `submit` and `collect`."""
        answer = asyncio.get_running_loop().create_future()
        if method == "submit":
            pickled(arguments)
            self._ready[worker].extend(*arguments)
            answer.set_result(None)
        else:
            self._polls[worker] = answer
        if worker in self._polls and self._ready[worker]:
            self._polls.pop(worker).set_result(self._next_results(worker))
        return answer

    def _next_results(self, worker: int) -> Collected:
        ready = self._ready[worker]
        requests = [ready.popleft() for _ in range(min(RESULTS_OF_A_CALL, len(ready)))]
        return Collected([(request_id, self._answers.receive(request)) for request_id, request in requests])


def pickled(value: Any) -> tuple[bytes, list[bytes]]:
    """Return a pickle, and the bytes of the arrays next to it, as Ray writes them."""
    buffers: list[pickle.PickleBuffer] = []
    content = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return content, [buffer.raw().tobytes() for buffer in buffers]


class InstantEnvironment:
    """Environment that rewards by the length of the answer."""

    post_processes_groups = False
    reads_chat = False
    continues_episodes = False
    agent_section = None

    async def open_episode(self, metadata: Any, seed: int | None = None) -> EpisodeStart[Any]:
        """See `EnvironmentPort.open_episode`."""
        return EpisodeStart(metadata)

    async def step(self, message_log: list[Message], metadata: Any) -> StepResult:
        """See `EnvironmentPort.step`."""
        said = message_log[-1]["content"]
        return StepResult(
            observation={"role": "environment", "content": ""},
            metadata=metadata,
            next_stop_strings=None,
            reward=float(len(said) % 2),
            terminated=True,
            answer=None,
        )

    async def close_episode(self, metadata: Any) -> None:
        """See `EnvironmentPort.close_episode`."""

    async def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        """See `PostProcessor.global_post_process_and_metrics`."""
        return batch, {}


def prompts(count: int, vocab_size: int) -> BatchedDataDict[Any]:
    """Return collated rows of `PROMPT_TOKENS` tokens each."""
    ids = torch.randint(0, vocab_size, (count, PROMPT_TOKENS))
    return BatchedDataDict(
        {
            "message_log": [[{"role": "user", "content": "a question", "token_ids": row}] for row in ids],
            "idx": list(range(count)),
            "task_name": ["task"] * count,
            "loss_multiplier": torch.ones(count),
            "extra_env_info": [{} for _ in range(count)],
        }
    )


def measure(samples: int, tokens: int, steps: int, engines: int, profiles: bool) -> dict[str, dict[str, float]]:
    """Return processor seconds of the parts and growth in MiB, for the first step and as medians of later steps."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples/assets/tiny-chat")
    workers: Any = InstantWorkers(engines, Answers(tokens, tokenizer))
    group = EngineGroup(workers, setup_timeout_s=3600, max_restarts=0)
    loop = EventLoopThread()
    limits = RolloutLimits(max_sequence_length=PROMPT_TOKENS + tokens + 1, max_turns=1, timeout_s=3600)
    runner = RolloutRunner(group, {"task": InstantEnvironment()}, tokenizer, limits, loop)  # type: ignore[dict-item]
    sampling = SamplingParams(max_new_tokens=tokens)
    collect = partial(runner.collect, num_generations=NUM_GENERATIONS, sampling=sampling)
    collect(prompts(1, tokenizer.vocab_size), key=RolloutKey(0, "train", 0))
    rows = prompts(samples // NUM_GENERATIONS, tokenizer.vocab_size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    taken = []
    for step in range(1, steps + 1):
        parts = take_step(partial(collect, rows, key=RolloutKey(0, "train", step)), tokenizer.pad_token_id or 0)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        taken.append(parts | {"all": sum(parts.values()), "MiB": grown / 1024})
    if profiles:
        profile(partial(collect, rows, key=RolloutKey(0, "train", 0)), tokenizer.pad_token_id or 0, loop)
    loop.close()
    first, *later = taken
    return {"first": first} | ({"later": {name: median(t[name] for t in later) for name in first}} if later else {})


def take_step(collect: Callable[[], Rollouts], pad_token_id: int) -> dict[str, float]:
    """Run one step and return the processor seconds of each part."""
    parts: dict[str, float] = {}

    def timed[T](name: str, work: Callable[[], T]) -> T:
        start = time.process_time()
        value = work()
        parts[name] = time.process_time() - start
        return value

    found = timed("rollouts", collect)
    if failed := [t.error for t in found.trajectories if not t.has_reward]:
        raise RuntimeError(f"{len(failed)} rollouts failed, such as: {failed[0]}")
    batch = timed("tensors", partial(build_training_batch, found.trajectories, pad_token_id, mask_truncated=False))
    timed("metrics", lambda: rollout_metrics(found.trajectories) | age_metrics(found.trajectories, version=1))
    timed("advantages", partial(assign_credit, batch, found.trajectories))
    timed("sending", partial(send, batch))
    return parts


def assign_credit(batch: BatchedDataDict[Any], trajectories: Sequence[Trajectory]) -> None:
    """Write what GRPO adds to a batch before the update."""
    grpo, loss = GRPOConfig.build(), ClippedPGLossConfig.build()
    batch["num_counted_samples"] = torch.full_like(batch["sample_mask"], float(BatchRows.of(batch).counted().sum()))
    CreditAssignment(make_advantage_estimator(grpo, loss), grpo).assign(batch, trajectories)


def send(batch: BatchedDataDict[Any]) -> None:
    """Divide one update's rows over the ranks, and pickle those of each, as `Policy.train` does."""
    for rows in global_batches(batch, batch.size, allow_partial=False):
        count_valid(rows)
        sharded = shard_batch(rows, NUM_RANKS, FixedSize(8))
        for rank_rows in sharded.data:
            pickled(pack_tensors(rank_rows))


def profile(collect: Callable[[], Rollouts], pad_token_id: int, loop: EventLoopThread) -> None:
    """Run one more step, and print the functions that take the time, on the event loop and on the main thread."""
    on_loop, on_main = cProfile.Profile(), cProfile.Profile()

    async def switch(profiler: cProfile.Profile, *, on: bool) -> None:
        profiler.enable() if on else profiler.disable()

    loop.run(switch(on_loop, on=True), 60, "profiling")
    take_step(collect, pad_token_id)
    loop.run(switch(on_loop, on=False), 60, "profiling")
    found = collect()
    on_main.enable()
    take_step(lambda: found, pad_token_id)
    on_main.disable()
    for profiler in (on_loop, on_main):
        pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(25)


def main() -> None:
    """Print two lines for each number of samples and engines; measure each in a separate process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[10_240])
    parser.add_argument("--tokens", type=int, default=1_024)
    parser.add_argument("--engines", type=int, nargs="+", default=[8])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="print the functions of one more step")
    options = parser.parse_args()
    processes = multiprocessing.get_context("spawn")
    for samples, engines in itertools.product(options.samples, options.engines):
        with processes.Pool(1) as pool:
            figures = pool.apply(measure, (samples, options.tokens, options.steps, engines, options.profile))
        for when, parts in figures.items():
            shown = ", ".join(f"{name} {value:.2f}" for name, value in parts.items())
            sys.stdout.write(
                f"{samples:8,} samples of {options.tokens:,} tokens, {engines} engines, {when:5}: {shown}\n"
            )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
