"""Show how the quick start's task is learned with each mode of overlap: accuracy by step and by second.

    uv run --extra cpu python tools/benchmarks/overlap_learning.py [--steps 60] [--repeats 1]

Runs `grpo_math_cpu.yaml` with validation every ten steps, in turns, and prints a Markdown table: each cell has the
accuracy, and the seconds since the first validation. Linux only.
"""

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from grpo_vs_trl import OVERLAPS
from side_by_side import BENCH, Run, Step, run_side

logger = logging.getLogger("overlap_learning")

CORRECTED = "loss_fn.use_importance_sampling_correction=true"
AGE_4 = "grpo.overlap.max_age_steps=4"
VARIANTS = {
    "none": OVERLAPS["none"],
    "ahead, age 1": OVERLAPS["ahead"],
    "ahead, age 1, corrected": [*OVERLAPS["ahead"], CORRECTED],
    "ahead, age 4": [*OVERLAPS["ahead"], AGE_4],
    "ahead, age 4, corrected": [*OVERLAPS["ahead"], AGE_4, CORRECTED],
}


@dataclass
class Validation(Step):
    """One validation of a run.

    Attributes:
        step: training steps before it.
        accuracy: share of right answers.
    """

    step: int
    accuracy: float


def read_validations(lines: Iterator[str]) -> Iterator[Validation]:
    """Yield the validations in metrics.jsonl."""
    for line in lines:
        row = json.loads(line)
        if row["prefix"] == "validation":
            yield Validation(row["step"], row["metrics"]["accuracy"])


def measure(variant: str, arguments: argparse.Namespace) -> list[Validation]:
    """Run a variant and return its validations."""
    folder = BENCH / "runs" / f"learning-{variant.replace(', ', '-').replace(' ', '-')}-{int(time.time())}"
    folder.mkdir(parents=True)
    command = [sys.executable, "examples/run_grpo.py", "--config", "examples/configs/grpo_math_cpu.yaml"]
    command += [f"logger.log_dir={folder / 'logs'}", "logger.tensorboard_enabled=false"]
    command += ["checkpointing.enabled=false", "logger.save_trajectories=false"]
    command += ["grpo.val_period=10", f"grpo.max_num_steps={arguments.steps}", *VARIANTS[variant]]
    metrics = folder / "logs" / "exp_001" / "metrics.jsonl"
    run: Run[Validation] = run_side(command, metrics, read_validations, folder / "run.log", arguments.threads)
    logger.info("%s: %s", variant, ", ".join(f"{each.accuracy:.3f}" for each in run.steps))
    return run.steps


def table(results: dict[str, list[list[Validation]]]) -> str:
    """Format medians over the repeats: a row for each validation, a column for each variant."""
    lines = [f"| step | {' | '.join(results)} |", f"|---:|{'---:|' * len(results)}"]
    for index, first in enumerate(next(iter(results.values()))[0]):
        cells = []
        for runs in results.values():
            accuracy = statistics.median(run[index].accuracy for run in runs)
            seconds = statistics.median(run[index].seen_at_s - run[0].seen_at_s for run in runs)
            cells.append(f"{accuracy:.3f}, {seconds:.0f} s")
        lines.append(f"| {first.step} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each variant, in turns")
    parser.add_argument("--threads", type=int, default=2, help="processors and OpenMP threads")
    return parser.parse_args(arguments)


def main() -> None:
    """Run all variants in turns, and print the table."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    arguments = parse_arguments()
    BENCH.mkdir(exist_ok=True)
    (BENCH / ".gitignore").write_text("*\n")
    results: dict[str, list[list[Validation]]] = {variant: [] for variant in arguments.variants}
    for number in range(arguments.repeats):
        for variant in arguments.variants[:: -1 if number % 2 else 1]:
            results[variant].append(measure(variant, arguments))
    print(table(results))


if __name__ == "__main__":
    main()
