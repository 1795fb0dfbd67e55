"""Simulate what overlap saves on many GPUs: steps per hour of `none` and `ahead`, in virtual time.

    python tools/benchmarks/simulation/overlap_simulation.py
    python tools/benchmarks/simulation/overlap_simulation.py --workloads sandboxes --ages 1 --steps 30

The rollout sources, the runner of rollouts and the stream of prompts are the library's own. Engines, environments and
trainer are stand-ins that only take time. Nothing is random: a request has the same length in every mode.

Assumptions, for a model of 8 billion parameters with grouped-query attention (131 kB of keys and values a token):

- 64 engines of one GPU each. A decoding step takes 7 ms (16 GB of weights, 3.35 TB/s, and overhead) and 0.2 ms for each
  running request (some 5,000 tokens of keys and values). At most 96 requests run at the same time (60 GB of cache);
  others wait. Reading a prompt takes no time.
- A trainer on 32 further GPUs: 5 us a token (forward, backward and recomputation are 8 floating-point operations for
  each token and parameter; 40 % of 1,000 TFLOP/s). Optimizer, data and metrics take no time.
- A weight sync takes 5 s. With updates in flight each engine then computes the keys and values of its running requests
  again, 25,000 tokens a second.
- A step has 256 prompts with 16 answers each. A prompt has 512 tokens. The tokens of a turn are log-normal; prompt and
  answer together have at most 32,768 tokens.
- Engines and trainer have their own GPUs in every mode. `shared` is `none` with all 96 GPUs used by engines and trainer
  in turns (`colocated.enabled=true`); switching takes no time.

Workloads:

- `maths`: one turn of 6,000 tokens in the mean, sigma 1; grading takes no time.
- `tools`: four turns of 1,000 tokens, sigma 1; each turn waits for a tool, 10 s in the mean, sigma 1.
- `sandboxes`: eight turns of 500 tokens, sigma 1; each turn waits for a sandbox, 60 s in the mean, sigma 1.

`ahead` has `order=ready_first` and `in_flight_weight_updates`. Left out of the rates are the first steps, in which the
groups that are sampled ahead build up, and the last ones, for which nothing is sampled ahead any more.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from stand_ins import EngineSpeed, LogNormal, OneToken, SimulatedEngines, SimulatedTrainer, WaitingEnvironment
from virtual_time import VirtualLoop

from nemo_rl.algorithms.rollout.ahead import AheadRollouts
from nemo_rl.algorithms.rollout.batches import check_staleness
from nemo_rl.algorithms.rollout.source import FreshRollouts, RolloutSource
from nemo_rl.config import OverlapConfig
from nemo_rl.data.loader import build_loader
from nemo_rl.data.streams.prompt_stream import PromptStream
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.rollouts import RolloutLimits, RolloutRunner
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.models.generation.interfaces import SamplingParams

NO_DEADLINE_S = 1e9
WARM_UP_STEPS = 8


@dataclass(frozen=True)
class Workload:
    """What is simulated; see the module for the meaning of the defaults.

    Attributes:
        turn_tokens: tokens of one turn of an answer.
        num_turns: turns of an answer.
        wait_s: seconds that the environment takes for a turn.
        num_engines: engines.
        engine: their speed.
        train_s_per_token: seconds of the trainer for each token of prompt and answer.
        sync_s: seconds of a weight sync.
        num_prompts: prompts of a step.
        num_generations: answers to each.
        prompt_tokens: tokens of a prompt.
        max_tokens: tokens of prompt and answer at most.
        scale: number of tokens that one token of the stand-ins' answers stands for.
    """

    turn_tokens: LogNormal
    num_turns: int = 1
    wait_s: LogNormal = LogNormal(0.0, 0.0)
    num_engines: int = 64
    engine: EngineSpeed = EngineSpeed(0.007, 0.0002, 25_000, 96)
    train_s_per_token: float = 5e-6
    sync_s: float = 5.0
    num_prompts: int = 256
    num_generations: int = 16
    prompt_tokens: int = 512
    max_tokens: int = 32_768
    scale: int = 64

    @property
    def shared(self) -> "Workload":
        """The same with engines and trainer on all 96 GPUs in turns; the trainer had a third of them."""
        return replace(self, num_engines=self.num_engines * 3 // 2, train_s_per_token=self.train_s_per_token / 3)


WORKLOADS = {
    "maths": Workload(LogNormal(6000, 1.0)),
    "tools": Workload(LogNormal(1000, 1.0), 4, LogNormal(10.0, 1.0)),
    "sandboxes": Workload(LogNormal(500, 1.0), 8, LogNormal(60.0, 1.0)),
}


@dataclass
class Simulation:
    """One run of one mode.

    Attributes:
        workload: what is simulated.
        overlap: the section of the configuration.
        num_steps: training steps.
        step_ends: virtual seconds at which each step ended.
    """

    workload: Workload
    overlap: OverlapConfig
    num_steps: int
    step_ends: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        load = self.workload
        self.loop = VirtualLoop()
        self._engines = SimulatedEngines(self.loop, load.num_engines, load.engine, load.turn_tokens, load.scale)
        self._trainer = SimulatedTrainer(self.loop, load.train_s_per_token, load.scale)
        longest = load.max_tokens // load.scale
        self._runner = RolloutRunner(
            self._engines,
            {"task": WaitingEnvironment(load.wait_s, load.num_turns)},
            OneToken(),  # type: ignore[arg-type]
            RolloutLimits(longest, load.num_turns, NO_DEADLINE_S),
            self.loop,
        )
        loader = build_loader(
            range(load.num_prompts * self.num_steps),  # type: ignore[arg-type]
            load.num_prompts,
            shuffle=False,
            seed=0,
            collate_fn=partial(_collate, max(load.prompt_tokens // load.scale, 1)),
        )
        self._prompts = PromptStream(loader, max_epochs=1)
        sampling = SamplingParams(max_new_tokens=longest)
        self._fresh = FreshRollouts(self._prompts, self._runner, sampling, load.num_generations, run_seed=0)

    def run(self) -> list[float]:
        """Run all steps; return `step_ends`."""
        source, train = self._parts()
        with self.loop.used_by_waits():
            for step in range(1, self.num_steps + 1):
                if step > 1:
                    self._runner.wait_for_groups()
                    self._engines.update_weights(self.workload.sync_s)
                groups = list(source.next_groups(step))
                samples = [sample for group in groups for sample in group.trajectories]
                check_staleness(samples, self._engines.weight_version, source.max_staleness)
                train(_lengths(samples))
                self._prompts.acknowledge(group.prompt for group in groups if group.prompt is not None)
                self.step_ends.append(self.loop.now)
        self.loop.close()
        return self.step_ends

    def _parts(self) -> tuple[RolloutSource, Callable[[BatchedDataDict[Any]], object]]:
        """Return the source of the mode, and the function that trains on a step."""
        overlap, trainer, loss_fn = self.overlap, self._trainer, torch.nn.Identity()
        if overlap.mode == "ahead":
            ahead = AheadRollouts(self._fresh, self.workload.num_prompts, overlap, self.num_steps)
            return ahead, partial(trainer.train, loss_fn=loss_fn)  # type: ignore[arg-type]
        return self._fresh, partial(trainer.train, loss_fn=loss_fn)  # type: ignore[arg-type]


def _collate(num_tokens: int, rows: Sequence[int]) -> BatchedDataDict[Any]:
    """Return prompts of `num_tokens` tokens."""
    token_ids = torch.zeros(num_tokens, dtype=torch.int64)
    return BatchedDataDict(
        {
            "message_log": [[{"role": "user", "content": "x", "token_ids": token_ids}] for _ in rows],
            "length": torch.full((len(rows),), num_tokens),
            "loss_multiplier": torch.ones(len(rows)),
            "extra_env_info": [{} for _ in rows],
            "task_name": ["task"] * len(rows),
            "idx": list(rows),
            "stop_strings": [None] * len(rows),
        }
    )


def _lengths(samples: Sequence[Trajectory]) -> BatchedDataDict[Any]:
    """Lay trajectories out by their lengths alone."""
    return BatchedDataDict({"input_lengths": torch.tensor([sample.length for sample in samples])})


def steps_per_hour(workload: Workload, overlap: OverlapConfig, num_steps: int) -> float:
    """Return the rate of a mode in the `num_steps` steps after the first ones; see the module."""
    first, last = WARM_UP_STEPS - 1, WARM_UP_STEPS - 1 + num_steps
    ends = Simulation(workload, overlap, last + 1 + overlap.max_age_steps).run()
    return 3600 * num_steps / (ends[last] - ends[first])


def modes(ages: Sequence[int]) -> Iterator[tuple[str, OverlapConfig]]:
    """Yield names and sections of the modes that are compared."""
    yield "none", OverlapConfig.build(mode="none")
    for age in ages:
        overlap = OverlapConfig.build(
            mode="ahead", max_age_steps=age, order="ready_first", in_flight_weight_updates=True
        )
        yield f"ahead, age {age}", overlap


def main() -> None:
    """Print a table: one line for each workload, one column for each mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--ages", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=10, help="that are measured")
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    names = [name for name, _ in modes(options.ages)]
    sys.stdout.write(f"| workload | {' | '.join(['shared', *names])} |\n|---|{'---:|' * (len(names) + 1)}\n")
    for name in options.workloads:
        workload = WORKLOADS[name]
        shared = steps_per_hour(workload.shared, OverlapConfig.build(mode="none"), options.steps)
        rates = [steps_per_hour(workload, overlap, options.steps) for _, overlap in modes(options.ages)]
        shown = [f"{rate:.1f} ({rate / rates[0]:.2f})" for rate in (shared, *rates)]
        sys.stdout.write(f"| {name} | {' | '.join(shown)} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
