"""Run the program of a configuration: one for each algorithm, and evaluation.

`nemo_rl grpo`, `examples/run_grpo.py` and `nemo_rl.grpo` are the same program with different sources of the
configuration. Nothing large is imported before the configuration is accepted.
"""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_rl.config import RunConfig, count_gpus
from nemo_rl.config.base.paths import FILES_ROOT
from nemo_rl.config.loading.algorithms import ALGORITHMS
from nemo_rl.config.loading.overrides import dotlist_to_overrides
from nemo_rl.launch.command_line import launch


@dataclass(frozen=True)
class RunProgram:
    """Program of one algorithm."""

    name: str
    """Section of the algorithm, for example grpo."""
    base_file: str
    """Configuration for GPUs, in `examples/configs`, that is used if none is given."""

    @property
    def schema(self) -> type[RunConfig]:
        """Class of the configuration."""
        return ALGORITHMS[self.name]

    @property
    def default_config(self) -> Path:
        """Path of `base_file`."""
        return FILES_ROOT / "examples" / "configs" / self.base_file

    def config_for_this_machine(self) -> Path:
        """Return the path of `base_file`, or of the configuration for a machine without GPU."""
        return self.default_config if count_gpus() else FILES_ROOT / self.schema.cpu_config

    def train(self, config: Any, *, started_at: float = 0.0, **parts: Any) -> Any:
        """Set up a run and train, and always stop all workers.

        Args:
            config: a checked configuration.
            started_at: `time.perf_counter()` at process start.
            parts: as in `setup` of the algorithm.

        Returns:
            The closed run.
        """
        algorithm = importlib.import_module(f"nemo_rl.algorithms.{self.name}")
        with algorithm.setup(config, started_at=started_at, **parts) as run:
            getattr(algorithm, f"{self.name}_train")(run)
        return run


PROGRAMS = {
    program.name: program
    for program in (
        RunProgram("grpo", "grpo_math_1B.yaml"),
        RunProgram("ppo", "ppo_math_1B.yaml"),
        RunProgram("sft", "sft.yaml"),
        RunProgram("dpo", "dpo.yaml"),
        RunProgram("rm", "rm.yaml"),
        RunProgram("distillation", "distillation_math.yaml"),
        RunProgram("eval", "evals/eval.yaml"),
    )
}
"""Programs by name."""


def run_program(
    name: str,
    description: str = "",
    arguments: Sequence[str] | None = None,
    *,
    base_file: str | None = None,
    overrides: Sequence[str] = (),
    started_at: float = 0.0,
) -> int:
    """Read the configuration that a command line names, and run it.

    Args:
        name: program of `PROGRAMS`.
        description: help text.
        arguments: command line without the program, or None for `sys.argv`.
        base_file: configuration in `examples/configs` that is used if none is given, or None for the program's.
        overrides: overrides before those of the command line.
        started_at: `time.perf_counter()` at process start.

    Returns:
        Exit status.
    """
    program = PROGRAMS[name] if base_file is None else replace(PROGRAMS[name], base_file=base_file)

    def run(config: Any) -> None:
        if name == "eval":
            _evaluate(config)
        else:
            program.train(config, started_at=started_at)

    given = [*overrides, *(sys.argv[1:] if arguments is None else arguments)]
    # NeMo RL's evaluation takes OmegaConf's dotlists, where everything after the first `=` is the value.
    given = dotlist_to_overrides(given) if name == "eval" else given
    return launch(description, program.default_config, program.schema, run, given)


def _evaluate(config: Any) -> None:
    from nemo_rl.evals.eval import evaluate, format_report

    report = evaluate(config)
    sys.stdout.write(f"\n{format_report(report)}\n")
