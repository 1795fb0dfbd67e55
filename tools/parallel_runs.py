"""Run every algorithm on every kind of mesh by overriding its CPU example, and compare with one rank.

        python tools/parallel_runs.py results/parallel                         # everything: about an hour on two cores
    python tools/parallel_runs.py results/parallel --only grpo --meshes tp2 cp2
    python tools/parallel_runs.py results/parallel --resume                # half on one mesh, half on another
    python tools/parallel_runs.py results/parallel --resume tp2:cp2        # these two
        python tools/parallel_runs.py results/parallel --backend megatron      # Megatron Core against one rank of
        DTensor

Each line gives the largest relative difference of the loss in the first step and over all steps, and the metric that
shows whether the model learns, at the start and at the end. Samples diverge when a rounding error changes a token, so
in runs that generate only the first step must be within the limit. Runs of Megatron Core and resumed runs, and their
one-rank reference, have a constant learning rate: a schedule ends with the run, so it would end sooner in half a run.
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

from nemo_rl.config.loading.inheritance import load_config_with_inheritance
from nemo_rl.config.schema.model.megatron import MegatronConfig
from nemo_rl.config.schema.model.parallel import BackendSection, DTensorConfig

LIMIT = 1e-4
ALGORITHMS = {
    "grpo": "validation/accuracy",
    "sft": "validation/val_loss",
    "dpo": "validation/loss",
    "rm": "validation/loss",
    "distillation": "validation/accuracy",
    "grpo_lora": "validation/accuracy",
}
"""Algorithm -> metric that shows whether it learns."""
MESHES: dict[str, tuple[int, Mapping[str, int]]] = {
    "1": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2, "sequence_parallel": 1}),
    "cp2": (2, {"cp": 2}),
    "dp2xtp2": (4, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "ep2": (2, {"ep": 2}),
}
"""Ranks, and sizes of axes or keys of the backend; `ep2` uses a mixture of experts."""
BACKENDS: dict[str, type[BackendSection]] = {"dtensor": DTensorConfig, "megatron": MegatronConfig}
CHANGES = ("tp2:cp2", "pp2:dp2xtp2", "ep2:1")
"""Meshes before and after a resume."""


@dataclass(frozen=True)
class Run:
    """One run of an example.

    Attributes:
        algorithm: key of `golden_runs.CASES`.
        mesh: key of `MESHES`.
        mixture: whether the model is the mixture of experts.
        backend: key of `BACKENDS`.
    """

    algorithm: str
    mesh: str
    mixture: bool = False
    backend: str = "dtensor"

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        backend = "" if self.backend == "dtensor" else f"{self.backend}-"
        return f"{self.algorithm}-{backend}{self.mesh}{'-moe' if self.mixture else ''}"

    def overrides(self, model: str | None) -> list[str]:
        """Return the arguments that set mesh and model."""
        ranks, axes = MESHES[self.mesh]
        given = [f"cluster.ranks_per_node={ranks}"]
        for section in ["policy", "teacher"] if self.algorithm == "distillation" else ["policy"]:
            divided = {axis: size for axis, size in axes.items() if section == "policy" or axis != "ep"}
            keys = {BACKENDS[self.backend].size_keys.get(axis, axis): size for axis, size in divided.items()}
            given += [f"{section}.{self.backend}_cfg.{key}={value}" for key, value in keys.items()]
            given += [f"{section}.dtensor_cfg.enabled=false"] if self.backend == "megatron" else []
        if self.backend == "megatron":
            given += megatron_overrides(self.algorithm, self.mixture)
        return given + ([f"policy.model_name={model}"] if model else [])


def megatron_overrides(algorithm: str, mixture: bool) -> list[str]:
    """Return the keys for Megatron Core with the optimizer of the example's file and a constant learning rate."""
    config = load_config_with_inheritance(ROOT / "examples/configs" / CASES[algorithm].config)
    given = config.policy.optimizer.kwargs
    optimizer = {
        "lr": given.lr,
        "weight_decay": given.weight_decay,
        "adam_beta1": given.betas[0],
        "adam_beta2": given.betas[1],
        "adam_eps": given.eps,
    }
    keys = {f"optimizer.{key}": value for key, value in optimizer.items()}
    keys |= {"scheduler.lr_warmup_iters": 0, "enabled": "true"}
    keys |= {"freeze_moe_router": "false"} if mixture else {}
    teacher = ["teacher.megatron_cfg.enabled=true"] if algorithm == "distillation" else []
    return ["policy.optimizer=null", *teacher, *(f"policy.megatron_cfg.{key}={value}" for key, value in keys.items())]


def start(run: Run, folder: Path, steps: int, extra: Sequence[str], model: str | None) -> bool:
    """Run an example into a folder; return whether it succeeded."""
    case = CASES[run.algorithm]
    folder.mkdir(parents=True, exist_ok=True)
    return run_example(case, folder, [*run.overrides(model), f"{case.section}.max_num_steps={steps}", *extra]) == 0


def losses(metrics: Metrics) -> dict[int, float]:
    """Return the loss of each step."""
    return {
        step: value for (prefix, step, name), value in metrics.items() if prefix == "train" and name == "loss" and value
    }


