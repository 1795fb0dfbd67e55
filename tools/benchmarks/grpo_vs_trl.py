"""Measure GRPO here and in TRL, one after the other, on the same model, prompts and sampling.

    uv run python tools/benchmarks/grpo_vs_trl.py [--workloads uniform skewed] [--sizes 1m 3m 25m] [--repeats 3]
        [--overlap none ahead]
    uv run python tools/benchmarks/grpo_vs_trl.py --workloads instructions --sizes 135m [--published-model FOLDER]

It makes TRL's environment under `.bench/` (kept for later runs), runs both sides as child processes on the same
processors, and prints Markdown tables. `side_by_side` measures. Invariant: both sides get the same inputs; README.md
lists the remaining differences.
"""

import argparse
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from side_by_side import BENCH, Run, Step, prepare, ratio, run_side, show, trl_python
from workloads import ALL_SIZES, PUBLISHED, PUBLISHED_FOLDER, WORKLOADS, find_model, prompts_of

logger = logging.getLogger("grpo_vs_trl")

OVERLAPS = {
    "none": [],
    "ahead": [
        "grpo.overlap.mode=ahead",
        "grpo.overlap.order=ready_first",
        "grpo.overlap.in_flight_weight_updates=true",
        "grpo.overlap.max_age_steps=2",
        "policy.generation.weight_sync.recompute_kv_cache=false",
        "cluster.threads_per_rank=null",
    ],
}
"""Overrides of a run, by the value of `--overlap`."""
SAMPLES_PER_STEP = 64
STEPS, STEPS_OF_PUBLISHED = 60, 4
GOAL_REWARD = 0.9


@dataclass
class GRPOStep(Step):
    """Report of one side about one step.

    Attributes:
        reward: mean reward of the step's samples.
        gen_tokens: tokens generated in the step.
        longest: tokens of the step's longest answer.
        all_tokens: prompt and response tokens of the step.
        generation_s: seconds the side spent in its generation phase.
    """

    reward: float
    gen_tokens: float
    longest: float
    all_tokens: float
    generation_s: float


type GRPORun = Run[GRPOStep]


def read_own(lines: Iterator[str]) -> Iterator[GRPOStep]:
    """Read steps from this library's metrics.jsonl: a step ends with its `timing/train` line."""
    reward, gen_tokens, longest, all_tokens = 0.0, 0.0, 0.0, 0.0
    for line in lines:
        row = json.loads(line)
        values = row["metrics"]
        if row["prefix"] == "train":
            reward = values["reward"]
            gen_tokens = values["mean_gen_tokens_per_sample"] * SAMPLES_PER_STEP
            longest = values["max_gen_tokens_per_sample"]
            all_tokens = values["total_num_tokens"]
        elif row["prefix"] == "timing/train":
            yield GRPOStep(reward, gen_tokens, longest, all_tokens, values["generation"])


def read_trl(lines: Iterator[str]) -> Iterator[GRPOStep]:
    """Read steps from the file that `trl_grpo.py` writes."""
    tokens_before = 0.0
    for line in lines:
        row = json.loads(line)
        all_tokens = row["num_tokens_so_far"] - tokens_before
        tokens_before = row["num_tokens_so_far"]
        gen_tokens = row["mean_gen_tokens"] * SAMPLES_PER_STEP
        yield GRPOStep(row["reward"], gen_tokens, row["max_gen_tokens"], all_tokens, row["generation_s"])


def own_command(workload: str, size: str, folder: Path, arguments: argparse.Namespace) -> tuple[list[str], Path]:
    """Return the command of this library's run and its metrics file.

    Validation, checkpoints and trackers are off, as on TRL's side.
    """
    overrides = own_overrides("grpo", workload, size, folder, arguments) | {
        "policy.max_grad_norm": 1.0,
        "grpo.num_prompts_per_step": 8,
        "grpo.num_generations_per_prompt": 8,
        "grpo.use_leave_one_out_baseline": "false",
        "policy.train_micro_batch_size": WORKLOADS[workload].microbatch_rows,
    }
    command = [sys.executable, "examples/run_grpo.py", "--config", "examples/configs/grpo_math_cpu.yaml"]
    command += [f"{key}={value}" for key, value in overrides.items()]
    return command, folder / "logs" / "exp_001" / "metrics.jsonl"


