"""Define `nemo_rl grpo` and the other commands that run a configuration.

The module imports little, so that the help appears immediately. Invariant: the commands do what the scripts
`examples/run_*.py` do.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

STARTED_AT = time.perf_counter()


@dataclass(frozen=True)
class RunCommand:
    """Command of one program, with the members that `nemo_rl` reads from the modules of commands."""

    NAME: str
    """Name of the command, which is that of the program."""
    SUMMARY: str
    """One line for the list of commands."""
    BASE_FILES: str
    """Base file for GPUs, and base file for a machine without GPU."""

    @property
    def DESCRIPTION(self) -> str:  # noqa: N802  (read like a constant of a module)
        """Help text."""
        return f"""{self.SUMMARY[0].upper()}{self.SUMMARY[1:]}.

FILE is a configuration, or the name of a base file of the library: {self.BASE_FILES}.
Overrides are in Hydra's grammar (key=value, +key=value, ~key).
All keys: docs/reference/configuration.md."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options to a parser."""
        parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of the run")
        parser.add_argument(
            "--dry-run", action="store_true", help="show what the run would be and whether it fits; start nothing"
        )
        parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys over those of the file")

    def main(self, arguments: argparse.Namespace) -> int:
        """Run and return the exit status."""
        from nemo_rl.launch.programs import run_program

        options = [] if arguments.config is None else ["--config", str(arguments.config)]
        options += ["--dry-run"] if arguments.dry_run else []
        return run_program(self.NAME, self.DESCRIPTION, [*options, *arguments.overrides], started_at=STARTED_AT)


RUNS = [
    RunCommand("grpo", "train with GRPO", "grpo_math_1B.yaml, grpo_math_cpu.yaml"),
    RunCommand("ppo", "train with PPO, a policy and a critic", "ppo_math_1B.yaml, ppo_math_cpu.yaml"),
    RunCommand("sft", "train on answers that are given (SFT)", "sft.yaml, sft_cpu.yaml"),
    RunCommand("dpo", "train on pairs of answers (DPO)", "dpo.yaml, dpo_cpu.yaml"),
    RunCommand("rm", "train a reward model on pairs of answers", "rm.yaml, rm_cpu.yaml"),
    RunCommand("distillation", "train a student on a teacher", "distillation_math.yaml, distillation_math_cpu.yaml"),
    RunCommand("eval", "evaluate a model on problems with known answers", "eval.yaml, eval_cpu.yaml"),
]
"""Commands, one for each program of `nemo_rl.launch.programs`."""
