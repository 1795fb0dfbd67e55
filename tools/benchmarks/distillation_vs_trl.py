"""Measure distillation here and in TRL, one after the other, on the same models, prompts and sampling.

    uv run python tools/benchmarks/distillation_vs_trl.py [--cases same_tokens other_tokens own_solutions]
        [--steps 40] [--repeats 3]

`same_tokens`: a teacher with the same tokenizer, whole vocabulary; TRL's side is GOLDTrainer. `other_tokens`: a
teacher with a token for each two digits, and GOLD's loss. `own_solutions`: the policy of the start of the run is the
teacher and sees a right answer of the same group; TRL's side is SDPOTrainer. `side_by_side` measures. Both sides get
the same inputs; README.md lists the remaining differences.
"""

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from grpo_vs_trl import GRPORun, mean_reward, own_overrides, read_own, read_trl, table, write_prompts
from side_by_side import BENCH, ROOT, WARM_UP_STEPS, prepare, run_side, show, trl_python
from workloads import SHOWN, WORKLOADS, find_model, make_pairs_teacher

logger = logging.getLogger("distillation_vs_trl")

VOCABULARY = 264
"""Tokens of the tiny chat model; as many most likely ones are the whole distribution."""
SELF = "on_policy_distillation.self_distillation"


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        workload: prompts and student.
        section: section of this library's algorithm.
        learning_rate: of AdamW.
        overrides: this library's further overrides.
        teacher: makes or finds the teacher; None if the policy is its own.
    """

    workload: str
    section: str
    learning_rate: float
    overrides: dict[str, object]
    teacher: Callable[[], Path] | None = None


OF_LOGITS: dict[str, object] = {
    "distillation.num_prompts_per_step": 64,
    "distillation.num_generations_per_prompt": 1,
    "distillation.topk_logits_k": VOCABULARY,
    "loss_fn.kl_type": "forward",
    "policy.scheduler": "null",
}
CASES = {
    "same_tokens": Case(
        "uniform", "distillation", 5e-4, OF_LOGITS, lambda: ROOT / "examples" / "assets" / "tiny-teacher"
    ),
    "other_tokens": Case(
        "uniform", "distillation", 1e-4, OF_LOGITS | {"loss_fn.gold_loss": "true"}, make_pairs_teacher
    ),
    "own_solutions": Case(
        "shown",
        "grpo",
        1e-4,
        {
            "grpo.num_prompts_per_step": 8,
            "grpo.num_generations_per_prompt": 8,
            "~on_policy_distillation.teacher_model_by_agent_name": None,
            f"{SELF}.enabled": "true",
            f"{SELF}.context": f"'{SHOWN}'",
            f"{SELF}.weights": "initial",
        },
    ),
}


def run_own(case: Case, folder: Path, arguments: argparse.Namespace) -> GRPORun:
    """Run this library; validation, checkpoints and trackers are off, as on TRL's side."""
    overrides = own_overrides(case.section, case.workload, "1m", folder, arguments)
    overrides |= {"policy.max_grad_norm": 1.0, "policy.optimizer.kwargs.lr": case.learning_rate} | case.overrides
    if case.teacher:
        overrides["teacher.model_name"] = case.teacher()
    script, config = {
        "distillation": ("run_distillation.py", "distillation_math_cpu.yaml"),
        "grpo": ("run_grpo.py", "grpo_opd_cpu.yaml"),
    }[case.section]
    command = [sys.executable, f"examples/{script}", "--config", f"examples/configs/{config}"]
    command += [key if value is None else f"{key}={value}" for key, value in overrides.items()]
    metrics = folder / "logs" / "exp_001" / "metrics.jsonl"
    return run_side(command, metrics, read_own, folder / "own.log", arguments.threads)


def run_trl(name: str, case: Case, folder: Path, arguments: argparse.Namespace) -> GRPORun:
    """Run TRL with the settings of `trl_distillation.py`."""
    metrics, workload = folder / "trl.jsonl", WORKLOADS[case.workload]
    options = {
        "case": name,
        "model": find_model(case.workload, "1m"),
        "prompts": write_prompts(case.workload),
        "metrics": metrics,
        "max-new-tokens": workload.max_new_tokens,
        "max-total-tokens": workload.max_total_tokens,
        "learning-rate": case.learning_rate,
        "solution-template": SHOWN,
        **({"teacher": case.teacher()} if case.teacher else {}),
        **{key: getattr(arguments, key) for key in ("steps", "threads", "seed")},
    }
    command = [str(trl_python()), "tools/benchmarks/trl_distillation.py"]
    command += [text for key, value in options.items() for text in (f"--{key}", str(value))]
    return run_side(command, metrics, read_trl, folder / "trl.log", arguments.threads)


def reward_rows(own: list[GRPORun], trl: list[GRPORun]) -> str:
    """Format the mean reward over the steps that end within each time, as further rows of the table."""
    lines = []
    for limit_s in (20, 30, 45, 60, 90):
        found = [rewards_until(runs, limit_s) for runs in (own, trl)]
        lines.append(f"| reward of the last 5 steps after {limit_s} s | {found[0]} | {found[1]} | |")
    return "\n".join(lines)


def rewards_until(runs: list[GRPORun], limit_s: float) -> str:
    """Return the mean over the runs of the reward of the last 5 steps that ended within some seconds."""
    ended = [[step for step in run.steps if step.seen_at_s <= limit_s][-WARM_UP_STEPS:] for run in runs]
    if not all(ended):
        return ""
    return f"{sum(map(mean_reward, ended)) / len(ended):.2f}"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--steps", type=int, default=40, help="steps of each run")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each side, in turns")
    parser.add_argument("--threads", type=int, default=2, help="processors and OpenMP threads of each side")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def main() -> None:
    """Run both sides in turns for each case, and print the tables."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    arguments = parse_arguments()
    if arguments.steps <= WARM_UP_STEPS:
        raise SystemExit(f"--steps: {arguments.steps} leaves nothing after {WARM_UP_STEPS} steps of warm-up.")
    prepare()
    for name in arguments.cases:
        runs: dict[str, list[GRPORun]] = {"nemo_rl": [], "TRL": []}
        for number in range(arguments.repeats):
            for side in list(runs)[:: -1 if number % 2 else 1]:
                folder = BENCH / "runs" / f"{name}-{side}-{int(time.time())}"
                folder.mkdir(parents=True)
                logger.info("%s, load average %.1f %.1f %.1f ...", folder.name, *os.getloadavg())
                case = CASES[name]
                run = run_own(case, folder, arguments) if side == "nemo_rl" else run_trl(name, case, folder, arguments)
                runs[side].append(run)
                logger.info("%s: %s s in all", folder.name, show(run.steps[-1].seen_at_s))
        print(table(name, runs["nemo_rl"], runs["TRL"]))
        print(reward_rows(runs["nemo_rl"], runs["TRL"]) + "\n", flush=True)


if __name__ == "__main__":
    main()
