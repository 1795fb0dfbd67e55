"""Measure GRPO here and in TRL, one after the other, on the same model, prompts and sampling.

    uv run python tools/benchmarks/grpo_vs_trl.py [--models tiny-chat warm-3m] [--steps 150]

Makes TRL's environment by itself under `.bench/` (kept for the next time), runs both sides as child processes on the
same processors, and prints Markdown tables. `side_by_side` measures. Invariant: what the two sides are given is the
same; what is not is listed in README.md.
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
from pathlib import Path

from side_by_side import BENCH, ROOT, Run, Step, prepare, ratio, run_side, show, trl_python

logger = logging.getLogger("grpo_vs_trl")

NUM_PROMPTS = 20_000
PROMPT_SEED = 1
SAMPLES_PER_STEP = 64
GOAL_REWARD = 0.9
WARM_3M = "warm-3m"


@dataclass
class GRPOStep(Step):
    """What one side said about one step.

    Attributes:
        reward: mean reward of the step's samples.
        gen_tokens: tokens generated in the step.
        all_tokens: prompt and response tokens of the step.
        generation_s: seconds the side spent in its generation phase.
    """

    reward: float
    gen_tokens: float
    all_tokens: float
    generation_s: float


type GRPORun = Run[GRPOStep]


def read_own(lines: Iterator[str]) -> Iterator[GRPOStep]:
    """Steps from this library's metrics.jsonl: a step is over with its `timing/train` line."""
    reward, gen_tokens, all_tokens = 0.0, 0.0, 0.0
    for line in lines:
        row = json.loads(line)
        values = row["metrics"]
        if row["prefix"] == "train":
            reward = values["reward"]
            gen_tokens = values["mean_gen_tokens_per_sample"] * SAMPLES_PER_STEP
            all_tokens = values["total_num_tokens"]
        elif row["prefix"] == "timing/train":
            yield GRPOStep(reward, gen_tokens, all_tokens, values["generation"])


def read_trl(lines: Iterator[str]) -> Iterator[GRPOStep]:
    """Steps from the file that `trl_grpo.py` writes."""
    tokens_before = 0.0
    for line in lines:
        row = json.loads(line)
        all_tokens = row["num_tokens_so_far"] - tokens_before
        tokens_before = row["num_tokens_so_far"]
        yield GRPOStep(row["reward"], row["mean_gen_tokens"] * SAMPLES_PER_STEP, all_tokens, row["generation_s"])


def own_command(model: Path, folder: Path, arguments: argparse.Namespace) -> tuple[list[str], Path]:
    """The command of this library's run, without what the other side does not do either, and its metrics file.

    Left out are validation, checkpoints and trackers.
    """
    overrides = {
        "policy.model_name": model,
        "policy.generation.max_new_tokens": 64,
        "policy.optimizer.kwargs.lr": 1e-4,
        "policy.optimizer.kwargs.weight_decay": 0.0,
        "policy.max_grad_norm": 1.0,
        "grpo.num_prompts_per_step": 8,
        "grpo.num_generations_per_prompt": 8,
        "grpo.use_leave_one_out_baseline": "false",
        "grpo.max_num_steps": arguments.steps,
        "grpo.seed": arguments.seed,
        "grpo.val_period": 0,
        "grpo.val_at_start": "false",
        "data.train.num_samples": NUM_PROMPTS,
        "data.train.seed": PROMPT_SEED,
        "checkpointing.enabled": "false",
        "logger.log_dir": folder / "logs",
        "logger.tensorboard_enabled": "false",
        "logger.save_trajectories": "false",
        "cluster.threads_per_rank": arguments.threads,
    }
    command = [sys.executable, "examples/run_grpo.py", "--config", "examples/configs/grpo_math_cpu.yaml"]
    command += [f"{key}={value}" for key, value in overrides.items()]
    return command, folder / "logs" / "exp_001" / "metrics.jsonl"


def run_own(model: Path, folder: Path, arguments: argparse.Namespace) -> GRPORun:
    """This library."""
    command, metrics = own_command(model, folder, arguments)
    return run_side(command, metrics, read_own, folder / "own.log", arguments.threads)


def run_trl(model: Path, folder: Path, arguments: argparse.Namespace) -> GRPORun:
    """TRL with the settings of `trl_grpo.py`."""
    metrics = folder / "trl.jsonl"
    command = [str(trl_python()), "tools/benchmarks/trl_grpo.py", "--model", str(model)]
    command += ["--prompts", str(write_prompts()), "--metrics", str(metrics), "--generation", arguments.trl_generation]
    command += ["--steps", str(arguments.steps), "--threads", str(arguments.threads), "--seed", str(arguments.seed)]
    return run_side(command, metrics, read_trl, folder / "trl.log", arguments.threads)


def write_prompts() -> Path:
    """The arithmetic data set's training rows as JSONL, for the side that cannot import it."""
    from nemo_rl.data.datasets.arithmetic import ArithmeticDataset

    rows = ArithmeticDataset(num_samples=NUM_PROMPTS, seed=PROMPT_SEED).dataset
    path = BENCH / "prompts.jsonl"
    wanted = ({"problem": rows[i]["problem"], "answer": rows[i]["answer"]} for i in range(len(rows)))
    path.write_text("".join(json.dumps(row) + "\n" for row in wanted), encoding="utf-8")
    return path


