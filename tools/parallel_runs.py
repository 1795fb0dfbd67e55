"""Run every algorithm on every kind of mesh, by overrides of its CPU example alone, and compare with one rank.

    python tools/parallel_runs.py results/parallel                         # all of it: about an hour on two cores
    python tools/parallel_runs.py results/parallel --only grpo --meshes tp2 cp2
    python tools/parallel_runs.py results/parallel --resume                # half on one mesh, half on another
    python tools/parallel_runs.py results/parallel --resume tp2:cp2        # these two

Each line gives the largest relative difference of the loss in the first step and over all steps, and the metric that
says whether the model learns, at the start and at the end. Samples part when a rounding error changes a token, so in
runs that generate only the first step is held to the limit.
"""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from golden_runs import CASES, ROOT, Metrics, read, run_example
from parity.moe import save_mixture

LIMIT = 1e-4
ALGORITHMS = {
    "grpo": "validation/accuracy",
    "sft": "validation/val_loss",
    "dpo": "validation/loss",
    "rm": "validation/loss",
    "distillation": "validation/accuracy",
    "grpo_lora": "validation/accuracy",
}
"""Algorithms, and the metric of each that shows whether it learns."""
MESHES: dict[str, tuple[int, Mapping[str, object]]] = {
    "dp2": (2, {}),
    "tp2": (2, {"tensor_parallel_size": 2, "sequence_parallel": "true"}),
    "cp2": (2, {"context_parallel_size": 2}),
    "dp2xtp2": (4, {"tensor_parallel_size": 2}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "ep2": (2, {"expert_parallel_size": 2}),
}
"""Ranks and keys of `dtensor_cfg`; `ep2` runs on a mixture of experts."""
CHANGES = ("tp2:cp2", "pp2:dp2xtp2", "ep2:1")
"""Meshes before and after a resume."""


@dataclass(frozen=True)
class Run:
    """One run of an example.

    Attributes:
        algorithm: key of `golden_runs.CASES`.
        mesh: key of `MESHES`, or "1" for one rank.
        mixture: whether the model is the mixture of experts.
    """

    algorithm: str
    mesh: str
    mixture: bool = False

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.algorithm}-{self.mesh}{'-moe' if self.mixture else ''}"

    def overrides(self, model: str | None) -> list[str]:
        """Arguments that set mesh and model."""
        ranks, keys = MESHES.get(self.mesh, (1, {}))
        sections = ["policy", "teacher"] if self.algorithm == "distillation" else ["policy"]
        given = [f"cluster.ranks_per_node={ranks}"]
        for section in sections:
            divided = (
                {**keys} if section == "policy" else {k: v for k, v in keys.items() if k != "expert_parallel_size"}
            )
            given += [f"{section}.dtensor_cfg.{key}={value}" for key, value in divided.items()]
        return given + ([f"policy.model_name={model}"] if model else [])


def start(run: Run, folder: Path, steps: int, extra: Sequence[str], model: str | None) -> bool:
    """Run an example into a folder; whether it succeeded."""
    case = CASES[run.algorithm]
    folder.mkdir(parents=True, exist_ok=True)
    return run_example(case, folder, [*run.overrides(model), f"{case.section}.max_num_steps={steps}", *extra]) == 0


def losses(metrics: Metrics) -> dict[int, float]:
    """Loss of each step."""
    return {
        step: value for (prefix, step, name), value in metrics.items() if prefix == "train" and name == "loss" and value
    }


def learned(metrics: Metrics, key: str) -> str:
    """First and last value of the metric that shows learning."""
    prefix, name = key.split("/")
    found = sorted((step, value) for (p, step, n), value in metrics.items() if (p, n) == (prefix, name))
    return f"{found[0][1]:.4f} -> {found[-1][1]:.4f}" if found else "-"


