"""Measure the cost of a step in the driver, with engines and environments that take no time.

    python tools/benchmarks/driver_at_scale.py                              # 10,240 samples of 1,024 tokens
    python tools/benchmarks/driver_at_scale.py --samples 10240 40960 102400 --tokens 256

It runs the driver's own parts one after the other, as a step does: rollouts on the event loop, the batch's tensors, its
metrics. An engine and an environment that answer immediately replace the workers; results are unpickled, as they would
be from Ray. Each line gives processor seconds of the parts and the growth of the process at its peak: once for the
first step, which allocates memory from the system, and as medians for the later steps.
"""

import argparse
import multiprocessing
import pickle
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nemo_rl.algorithms.rollout.batches import build_training_batch
from nemo_rl.data.interfaces import Message
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EpisodeStart, StepResult
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.metrics import rollout_metrics
from nemo_rl.experience.rollouts import RolloutKey, RolloutLimits, RolloutRunner
from nemo_rl.experience.trajectory import Rollouts
from nemo_rl.models.generation.interfaces import (
    GenerationRequest,
    GenerationResult,
    SamplingParams,
    VersionSpan,
)

ROOT = Path(__file__).resolve().parents[2]
PROMPT_TOKENS = 64
NUM_GENERATIONS = 16


class InstantEngine:
    """Engine that answers every request with tokens drawn in advance.

    An answer arrives as from an actor: unpickled, with arrays that are views of received bytes. The work of an engine's
    own process, such as decoding, is done in advance.
    """

    def __init__(self, tokens: int, tokenizer: PreTrainedTokenizerBase):
        drawn = np.random.default_rng(0)
        self._answers = [self._sent(drawn, tokens, tokenizer) for _ in range(64)]

    @staticmethod
    def _sent(drawn: np.random.Generator, tokens: int, tokenizer: PreTrainedTokenizerBase) -> tuple[bytes, list[bytes]]:
        """Return the pickle of an answer and its out-of-band arrays."""
        token_ids = drawn.integers(0, tokenizer.vocab_size, tokens, dtype=np.int32)
        result = GenerationResult(
            token_ids,
            -drawn.random(tokens, dtype=np.float32),
            "stop",
            [VersionSpan(0, 1)],
            text=tokenizer.decode(token_ids, skip_special_tokens=True),
        )
        buffers: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(result, protocol=5, buffer_callback=buffers.append)
        return pickled, [buffer.raw().tobytes() for buffer in buffers]

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See `GenerationInterface.generate`."""
        pickled, buffers = self._answers[request.seed % len(self._answers)]
        received = [memoryview(bytearray(buffer)).toreadonly() for buffer in buffers]
        result: GenerationResult = pickle.loads(pickled, buffers=received)
        return result


class InstantEnvironment:
    """Environment that rewards by the length of the answer."""

    post_processes_groups = False

    async def open_episode(self, metadata: Any) -> EpisodeStart[Any]:
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


def measure(samples: int, tokens: int, steps: int) -> dict[str, dict[str, float]]:
    """Return processor seconds of the parts and growth in MiB, for the first step and as medians of later steps."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples/assets/tiny-chat")
    engine = InstantEngine(tokens, tokenizer)
    loop = EventLoopThread()
    limits = RolloutLimits(max_sequence_length=PROMPT_TOKENS + tokens + 1, max_turns=1, timeout_s=3600)
    runner = RolloutRunner(engine, {"task": InstantEnvironment()}, tokenizer, limits, loop)  # type: ignore[arg-type]
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
    timed("tensors", partial(build_training_batch, found.trajectories, pad_token_id, mask_truncated=False))
    timed("metrics", lambda: rollout_metrics(found.trajectories))
    return parts


def main() -> None:
    """Print two lines for each number of samples; measure each number in a separate process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[10_240])
    parser.add_argument("--tokens", type=int, default=1_024)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    processes = multiprocessing.get_context("spawn")
    for samples in options.samples:
        with processes.Pool(1) as pool:
            figures = pool.apply(measure, (samples, options.tokens, options.steps))
        for when, parts in figures.items():
            shown = ", ".join(f"{name} {value:.2f}" for name, value in parts.items())
            sys.stdout.write(f"{samples:8,} samples of {options.tokens:,} tokens, {when:5}: {shown}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
