"""Count programs per second with and without a sandbox, and grade the reference solutions of HumanEval and MBPP.

    python tools/benchmarks/sandbox_runs.py --programs 200 --workers 2
    python tools/benchmarks/sandbox_runs.py --programs 0 --humaneval HumanEval.jsonl.gz --mbpp mbpp.jsonl.gz

Run it on an idle machine: every program is a process, so other work on the cores shows at once.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nemo_rl.data.datasets.response_datasets import load_response_dataset
from nemo_rl.kits.code.grading import SolutionGrader, parse_tests
from nemo_rl.sandbox import Limits, Program, Sandbox, why_unavailable
from nemo_rl.sandbox.mechanisms import IN_ORDER
from nemo_rl.sandbox.program import python

_PROGRAM = "print(sum(range(1000)))"
_CALLS = "def add(a, b): return a + b"
_TESTS = '{"tests": ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add(0, 0) == 0"]}'


def main() -> int:
    """Measure and print; return 1 if a reference solution failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200, help="programs of each kind; 0 measures no speed")
    parser.add_argument("--workers", type=int, default=2, help="programs at the same time")
    parser.add_argument("--humaneval", help="file of HumanEval")
    parser.add_argument("--mbpp", help="file of MBPP")
    options = parser.parse_args()
    say(f"load average {os.getloadavg()[0]:.2f}, {len(os.sched_getaffinity(0))} processors")
    if options.programs:
        measure(options.programs, options.workers)
    failed = 0
    for name, path, reference in (("humaneval", options.humaneval, _humaneval), ("mbpp", options.mbpp, _mbpp)):
        if path:
            failed += grade_references(name, path, reference, options.workers)
    return min(failed, 1)


def measure(num_programs: int, workers: int) -> None:
    """Print programs per second for each way to run them."""
    for name, run in ways():
        run()
        started = time.perf_counter()
        with ThreadPoolExecutor(workers) as threads:
            list(threads.map(lambda _, run=run: run(), range(num_programs)))
        say(f"{name:40} {num_programs / (time.perf_counter() - started):7.1f} programs/s")


def ways() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the ways to run a program that work on this machine."""
    bare = [python().command[0], "-I", "-B", "-c", _PROGRAM]
    yield "no sandbox", lambda: subprocess.run(bare, check=True, capture_output=True)
    for mechanism in IN_ORDER:
        if why_unavailable(mechanism) is None:
            name = f"{mechanism.name}, namespaces: {mechanism.namespaces}"
            sandbox = Sandbox(Limits(), mechanism)
            yield name, lambda sandbox=sandbox: sandbox.run(Program(_PROGRAM))
            grader = SolutionGrader(sandbox)
            yield f"{name}, graded calls", lambda grader=grader: grader.grade(_CALLS, parse_tests(_TESTS))


def grade_references(name: str, path: str, reference: Callable[[Any], str], workers: int) -> int:
    """Print the share of reference solutions that pass all tests; return how many do not."""
    rows = list(load_response_dataset({"dataset_name": name, "data_path": path, "env_name": "code"}).dataset)
    grader = SolutionGrader(Sandbox(Limits(wall_time_s=60, cpu_time_s=60)))
    started = time.perf_counter()
    with ThreadPoolExecutor(workers) as threads:
        verdicts = threads.map(
            lambda row: grader.grade(reference(row), parse_tests(row["messages"][-1]["content"])), rows
        )
        wrong = [row["task_id"] for row, verdict in zip(rows, verdicts, strict=True) if not verdict.is_right]
    seconds = time.perf_counter() - started
    say(f"{name}: {len(rows) - len(wrong)} of {len(rows)} reference solutions pass, {seconds:.0f} s {wrong or ''}")
    return len(wrong)


def _humaneval(row: Any) -> str:
    return f"{row['prompt']}{row['canonical_solution']}"


def _mbpp(row: Any) -> str:
    return str(row["code"])


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