def learned(metrics: Metrics, key: str) -> str:
    """Return the first and last value of the metric that shows learning."""
    prefix, name = key.split("/")
    found = sorted((step, value) for (p, step, n), value in metrics.items() if (p, n) == (prefix, name))
    return f"{found[0][1]:.4f} -> {found[-1][1]:.4f}" if found else "-"


def report(run: Run, folder: Path, reference: Path) -> bool:
    """Print the comparison of a run with one rank; return whether it is within the limit."""
    ours, theirs = read(folder), read(reference)
    mine, one = losses(ours), losses(theirs)
    far = [abs(mine.get(step, math.inf) - value) / abs(value) for step, value in sorted(one.items())]
    first, worst = far[0], max(far)
    samples = run.algorithm not in ("sft", "dpo", "rm")
    holds = first <= LIMIT and (samples or worst <= LIMIT)
    shown = learned(ours, ALGORITHMS[run.algorithm])
    one_rank = learned(theirs, ALGORITHMS[run.algorithm])
    sys.stdout.write(
        f"{run.name:24} loss: first step {first:.1e}, all {len(far)} steps {worst:.1e}; "
        f"{ALGORITHMS[run.algorithm]} {shown} (one rank {one_rank}) {'' if holds else 'DIFFERS'}\n"
    )
    sys.stdout.flush()
    return holds


def compare_meshes(options: argparse.Namespace, model: str) -> int:
    """Compare every algorithm on every mesh with one rank; return the number of runs that failed or differ."""
    failed = 0
    for algorithm in options.only:
        for mixture in sorted({mesh == "ep2" for mesh in options.meshes}):
            given = model if mixture else None
            one = Run(algorithm, "1", mixture)
            run_once(one, options, given)
            runs = [Run(algorithm, mesh, mixture, options.backend) for mesh in options.meshes]
            for run in (run for run in runs if (run.mesh == "ep2") == mixture and run != one):
                shutil.rmtree(options.folder / run.name, ignore_errors=True)
                if start(run, options.folder / run.name, options.steps, options.plain, given):
                    failed += not report(run, options.folder / run.name, options.folder / one.name)
                else:
                    sys.stdout.write(f"{run.name:24} FAILED: {options.folder / run.name}/console.log\n")
                    failed += 1
    return failed


def run_once(one: Run, options: argparse.Namespace, model: str | None) -> None:
    """Run the one-rank reference unless its result exists."""
    folder = options.folder / one.name
    if max(losses(read(folder)), default=0) != options.steps:
        shutil.rmtree(folder, ignore_errors=True)
        start(one, folder, options.steps, options.plain, model)


def resume_elsewhere(options: argparse.Namespace, model: str) -> int:
    """Run half of each run on one mesh and the rest on another; compare losses with one rank; return the failures."""
    failed, half = 0, options.steps // 2
    for algorithm in options.only:
        for change in options.resume:
            mesh, other = change.split(":")
            given = model if (mixture := "ep2" in (mesh, other)) else None
            one = Run(algorithm, "1", mixture)
            run_once(one, options, given)
            run = Run(algorithm, f"{mesh}-then-{other}", mixture, options.backend)
            folder = options.folder / run.name
            shutil.rmtree(folder, ignore_errors=True)
            keys = [*options.flat, f"checkpointing.checkpoint_dir={folder}/checkpoints"]
            keys += [f"checkpointing.save_period={half}"]
            done = start(Run(algorithm, mesh, mixture, options.backend), folder, half, keys, given)
            done = done and start(Run(algorithm, other, mixture, options.backend), folder, options.steps, keys, given)
            if done and went_on(folder, half):
                failed += not report(run, folder, options.folder / one.name)
            else:
                sys.stdout.write(f"{run.name:24} FAILED: {folder}/console.log\n")
                failed += 1
    return failed


def went_on(folder: Path, half: int) -> bool:
    """Return whether the second of two runs into a folder started after the first one's last step."""
    lines = (folder / "logs/exp_002/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return min(row["step"] for row in map(json.loads, lines) if row["prefix"] == "train") == half + 1


def main() -> int:
    """Run the requested runs; return 1 if one failed or differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(ALGORITHMS), help="default: all that the backend supports")
    parser.add_argument("--meshes", nargs="+", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--resume", nargs="*", help="change the mesh in the middle of each run, as FIRST:SECOND")
    parser.add_argument("--backend", default="dtensor", choices=list(BACKENDS))
    options = parser.parse_args()
    options.only = options.only or [name for name in ALGORITHMS if options.backend == "dtensor" or "lora" not in name]
    constant = options.backend == "megatron" or options.resume is not None
    options.flat = ["policy.scheduler=null"] if constant else []
    options.plain = [*options.flat, "checkpointing.enabled=false"]
    folder = options.backend if options.backend != "dtensor" else "resumed" if constant else ""
    options.folder = options.folder.absolute() / folder
    options.folder.mkdir(parents=True, exist_ok=True)
    family = "qwen3_moe" if options.backend == "megatron" else "qwen2_moe"
    model = save_mixture(ROOT / "examples/assets/tiny-chat", options.folder / "tiny-moe", family=family)
    if options.resume is None:
        return int(bool(compare_meshes(options, model)))
    options.resume = options.resume or CHANGES
    return int(bool(resume_elsewhere(options, model)))


if __name__ == "__main__":
    sys.exit(main())
