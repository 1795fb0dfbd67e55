"""Check on one machine that the training code is correct on its device, and measure how fast it is.

    python tools/gpu_check.py --json gpu_check.json     # needs an NVIDIA GPU
    python tools/gpu_check.py --cpu                     # tiny shapes, gloo and shared memory

It needs torch 2.11 or later and transformers, but no Ray, no vLLM and no network; models are random. Pydantic,
OmegaConf and Hydra may be in a separate folder (x86-64 Linux, Python 3.12):

    uv pip install --target wheels --python-version 3.12 --python-platform x86_64-manylinux_2_28 \
        pydantic omegaconf hydra-core
    python tools/gpu_check.py --wheels wheels

Each check runs in a separate process with a deadline, the most important first, until `--budget` is used up. The exit
status is 1 if a correctness row failed. See docs/development/gpu-readiness.md for the meaning of the rows.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
GPU_BUDGET_S = 480.0
CPU_BUDGET_S = 240.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; return the exit status."""
    options = _parse(arguments)
    _extend_path(options.wheels)
    from gpu_checks.plan import chosen
    from gpu_checks.report import Report, machine_lines, table_line
    from gpu_checks.runner import Runner, Setting

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that workers end with this process
    began, report = time.monotonic(), Report()
    budget_s = options.budget or (CPU_BUDGET_S if options.cpu else GPU_BUDGET_S)
    with tempfile.TemporaryDirectory(prefix="gpu_check-", dir=options.workdir) as folder:
        runner = Runner(Setting(options.cpu, folder, options.plant_fault), budget_s)
        try:
            for row in runner.rows(chosen(options.only)):
                if runner.machine and not report.machine:
                    report.machine = runner.machine
                    print("\n".join(machine_lines(report.machine)), flush=True)
                report.rows.append(row)
                report.seconds = round(time.monotonic() - began, 1)
                print(table_line(row), flush=True)
                if options.json is not None:
                    report.write_json(options.json)
        finally:
            runner.close()
    print(report.summary())
    return 1 if report.failures() else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="tiny shapes on the CPU instead of a GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to this file, after each row")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="limit for all checks (480; with --cpu 240)")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="run checks whose name contains a text")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="folder of installed packages to import from")
    parser.add_argument("--workdir", type=Path, metavar="DIR", help="parent of the temporary folder (30 GB on GPUs)")
    parser.add_argument(
        "--plant-fault", action="store_true", help="change a weight of the trained models, to test that the checks fail"
    )
    return parser.parse_args(arguments)


def _extend_path(wheels: Path | None) -> None:
    """Make the checks, the library and the packages in `--wheels` importable, here and in later processes."""
    folders = [TOOLS, TOOLS.parent] + ([wheels.resolve()] if wheels is not None else [])
    sys.path[:0] = [str(folder) for folder in folders if str(folder) not in sys.path]


if __name__ == "__main__":
    sys.exit(main())
