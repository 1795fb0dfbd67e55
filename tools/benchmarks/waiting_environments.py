"""Measure what overlap saves where environments wait: steps per minute of `none` and `ahead`, in turns.

    uv run --extra cpu python tools/benchmarks/waiting_environments.py --mean-s 1 5 --max-age 1 2 --repeats 2

GRPO with a model of a million parameters and 8 prompts x 8 answers a step by default, three turns each. Before each
answer the environment waits for a log-normal time (sigma 1) with the given mean, each sample its own. Linux only.
"""

import argparse
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_vs_trl import own_command
from side_by_side import BENCH, Run, Step, run_side, show
from workloads import SIZES

logger = logging.getLogger("waiting_environments")

NUM_TURNS = 3
ENVIRONMENT = "waiting_environment.WaitingEnvironment"


def read_steps(lines: Iterator[str]) -> Iterator[Step]:
    """Yield a step for each line of metrics.jsonl that ends one."""
    for line in lines:
        if json.loads(line)["prefix"] == "timing/train":
            yield Step()


@dataclass(frozen=True)
class Mode:
    """One side of the comparison.

    Attributes:
        name: value of `grpo.overlap.mode`.
        max_age: value of `grpo.overlap.max_age_steps`; 0 for the modes without it.
    """

    name: str
    max_age: int = 0

    def __str__(self) -> str:
        return f"{self.name} age {self.max_age}" if self.max_age else self.name


def overrides_of(mode: Mode, mean_s: float, arguments: argparse.Namespace) -> list[str]:
    """Return the overrides of a run."""
    waiting = [
        f"grpo.num_prompts_per_step={arguments.prompts}",
        f"grpo.num_generations_per_prompt={arguments.answers}",
        f"policy.train_global_batch_size={arguments.prompts * arguments.answers}",
        f"data.default.env_name={ENVIRONMENT}",
        f"++env={{{ENVIRONMENT}: {{mean_s: {mean_s}, num_turns: {NUM_TURNS}}}}}",
        f"grpo.max_rollout_turns={NUM_TURNS}",
        "policy.generation.max_new_tokens=16",
        "policy.max_total_sequence_length=256",
    ]
    overlap: dict[str, str | int] = {"mode": mode.name}
    if mode.max_age:
        overlap |= {"order": "ready_first", "in_flight_weight_updates": "true", "max_age_steps": mode.max_age}
    return waiting + [f"grpo.overlap.{key}={value}" for key, value in overlap.items()]


def steps_per_minute(mode: Mode, mean_s: float, arguments: argparse.Namespace) -> float:
    """Run one side and return its rate after the warm-up."""
    folder = BENCH / "runs" / f"waiting-{mode.name}-{mode.max_age}-{mean_s:g}-{int(time.time())}"
    folder.mkdir(parents=True)
    command, metrics = own_command("uniform", arguments.size, folder, arguments)
    command += overrides_of(mode, mean_s, arguments)
    run: Run[Step] = run_side(command, metrics, read_steps, folder / "run.log", arguments.threads)
    return 60 / statistics.mean(run.step_seconds)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mean-s", nargs="+", type=float, default=[1.0, 5.0], help="mean seconds of a wait")
    parser.add_argument("--modes", nargs="+", choices=["none", "ahead"], default=["none", "ahead"])
    parser.add_argument("--max-age", nargs="+", type=int, default=[1, 2], help="values of grpo.overlap.max_age_steps")
    parser.add_argument("--size", default="1m", choices=list(SIZES), help="parameters of the model")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a step")
    parser.add_argument("--answers", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each side, alternating")
    parser.add_argument("--steps", type=int, default=15, help="of each run; the first 5 are a warm-up")
    parser.add_argument("--threads", type=int, default=2, help="processors and OpenMP threads")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args(arguments)


def main() -> None:
    """Run the sides in turns for each mean, and print a table with ratios to the first side."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    arguments = parse_arguments()
    sys.path.insert(0, str(Path(__file__).parent))
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # the environment's actor imports from here
    BENCH.mkdir(exist_ok=True)
    (BENCH / ".gitignore").write_text("*\n")
    ages = {"ahead": arguments.max_age}
    sides = [Mode(name, age) for name in arguments.modes for age in ages.get(name, [0])]
    print("| mean wait, s | mode | steps/min | ratio |\n|---:|:---|---:|---:|")
    for mean_s in arguments.mean_s:
        rates: dict[Mode, list[float]] = {side: [] for side in sides}
        for number in range(arguments.repeats):
            for side in sides[:: -1 if number % 2 else 1]:
                rates[side].append(steps_per_minute(side, mean_s, arguments))
                logger.info("mean %g s, %s: %s steps per minute", mean_s, side, show(rates[side][-1]))
        medians = {side: statistics.median(values) for side, values in rates.items()}
        for side, median in medians.items():
            print(f"| {mean_s:g} | {side} | {show(median)} | {median / medians[sides[0]]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