def own_overrides(
    section: str, workload: str, size: str, folder: Path, arguments: argparse.Namespace
) -> dict[str, object]:
    """Return the overrides that this library's run needs whatever its algorithm is; `section` is the algorithm's."""
    chosen = WORKLOADS[workload]
    overrides: dict[str, object] = {
        "policy.model_name": find_model(workload, size, published_of(arguments)),
        "policy.precision": precision_of(arguments),
        "policy.generation.max_new_tokens": chosen.max_new_tokens,
        "policy.max_total_sequence_length": chosen.max_total_tokens,
        "policy.optimizer.kwargs.lr": chosen.learning_rate,
        "policy.optimizer.kwargs.weight_decay": 0.0,
        f"{section}.max_num_steps": arguments.steps,
        f"{section}.seed": arguments.seed,
        f"{section}.val_period": 0,
        f"{section}.val_at_start": "false",
        "data.train.dataset_name": "ResponseDataset",
        "data.train.data_path": write_prompts(workload),
        "data.train.input_key": "problem",
        "data.train.output_key": "answer",
        "data.train.num_samples": "null",
        "checkpointing.enabled": "false",
        "logger.log_dir": folder / "logs",
        "logger.tensorboard_enabled": "false",
        "logger.save_trajectories": "false",
        "cluster.threads_per_rank": arguments.threads,
    }
    if chosen.reward == "pattern":
        overrides["data.default.env_name"] = "form"
        overrides["++env.form.function"] = "tools.benchmarks.follows_pattern.follows"
    return overrides


def published_of(arguments: argparse.Namespace) -> Path:
    """Return the folder of the published model, also for a tool that has no such option."""
    return getattr(arguments, "published_model", PUBLISHED_FOLDER)


def precision_of(arguments: argparse.Namespace) -> str:
    """Return the precision of both sides, also for a tool that has no such option."""
    return getattr(arguments, "precision", "float32")


def run_own(overlap: str, workload: str, size: str, folder: Path, arguments: argparse.Namespace) -> GRPORun:
    """Run this library with a value of `OVERLAPS`."""
    command, metrics = own_command(workload, size, folder, arguments)
    command += OVERLAPS[overlap]
    warm_up = WORKLOADS[workload].warm_up_steps
    return run_side(command, metrics, read_own, folder / "own.log", arguments.threads, warm_up)


def run_trl(workload: str, size: str, folder: Path, arguments: argparse.Namespace) -> GRPORun:
    """Run TRL with the settings of `trl_grpo.py`."""
    metrics, chosen = folder / "trl.jsonl", WORKLOADS[workload]
    model = find_model(workload, size, published_of(arguments))
    command = [str(trl_python()), "tools/benchmarks/trl_grpo.py", "--model", str(model)]
    command += ["--prompts", str(write_prompts(workload)), "--metrics", str(metrics), "--reward", chosen.reward]
    command += ["--max-new-tokens", str(chosen.max_new_tokens), "--generation", arguments.trl_generation]
    command += ["--microbatch", str(chosen.microbatch_rows), "--learning-rate", str(chosen.learning_rate)]
    command += ["--steps", str(arguments.steps), "--threads", str(arguments.threads), "--seed", str(arguments.seed)]
    command += ["--precision", precision_of(arguments)]
    return run_side(command, metrics, read_trl, folder / "trl.log", arguments.threads, chosen.warm_up_steps)


def write_prompts(workload: str) -> Path:
    """Write the workload's rows as JSONL and return the path."""
    path = BENCH / f"{workload}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in prompts_of(workload)), encoding="utf-8")
    return path


FIGURES: dict[str, Callable[[GRPORun], float | None]] = {
    "seconds per step, median": lambda run: statistics.median(run.step_seconds),
    "seconds per step, mean": lambda run: statistics.mean(run.step_seconds),
    "processor seconds per step, mean": lambda run: statistics.mean(run.step_cpu_seconds),
    "generated tokens/s while generating": lambda run: tokens_per_second(run, generated=True),
    "trained tokens/s in the rest of the step": lambda run: tokens_per_second(run, generated=False),
    "peak memory, sum of RSS, MB": lambda run: run.peak_rss_mb,
    "peak memory, sum of PSS, MB": lambda run: run.peak_pss_mb,
    "seconds to the end of the first step": lambda run: run.steps[0].seen_at_s,
    f"seconds to a mean reward of {GOAL_REWARD}": lambda run: seconds_to_reward(run, GOAL_REWARD),
    "seconds to the end of the last step": lambda run: run.steps[-1].seen_at_s,
    "mean reward, first 5 steps": lambda run: mean_reward(run.steps[:5]),
    "mean reward, last 10 steps": lambda run: mean_reward(run.steps[-10:]),
    "tokens of a response, mean": lambda run: mean_length(run),
    "tokens of a step's longest response, median": lambda run: statistics.median(step.longest for step in run.measured),
    "tokens of the longest response": lambda run: max(step.longest for step in run.measured),
}