def report(run: Run, folder: Path, reference: Path) -> bool:
    """Print how a run compares with one rank; whether it holds."""
    ours, theirs = read(folder), read(reference)
    mine, one = losses(ours), losses(theirs)
    far = [abs(mine.get(step, math.inf) - value) / abs(value) for step, value in sorted(one.items())]
    first, worst = far[0], max(far)
    samples = run.algorithm not in ("sft", "dpo", "rm")
    holds = first <= LIMIT and (samples or worst <= LIMIT)
    shown = learned(ours, ALGORITHMS[run.algorithm])
    beside = learned(theirs, ALGORITHMS[run.algorithm])
    sys.stdout.write(
        f"{run.name:24} loss: first step {first:.1e}, all {len(far)} steps {worst:.1e}; "
        f"{ALGORITHMS[run.algorithm]} {shown} (one rank {beside}) {'' if holds else 'DIFFERS'}\n"
    )
    sys.stdout.flush()
    return holds


def compare_meshes(options: argparse.Namespace, model: str) -> int:
    """Every algorithm on every mesh against one rank; returns the number of runs that failed or differ."""
    failed = 0
    for algorithm in options.only:
        for mixture in sorted({mesh == "ep2" for mesh in options.meshes}):
            given = model if mixture else None
            one = Run(algorithm, "1", mixture)
            run_once(one, options, given)
            for mesh in (mesh for mesh in options.meshes if (mesh == "ep2") == mixture):
                run = Run(algorithm, mesh, mixture)
                shutil.rmtree(options.folder / run.name, ignore_errors=True)
                if start(run, options.folder / run.name, options.steps, _PLAIN, given):
                    failed += not report(run, options.folder / run.name, options.folder / one.name)
                else:
                    sys.stdout.write(f"{run.name:24} FAILED: {options.folder / run.name}/console.log\n")
                    failed += 1
    return failed


def run_once(one: Run, options: argparse.Namespace, model: str | None) -> None:
    """The run on one rank that others are compared with, unless it is there."""
    folder = options.folder / one.name
    if max(losses(read(folder)), default=0) != options.steps:
        shutil.rmtree(folder, ignore_errors=True)
        start(one, folder, options.steps, _PLAIN, model)


_PLAIN = ("checkpointing.enabled=false",)


def resume_elsewhere(options: argparse.Namespace, model: str) -> int:
    """Half of a run on one mesh, the rest on another; the losses are those of one rank throughout."""
    failed, half = 0, options.steps // 2
    for algorithm in options.only:
        for change in options.resume:
            mesh, other = change.split(":")
            given = model if (mixture := "ep2" in (mesh, other)) else None
            one = Run(algorithm, "1", mixture)
            run_once(one, options, given)
            run = Run(algorithm, f"{mesh}-then-{other}", mixture)
            folder = options.folder / run.name
            shutil.rmtree(folder, ignore_errors=True)
            keys = [f"checkpointing.checkpoint_dir={folder}/checkpoints", f"checkpointing.save_period={half}"]
            done = start(Run(algorithm, mesh, mixture), folder, half, keys, given)
            done = done and start(Run(algorithm, other, mixture), folder, options.steps, keys, given)
            if done and went_on(folder, half):
                failed += not report(run, folder, options.folder / one.name)
            else:
                sys.stdout.write(f"{run.name:24} FAILED: {folder}/console.log\n")
                failed += 1
    return failed


def went_on(folder: Path, half: int) -> bool:
    """Whether the second of two runs into a folder began behind the first one's last step."""
    lines = (folder / "logs/exp_002/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return min(row["step"] for row in map(json.loads, lines) if row["prefix"] == "train") == half + 1


def main() -> int:
    """Run what is asked for; returns 1 where a run failed or differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument("--meshes", nargs="+", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--resume", nargs="*", help="change the mesh in the middle of each run, as FIRST:SECOND")
    options = parser.parse_args()
    options.folder = options.folder.absolute()
    options.folder.mkdir(parents=True, exist_ok=True)
    model = save_mixture(ROOT / "examples/assets/tiny-chat", options.folder / "tiny-moe")
    if options.resume is None:
        return int(bool(compare_meshes(options, model)))
    options.resume = options.resume or CHANGES
    return int(bool(resume_elsewhere(options, model)))


if __name__ == "__main__":
    sys.exit(main())
