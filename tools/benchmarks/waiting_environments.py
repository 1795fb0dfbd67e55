"""Measure what overlap saves where environments wait: steps per minute of `none` and `ahead`, in turns.

    uv run --extra cpu python tools/benchmarks/waiting_environments.py --mean-s 1 5 --repeats 2

GRPO with the model of a million parameters, 8 prompts x 8 answers a step, three turns each. Before each answer the
environment waits for a log-normal time (sigma 1) with the given mean; samples whose turns end in the same moment wait
together. Linux only.
"""

import argparse
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from grpo_vs_trl import own_command
from side_by_side import BENCH, Run, Step, run_side, show

logger = logging.getLogger("waiting_environments")

NUM_TURNS = 3
ENVIRONMENT = "waiting_environment.WaitingEnvironment"


def read_steps(lines: Iterator[str]) -> Iterator[Step]:
    """Yield a step for each line of metrics.jsonl that ends one."""
    for line in lines:
        if json.loads(line)["prefix"] == "timing/train":
            yield Step()


def overrides_of(mode: str, mean_s: float, max_age: int) -> list[str]:
    """Return the overrides of a run."""
    waiting = [
        f"data.default.env_name={ENVIRONMENT}",
        f"++env={{{ENVIRONMENT}: {{mean_s: {mean_s}, num_turns: {NUM_TURNS}}}}}",
        f"grpo.max_rollout_turns={NUM_TURNS}",
        "policy.generation.max_new_tokens=16",
        "policy.max_total_sequence_length=256",
    ]
    if mode == "none":
        return waiting
    ahead = {"mode": "ahead", "order": "ready_first", "in_flight_weight_updates": "true", "max_age_steps": max_age}
    return waiting + [f"grpo.overlap.{key}={value}" for key, value in ahead.items()]


def steps_per_minute(mode: str, mean_s: float, arguments: argparse.Namespace) -> float:
    """Run one side and return its rate after the warm-up."""
    folder = BENCH / "runs" / f"waiting-{mode}-{mean_s:g}-{int(time.time())}"
    folder.mkdir(parents=True)
    command, metrics = own_command("uniform", "1m", folder, arguments)
    command += overrides_of(mode, mean_s, arguments.max_age)
    run: Run[Step] = run_side(command, metrics, read_steps, folder / "run.log", arguments.threads)
    return 60 / statistics.mean(run.step_seconds)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mean-s", nargs="+", type=float, default=[1.0, 5.0], help="mean seconds of a wait")
    parser.add_argument("--max-age", type=int, default=2, help="grpo.overlap.max_age_steps")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each side, alternating")
    parser.add_argument("--steps", type=int, default=15, help="of each run; the first 5 are a warm-up")
    parser.add_argument("--threads", type=int, default=2, help="processors and OpenMP threads")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args(arguments)


def main() -> None:
    """Run both sides alternately for each mean, and print a table."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    arguments = parse_arguments()
    sys.path.insert(0, str(Path(__file__).parent))
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # the environment's actor imports from here
    BENCH.mkdir(exist_ok=True)
    (BENCH / ".gitignore").write_text("*\n")
    print("| mean wait, s | none, steps/min | ahead, steps/min | ratio |\n|---:|---:|---:|---:|")
    for mean_s in arguments.mean_s:
        rates: dict[str, list[float]] = {"none": [], "ahead": []}
        for number in range(arguments.repeats):
            for mode in list(rates)[:: -1 if number % 2 else 1]:
                rates[mode].append(steps_per_minute(mode, mean_s, arguments))
                logger.info("mean %g s, %s: %s steps per minute", mean_s, mode, show(rates[mode][-1]))
        none, ahead = (statistics.median(rates[mode]) for mode in rates)
        print(f"| {mean_s:g} | {show(none)} | {show(ahead)} | {ahead / none:.2f} |", flush=True)


if __name__ == "__main__":
    main()