def table(name: str, own: list[GRPORun], trl: list[GRPORun]) -> str:
    """Format medians over the runs of each side, and their ranges, as Markdown; ratios are nemo_rl / TRL."""
    lines = [f"### {name}: {len(own)} and {len(trl)} runs of {len(own[0].steps)} steps", ""]
    lines += ["| | nemo_rl | TRL | ratio |", "|---|---:|---:|---:|"]
    for label, figure in FIGURES.items():
        ours, theirs = (median_and_range([figure(run) for run in runs]) for runs in (own, trl))
        lines.append(f"| {label} | {ours[1]} | {theirs[1]} | {ratio(ours[0], theirs[0])} |")
    return "\n".join(lines)


def median_and_range(values: list[float | None]) -> tuple[float | None, str]:
    """Return the median of the existing values and its text, with the smallest and largest value if they differ."""
    found = [value for value in values if value is not None]
    if not found:
        return None, show(None)
    median, least, most = statistics.median(found), show(min(found)), show(max(found))
    missing = f", {show(None)} {len(values) - len(found)} times" if len(found) < len(values) else ""
    return median, show(median) + (f" ({least} to {most})" if least != most else "") + missing


def tokens_per_second(run: GRPORun, *, generated: bool) -> float:
    """Return the median over steps of tokens divided by the seconds of the phase that handled them."""
    rates = []
    for step, seconds in zip(run.measured, run.step_seconds, strict=True):
        rest = max(seconds - step.generation_s, 1e-6)
        rates.append(step.gen_tokens / step.generation_s if generated else step.all_tokens / rest)
    return statistics.median(rates)


def seconds_to_reward(run: GRPORun, goal: float) -> float | None:
    """Return the seconds from process start to the first step whose mean reward reaches `goal`."""
    return next((step.seen_at_s for step in run.steps if step.reward >= goal), None)


def mean_reward(steps: list[GRPOStep]) -> float:
    """Return the mean reward over some steps."""
    return statistics.mean(step.reward for step in steps)


def mean_length(run: GRPORun) -> float:
    """Return the mean response length over the measured steps, in tokens."""
    return statistics.mean(step.gen_tokens for step in run.measured) / SAMPLES_PER_STEP


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workloads", nargs="+", default=["uniform"], choices=list(WORKLOADS))
    parser.add_argument("--sizes", nargs="+", default=["1m"], choices=ALL_SIZES, help="parameters of the model")
    parser.add_argument(
        "--published-model", type=Path, default=PUBLISHED_FOLDER, help=f"folder of the model of the size {PUBLISHED}"
    )
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32", help="of both sides")
    parser.add_argument(
        "--overlap",
        nargs="+",
        default=["none"],
        choices=list(OVERLAPS),
        help="grpo.overlap.mode of this library's runs",
    )
    parser.add_argument(
        "--steps", type=int, help=f"GRPO steps of each run (default: {STEPS}, {PUBLISHED} {STEPS_OF_PUBLISHED})"
    )
    parser.add_argument("--repeats", type=int, default=1, help="runs of each side, alternating")
    parser.add_argument("--threads", type=int, default=2, help="processors and OpenMP threads of each side")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument(
        "--trl-generation", choices=("generate", "continuous"), default="generate", help="TRL's generation method"
    )
    arguments = parser.parse_args()
    if arguments.steps is None:
        arguments.steps = STEPS_OF_PUBLISHED if PUBLISHED in arguments.sizes else STEPS
    return arguments


def main() -> None:
    """Run both sides alternately for each workload and size, and print the tables."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    arguments = parse_arguments()
    warm_up = max(WORKLOADS[workload].warm_up_steps for workload in arguments.workloads)
    if arguments.steps <= warm_up:
        raise SystemExit(f"--steps: {arguments.steps} leaves nothing after {warm_up} steps of warm-up.")
    for workload in arguments.workloads:
        for size in arguments.sizes:
            find_model(workload, size, arguments.published_model)  # refuses what is missing before anything starts
    prepare()
    sides: dict[str, Callable[..., GRPORun]] = {
        f"nemo_rl, {name}": partial(run_own, name) for name in arguments.overlap
    }
    sides["TRL"] = run_trl
    for workload in arguments.workloads:
        for size in arguments.sizes:
            runs: dict[str, list[GRPORun]] = {side: [] for side in sides}
            for number in range(arguments.repeats):
                for side in list(sides)[:: -1 if number % 2 else 1]:
                    folder = BENCH / "runs" / f"{workload}-{size}-{side.replace(', ', '-')}-{int(time.time())}"
                    folder.mkdir(parents=True)
                    logger.info("%s, load average %.1f %.1f %.1f ...", folder.name, *os.getloadavg())
                    runs[side].append(sides[side](workload, size, folder, arguments))
                    seconds = statistics.mean(runs[side][-1].step_seconds)
                    logger.info("%s: %s s a step", folder.name, show(seconds))
            for side in list(sides)[:-1]:
                print(table(f"{workload}, {size}, {side}", runs[side], runs["TRL"]) + "\n", flush=True)


if __name__ == "__main__":
    main()
