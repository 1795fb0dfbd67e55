"""Measure PPO with a critic here and in TRL, one after the other, on the same model, prompts and sampling.

    uv run python tools/benchmarks/ppo_vs_trl.py [--workload uniform] [--size 1m] [--steps 20] [--repeats 2]

It makes the environment of the last TRL that has a PPOTrainer under `.bench/` (kept for later runs), runs both sides as
child processes on the same processors, and prints a Markdown table. `side_by_side` measures. Invariant: both sides get
the same inputs; README.md lists the remaining differences.
"""

import argparse
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from grpo_vs_trl import SAMPLES_PER_STEP, GRPORun, own_overrides, read_own, read_trl, table, write_prompts
from side_by_side import BENCH, WARM_UP_STEPS, prepare, run_side, show, trl_python
from workloads import SIZES, WORKLOADS, find_model

logger = logging.getLogger("ppo_vs_trl")

TRL = "trl==1.12.0"
"""Releases from 1.13 on have no PPOTrainer."""


def run_own(folder: Path, arguments: argparse.Namespace) -> GRPORun:
    """Run this library; validation, checkpoints and trackers are off, as on TRL's side."""
    size = SAMPLES_PER_STEP // arguments.mini_batches
    overrides = own_overrides("ppo", arguments.workload, arguments.size, folder, arguments) | {
        "policy.max_grad_norm": "null",
        "policy.train_global_batch_size": size,
        "policy.train_micro_batch_size": size,
        "ppo.num_prompts_per_step": SAMPLES_PER_STEP,
        "ppo.num_generations_per_prompt": 1,
        "ppo.ppo_epochs": arguments.epochs,
        "ppo.reward_scaling.enabled": "false",
        "value.train_global_batch_size": size,
        "value.train_micro_batch_size": size,
        "value.max_grad_norm": "null",
        "value.optimizer.kwargs.lr": 3e-4,
        "value.optimizer.kwargs.weight_decay": 0.0,
    }
    command = [sys.executable, "examples/run_ppo.py", "--config", "examples/configs/ppo_math_cpu.yaml"]
    command += [f"{key}={value}" for key, value in overrides.items()]
    metrics = folder / "logs" / "exp_001" / "metrics.jsonl"
    return run_side(command, metrics, read_own, folder / "own.log", arguments.threads)


def run_trl(folder: Path, arguments: argparse.Namespace) -> GRPORun:
    """Run TRL with the settings of `trl_ppo.py`."""
    metrics = folder / "trl.jsonl"
    options = {
        "model": find_model(arguments.workload, arguments.size),
        "prompts": write_prompts(arguments.workload),
        "metrics": metrics,
        "max-new-tokens": WORKLOADS[arguments.workload].max_new_tokens,
        "samples": SAMPLES_PER_STEP,
        **{name.replace("_", "-"): getattr(arguments, name) for name in ("steps", "epochs", "mini_batches")},
        **{name: getattr(arguments, name) for name in ("threads", "seed")},
    }
    command = [str(trl_python(TRL)), "tools/benchmarks/trl_ppo.py"]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return run_side(command, metrics, read_trl, folder / "trl.log", arguments.threads)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workload", default="uniform", choices=list(WORKLOADS))
    parser.add_argument("--size", default="1m", choices=list(SIZES), help="parameters of policy and critic each")
    parser.add_argument("--steps", type=int, default=20, help="PPO steps of each run")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each side, alternating")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the samples of a step")
    parser.add_argument("--mini-batches", type=int, default=2, help="updates of a pass")
    parser.add_argument("--threads", type=int, default=2, help="processors and OpenMP threads of each side")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def main() -> None:
    """Run both sides in turns, and print the table and the rewards of the steps."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    arguments = parse_arguments()
    if arguments.steps <= WARM_UP_STEPS:
        raise SystemExit(f"--steps: {arguments.steps} leaves nothing after {WARM_UP_STEPS} steps of warm-up.")
    prepare(TRL)
    sides: dict[str, Callable[[Path, argparse.Namespace], GRPORun]] = {"nemo_rl": run_own, "TRL": run_trl}
    runs: dict[str, list[GRPORun]] = {side: [] for side in sides}
    for number in range(arguments.repeats):
        for side in list(sides)[:: -1 if number % 2 else 1]:
            folder = BENCH / "runs" / f"ppo-{arguments.workload}-{arguments.size}-{side}-{int(time.time())}"
            folder.mkdir(parents=True)
            logger.info("%s, load average %.1f %.1f %.1f ...", folder.name, *os.getloadavg())
            runs[side].append(sides[side](folder, arguments))
            logger.info("%s: %s s a step", folder.name, show(statistics.median(runs[side][-1].step_seconds)))
    print(table(f"PPO, {arguments.workload}, {arguments.size}", runs["nemo_rl"], runs["TRL"]))
    for side, of_side in runs.items():
        for run in of_side:
            print(f"\n{side}, reward of each step: {' '.join(f'{step.reward:.2f}' for step in run.steps)}")


if __name__ == "__main__":
    main()
