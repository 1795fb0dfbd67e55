"""Measure what the endpoint for agents costs: tokens per second of equal conversations with and without it, in turns.

    uv run --extra cpu python tools/benchmarks/agent_overhead.py --size 25m --turns 8 --repeats 3

64 conversations at the same time: an environment that asks again after each answer, and two programs that do the same
through the endpoint, one on the package openai and one that writes its requests itself. Programs run in the
environment's process, on the same processors, so the difference between the two is what the package costs. Linux only.
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

logger = logging.getLogger("agent_overhead")

NUM_WARM_UP = 2
ENVIRONMENT = "agent_workload.SeveralTurns"
PROGRAMS = {"openai": "converse", "plain HTTP": "converse_plainly"}
SIDES = ("environment", *PROGRAMS)


@dataclass
class Rollouts(Step):
    """One step.

    Attributes:
        tokens_per_second: sampled tokens by the seconds of sampling.
        prefix_hits: share of later turns that continued on the engine that holds their prefix.
    """

    tokens_per_second: float = 0.0
    prefix_hits: float = 0.0


def read_rollouts(lines: Iterator[str]) -> Iterator[Rollouts]:
    """Yield a step for each line of metrics.jsonl that ends one."""
    train: dict[str, float] = {}
    for line in lines:
        entry = json.loads(line)
        if entry["prefix"] == "train":
            train = entry["metrics"]
        if entry["prefix"] == "timing/train":
            tokens = train["mean_gen_tokens_per_sample"] * train["num_samples"]
            yield Rollouts(
                tokens_per_second=tokens / entry["metrics"]["generation"],
                prefix_hits=train.get("prefix_hit_rate", 0.0),
            )


def overrides_of(side: str, turns: int) -> list[str]:
    """Return the overrides of a run."""
    shared = ["policy.generation.max_new_tokens=32", f"policy.max_total_sequence_length={turns * 64 + 64}"]
    if side == "environment":
        return [
            *shared,
            f"data.default.env_name={ENVIRONMENT}",
            f"++env={{{ENVIRONMENT}: {{num_turns: {turns}}}}}",
            f"grpo.max_rollout_turns={turns}",
        ]
    section = f"{{program: agent_workload.{PROGRAMS[side]}, kwargs: {{num_turns: {turns}}}, max_calls: {turns}}}"
    return [*shared, "data.default.env_name=agent", f"++env={{agent: {section}}}"]


def measure(side: str, arguments: argparse.Namespace) -> Rollouts:
    """Run one side; return the medians of its steps after the warm-up."""
    folder = BENCH / "runs" / f"agents-{side.replace(' ', '-')}-{int(time.time())}"
    folder.mkdir(parents=True)
    command, metrics = own_command("uniform", arguments.size, folder, arguments)
    command += overrides_of(side, arguments.turns)
    run: Run[Rollouts] = run_side(command, metrics, read_rollouts, folder / "run.log", arguments.threads)
    steps = run.steps[NUM_WARM_UP:]
    return Rollouts(
        tokens_per_second=statistics.median(step.tokens_per_second for step in steps),
        prefix_hits=statistics.median(step.prefix_hits for step in steps),
    )


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", default="25m", choices=list(SIZES), help="parameters of the model")
    parser.add_argument("--turns", type=int, default=8, help="turns of a conversation")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side, alternating")
    parser.add_argument("--steps", type=int, default=6, help=f"of each run; the first {NUM_WARM_UP} are a warm-up")
    parser.add_argument("--threads", type=int, default=2, help="processors and OpenMP threads")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args(arguments)


def main() -> None:
    """Run the sides in turns, and print a table."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    arguments = parse_arguments()
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # the environment's actor imports from here
    BENCH.mkdir(exist_ok=True)
    (BENCH / ".gitignore").write_text("*\n")
    found: dict[str, list[Rollouts]] = {side: [] for side in SIDES}
    for number in range(arguments.repeats):
        for side in SIDES[:: -1 if number % 2 else 1]:
            found[side].append(measure(side, arguments))
            logger.info("%s: %s tokens per second", side, show(found[side][-1].tokens_per_second))
    rates = {side: statistics.median(one.tokens_per_second for one in each) for side, each in found.items()}
    print("| side | tokens/s | ratio | prefix hits |\n|:---|---:|---:|---:|")
    for side, rate in rates.items():
        hits = statistics.median(one.prefix_hits for one in found[side])
        print(f"| {side} | {show(rate)} | {rate / rates[SIDES[0]]:.3f} | {hits:.2f} |", flush=True)


if __name__ == "__main__":
    main()
