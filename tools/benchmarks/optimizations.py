"""Measure what each optimization of `nemo_rl/optimizations` saves, by GRPO runs with each one off in turns.

    uv run --extra cpu python tools/benchmarks/optimizations.py --sizes 1m 3m 25m --repeats 3

Runs the GRPO run of `grpo_vs_trl` with all optimizations, with each one off, and with none, and prints a Markdown table
for each model: medians over the repeats, and how much larger each figure is than with all. Every repeat runs all of
them, in an order that differs from the last one, so that a machine that becomes slower favours none.

A run that is over is stored, and a command that is started again with the same results file continues. Linux only, on
an idle machine.
"""

import argparse
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from grpo_vs_trl import own_command
from side_by_side import BENCH, Run, Step, run_side, show
from workloads import SIZES, WORKLOADS

from nemo_rl.optimizations.switch import OPTIMIZATIONS

logger = logging.getLogger("optimizations")

ALL, NONE = "all", "none"
WITHOUT_EFFECT = ("garbage_collection",)
"""Takes effect from 4,096 samples a step; these runs have 64. `driver_at_scale.py` has more."""
FIGURES = {
    "step_s": "seconds per step",
    "step_cpu_s": "processor seconds per step",
    "first_step_s": "seconds to the end of the first step",
    "first_step_cpu_s": "processor seconds to the end of the first step",
    "peak_pss_mb": "peak memory, PSS, MB",
}


@dataclass(frozen=True)
class Measured:
    """Figures of one run.

    Attributes:
        size: of the model.
        variant: `all`, `none`, or the name of the optimization that was off.
        repeat: number of the repeat, from 0.
        step_s: median seconds of a step after the warm-up.
        step_cpu_s: median processor seconds of such a step, of all processes.
        first_step_s: seconds from the start of the program to the end of its first step.
        first_step_cpu_s: processor seconds until then.
        peak_pss_mb: largest memory of all processes, shared pages divided among them.
        load: load average of the machine before the run.
    """

    size: str
    variant: str
    repeat: int
    step_s: float
    step_cpu_s: float
    first_step_s: float
    first_step_cpu_s: float
    peak_pss_mb: float
    load: float


def override_of(variant: str) -> str:
    """Return the override that makes a run the variant.

    Example:
        >>> override_of("none")
        'cluster.optimizations=none'
    """
    if variant == ALL:
        return "cluster.optimizations=auto"
    if variant == NONE:
        return "cluster.optimizations=none"
    return f"cluster.optimizations=[{','.join(name for name in OPTIMIZATIONS if name != variant)}]"


def in_turns(variants: Sequence[str], repeat: int) -> list[str]:
    """Return the order of a repeat: rotated, and every second one backwards."""
    first = repeat % len(variants)
    order = [*variants[first:], *variants[:first]]
    return order[::-1] if repeat % 2 else order


def read_steps(lines: Iterator[str]) -> Iterator[Step]:
    """Yield a step for each line of metrics.jsonl that ends one."""
    for line in lines:
        if json.loads(line)["prefix"] == "timing/train":
            yield Step()


def measure(size: str, variant: str, repeat: int, arguments: argparse.Namespace) -> Measured:
    """Run one variant to its end."""
    folder = BENCH / "runs" / f"optimizations-{size}-{variant}-{repeat}-{int(time.time())}"
    folder.mkdir(parents=True)
    if arguments.fresh_cache:
        os.environ["VLLM_CACHE_ROOT"] = str(folder / "vllm")
    load = os.getloadavg()[0]
    logger.info("%s, variant %s, repeat %d: load average before the start %.1f", size, variant, repeat, load)
    command, metrics = own_command(arguments.workload, size, folder, arguments)
    command += [override_of(variant), *arguments.overrides]
    run: Run[Step] = run_side(command, metrics, read_steps, folder / "run.log", arguments.threads)
    return Measured(
        size,
        variant,
        repeat,
        statistics.median(run.step_seconds),
        statistics.median(run.step_cpu_seconds),
        run.steps[0].seen_at_s,
        run.steps[0].cpu_s,
        run.peak_pss_mb,
        load,
    )


def read_results(path: Path) -> list[Measured]:
    """Return the runs that are stored; none if there is no such file."""
    if not path.exists():
        return []
    return [Measured(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def table(results: Sequence[Measured], size: str, variants: Sequence[str]) -> str:
    """Return a Markdown table of one size: median of each figure, and its excess over the run with all of them."""
    lines = [f"| off | {' | '.join(FIGURES.values())} |", f"|---|{'---:|' * len(FIGURES)}"]
    baseline = medians(results, size, ALL)
    for variant in variants:
        values = medians(results, size, variant)
        label = {ALL: "nothing", NONE: "all of them"}.get(variant, f"`{variant}`")
        cells = [
            show(value) if variant == ALL else f"{show(value)} ({value / baseline[name] - 1:+.1%})"
            for name, value in values.items()
        ]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def medians(results: Sequence[Measured], size: str, variant: str) -> dict[str, float]:
    """Return the median of each figure over the repeats of one variant."""
    runs = [asdict(each) for each in results if (each.size, each.variant) == (size, variant)]
    return {name: statistics.median(run[name] for run in runs) for name in FIGURES}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    names = [name for name in OPTIMIZATIONS if name not in WITHOUT_EFFECT]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--names", nargs="+", default=names, choices=list(OPTIMIZATIONS), help="those to switch off")
    parser.add_argument("--workload", default="uniform", choices=list(WORKLOADS), help="as for grpo_vs_trl.py")
    parser.add_argument("--sizes", nargs="+", default=["1m"], choices=list(SIZES), help="as for grpo_vs_trl.py")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each variant")
    parser.add_argument("--steps", type=int, default=40, help="of each run; the first 5 are a warm-up")
    parser.add_argument("--threads", type=int, default=2, help="processors and OpenMP threads")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument(
        "--results", type=Path, default=BENCH / "optimizations.jsonl", help="file that runs are kept in"
    )
    parser.add_argument(
        "--fresh-cache", action="store_true", help="give each run an empty cache of vLLM, as on a new machine"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further overrides of the run")
    return parser.parse_args(arguments)


def main() -> None:
    """Run what is missing in the results, and print the tables."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    arguments = parse_arguments()
    BENCH.mkdir(exist_ok=True)
    (BENCH / ".gitignore").write_text("*\n")
    variants = [ALL, *arguments.names, NONE]
    results = read_results(arguments.results)
    done = {(each.size, each.variant, each.repeat) for each in results}
    for repeat in range(arguments.repeats):
        for size in arguments.sizes:
            for variant in in_turns(variants, repeat):
                if (size, variant, repeat) not in done:
                    results.append(measure(size, variant, repeat, arguments))
                    with arguments.results.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(results[-1])) + "\n")
    for size in arguments.sizes:
        print(f"### {arguments.workload}-{size}, medians of {arguments.repeats}\n\n{table(results, size, variants)}\n")


if __name__ == "__main__":
    main()