def find_model(name: str) -> Path:
    """The folder of a model; the warm one of 3 million parameters is trained on first use.

    Raises:
        SystemExit: no such model.
    """
    if name == "tiny-chat":
        return ROOT / "examples" / "assets" / "tiny-chat"
    if name != WARM_3M:
        raise SystemExit(f"--models: {name!r} is neither tiny-chat nor {WARM_3M}.")
    folder = BENCH / WARM_3M
    if not (folder / "model.safetensors").exists():
        logger.info("Warming a model of 3 million parameters ...")
        make_warm_model(folder)
    return folder


def make_warm_model(folder: Path) -> None:
    """Train a wider model with the recipe of tiny-chat."""
    sys.path.insert(0, str(ROOT / "tools"))
    from make_tiny_chat_model import Recipe, train
    from tiny_models import TinyShape, make_char_tokenizer, make_tiny_model, save_tiny_checkpoint

    shape = TinyShape(hidden_size=256, intermediate_size=768, num_heads=8, num_kv_heads=4)
    tokenizer, model = make_char_tokenizer(), make_tiny_model("qwen2", shape)
    train(model, tokenizer, Recipe(clean_steps=200, mixed_steps=100))
    save_tiny_checkpoint(folder, model.bfloat16(), tokenizer)


FIGURES: dict[str, Callable[[GRPORun], float | None]] = {
    "seconds per step, median": lambda run: statistics.median(run.step_seconds),
    "processor seconds per step, median": lambda run: statistics.median(run.step_cpu_seconds),
    "generated tokens/s while generating": lambda run: tokens_per_second(run, generated=True),
    "trained tokens/s in the rest of the step": lambda run: tokens_per_second(run, generated=False),
    "peak memory, sum of RSS, MB": lambda run: run.peak_rss_mb,
    "peak memory, sum of PSS, MB": lambda run: run.peak_pss_mb,
    "seconds to the end of the first step": lambda run: run.steps[0].seen_at_s,
    f"seconds to a mean reward of {GOAL_REWARD}": lambda run: seconds_to_reward(run, GOAL_REWARD),
    "seconds to the end of the last step": lambda run: run.steps[-1].seen_at_s,
    "mean reward, first 5 steps": lambda run: mean_reward(run.steps[:5]),
    "mean reward, last 10 steps": lambda run: mean_reward(run.steps[-10:]),
    "mean tokens of a response": lambda run: mean_length(run),
}


def table(name: str, own: GRPORun, trl: GRPORun) -> str:
    """The comparison as Markdown; ratios are ours over TRL's."""
    lines = [f"### {name}, {len(own.steps)} and {len(trl.steps)} steps", ""]
    lines += ["| | nemo_rl | TRL | ratio |", "|---|---:|---:|---:|"]
    for label, figure in FIGURES.items():
        ours, theirs = figure(own), figure(trl)
        lines.append(f"| {label} | {show(ours)} | {show(theirs)} | {ratio(ours, theirs)} |")
    return "\n".join(lines)


def tokens_per_second(run: GRPORun, *, generated: bool) -> float:
    """Median over steps of tokens by the seconds of the phase that handled them."""
    rates = []
    for step, seconds in zip(run.measured, run.step_seconds, strict=True):
        rest = max(seconds - step.generation_s, 1e-6)
        rates.append(step.gen_tokens / step.generation_s if generated else step.all_tokens / rest)
    return statistics.median(rates)


def seconds_to_reward(run: GRPORun, goal: float) -> float | None:
    """Seconds from process start to the first step whose mean reward reaches `goal`."""
    return next((step.seen_at_s for step in run.steps if step.reward >= goal), None)


def mean_reward(steps: list[GRPOStep]) -> float:
    """Mean over some steps."""
    return statistics.mean(step.reward for step in steps)


def mean_length(run: GRPORun) -> float:
    """Mean response length over the measured steps, in tokens."""
    return statistics.mean(step.gen_tokens for step in run.measured) / SAMPLES_PER_STEP


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["tiny-chat"], help=f"tiny-chat, {WARM_3M}")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--threads", type=int, default=2, help="processors and OpenMP threads of each side")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument(
        "--trl-generation", choices=("generate", "continuous"), default="generate", help="how TRL generates"
    )
    return parser.parse_args()


def main() -> None:
    """Run both sides for each model and print the tables."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    arguments = parse_arguments()
    prepare()
    for name in arguments.models:
        model = find_model(name)
        folder = BENCH / "runs" / f"{name}-{int(time.time())}"
        folder.mkdir(parents=True)
        logger.info("%s: load average before the start %.1f %.1f %.1f", name, *os.getloadavg())
        logger.info("%s: nemo_rl, %d steps ...", name, arguments.steps)
        own = run_own(model, folder, arguments)
        logger.info("%s: TRL, %d steps ...", name, arguments.steps)
        trl = run_trl(model, folder, arguments)
        print(table(name, own, trl) + "\n")


if __name__ == "__main__":
    main()
