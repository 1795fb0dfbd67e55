"""Run the CPU examples and compare their metrics, number by number, with an earlier recording.

    python tools/golden_runs.py record results/golden_before            # before the change
    python tools/golden_runs.py record results/golden_after             # after it
    python tools/golden_runs.py compare results/golden_before results/golden_after

A change that must not change behaviour leaves every number equal, bit for bit, on one machine. `--root` runs the
examples of another checkout in this environment; `--only` and `--steps` shorten a recording. The exit status of
`compare` is 1 if a number differs or is missing on one side.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SKIPPED_SUFFIXES = ("_s",)
"""Suffixes of metrics that are wall-clock times."""

type Metrics = dict[tuple[str, int, str], float | None]


@dataclass(frozen=True)
class Case:
    """One example run.

    Attributes:
        script: file below `examples/`.
        config: file below `examples/configs/`.
        section: section that holds `max_num_steps`.
        overrides: further `key=value` arguments.
    """

    script: str
    config: str
    section: str
    overrides: tuple[str, ...] = ()


_LORA = (
    "policy.dtensor_cfg.lora_cfg.enabled=true",
    "policy.dtensor_cfg.lora_cfg.dim=16",
    "policy.optimizer.kwargs.lr=1e-3",
)
_TWO_AND_TWO = (
    "cluster.ranks_per_node=2",
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.ranks_per_node=2",
)
CASES = {
    "grpo": Case("run_grpo.py", "grpo_math_cpu.yaml", "grpo"),
    "sft": Case("run_sft.py", "sft_cpu.yaml", "sft"),
    "dpo": Case("run_dpo.py", "dpo_cpu.yaml", "dpo"),
    "kto": Case("run_dpo.py", "dpo_cpu.yaml", "dpo", ("dpo.preference_loss=kto",)),
    "rm": Case("run_rm.py", "rm_cpu.yaml", "rm"),
    "ppo": Case("run_ppo.py", "ppo_math_cpu.yaml", "ppo"),
    "distillation": Case("run_distillation.py", "distillation_math_cpu.yaml", "distillation"),
    "grpo_lora": Case("run_grpo.py", "grpo_math_cpu.yaml", "grpo", _LORA),
    "grpo_two_ranks_two_engines": Case("run_grpo.py", "grpo_math_cpu.yaml", "grpo", _TWO_AND_TWO),
}


def record(case: Case, folder: Path, root: Path, steps: int | None) -> int:
    """Run one example into a new folder; return its exit status."""
    folder.mkdir(parents=True)
    shortened = [] if steps is None else [f"{case.section}.max_num_steps={steps}"]
    return run_example(case, folder, ["checkpointing.enabled=false", *shortened], root)


def run_example(case: Case, folder: Path, overrides: Sequence[str], root: Path = ROOT) -> int:
    """Run an example that logs into a folder and append its output to `folder/console.log`; return its exit status."""
    command = [sys.executable, str(root / "examples" / case.script)]
    command += ["--config", str(root / "examples/configs" / case.config), *case.overrides]
    command += [f"logger.log_dir={folder}/logs", *overrides]
    environment = os.environ | {"PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1"}
    with (folder / "console.log").open("ab") as console:
        return subprocess.run(command, cwd=root, env=environment, stdout=console, stderr=subprocess.STDOUT).returncode


def read(folder: Path) -> Metrics:
    """Read the metrics of one recorded run, by (prefix, step, name)."""
    metrics: Metrics = {}
    for path in sorted(folder.glob("logs/exp_*/metrics.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["prefix"] == "train" or row["prefix"].startswith("validation"):
                kept = {name: value for name, value in row["metrics"].items() if not name.endswith(SKIPPED_SUFFIXES)}
                metrics |= {(row["prefix"], row["step"], name): value for name, value in kept.items()}
    return metrics


def differences(before: Metrics, after: Metrics) -> list[str]:
    """Return one line for each number that differs or is on one side only, in the order of the steps."""
    keys = sorted(before.keys() | after.keys(), key=lambda key: (key[1], key))
    return [
        f"step {step} {prefix}/{name}: {before.get((prefix, step, name), 'absent')} "
        f"-> {after.get((prefix, step, name), 'absent')}"
        for prefix, step, name in keys
        if before.get((prefix, step, name), "absent") != after.get((prefix, step, name), "absent")
    ]


def compare(before: Path, after: Path) -> int:
    """Print a line for each run; return 1 if one differs."""
    status = 0
    for name in sorted({path.name for path in (*before.iterdir(), *after.iterdir())}):
        old, new = read(before / name), read(after / name)
        lines = differences(old, new)
        status |= bool(lines) or not old
        print(f"{name}: {len(old)} and {len(new)} numbers, {len(lines)} differ")
        print("".join(f"    {line}\n" for line in lines[:8]), end="")
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Record or compare; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record")
    recorder.add_argument("folder", type=Path)
    recorder.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    recorder.add_argument("--steps", type=int, help="steps of each run; default: as in its file")
    recorder.add_argument("--root", type=Path, default=ROOT)
    comparer = commands.add_parser("compare")
    comparer.add_argument("before", type=Path)
    comparer.add_argument("after", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "compare":
        return compare(options.before, options.after)
    status = 0
    for name in options.only:
        failed = record(CASES[name], options.folder.absolute() / name, options.root.resolve(), options.steps)
        print(f"{name}: {'exit status ' + str(failed) if failed else 'recorded'}", flush=True)
        status |= bool(failed)
    return status


if __name__ == "__main__":
    sys.exit(main())
