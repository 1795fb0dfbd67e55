"""Measure what `nemo_rl watch` costs the run that it shows: seconds of a step with and without it, in turns.

    uv run --extra cpu python tools/benchmarks/watch_cost.py [--sizes 1m 3m] [--repeats 3]

The run is that of `grpo_vs_trl.py` with stored trajectories. A watched run is shown by `nemo_rl watch` from its first
step on, and a client asks for news as the page does. Linux only.
"""

import argparse
import contextlib
import json
import logging
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from grpo_vs_trl import own_command
from side_by_side import BENCH, ROOT, Run, Step, cpu_seconds, run_side, show
from workloads import SIZES

logger = logging.getLogger("watch_cost")

SIDES = ("alone", "watched")
_ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/\S+/")


def read_steps(lines: Iterator[str]) -> Iterator[Step]:
    """Yield a step for each line of metrics.jsonl that ends one."""
    for line in lines:
        if json.loads(line)["prefix"] == "timing/train":
            yield Step()


class Watcher(threading.Thread):
    """`nemo_rl watch`, started when the run has logged something, and its client.

    Args:
        logs: log folder of the run.

    Attributes:
        num_news: answers with something new.
        cpu_s: processor seconds of the server.
    """

    def __init__(self, logs: Path) -> None:
        super().__init__(daemon=True)
        self.logs, self.num_news, self.cpu_s = logs, 0, 0.0
        self._ended = threading.Event()

    def run(self) -> None:
        """Follow the run until `end`."""
        while not (self.logs / "metrics.jsonl").exists():
            if self._ended.wait(0.2):
                return
        command = [sys.executable, "-m", "nemo_rl", "watch", str(self.logs), "--port", "0"]
        server = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        try:
            address = next(found.group() for line in server.stdout if (found := _ADDRESS.search(line)))
            self._follow(address)
            self.cpu_s = cpu_seconds([server.pid])
        finally:
            server.terminate()
            server.wait(30)

    def _follow(self, address: str) -> None:
        version = 0
        while not self._ended.is_set():
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}news?after={version}") as answer:
                news = json.load(answer)
                self.num_news += news["version"] != version
                version = news["version"]

    def end(self) -> None:
        """End the server."""
        self._ended.set()
        self.join(60)


def measure(side: str, size: str, arguments: argparse.Namespace) -> Run[Step]:
    """Run one side and return its figures."""
    folder = BENCH / "runs" / f"watch-{size}-{side}-{int(time.time())}"
    folder.mkdir(parents=True)
    command, metrics = own_command("uniform", size, folder, arguments)
    command += ["logger.save_trajectories=true"]
    watcher = Watcher(metrics.parent) if side == "watched" else None
    if watcher:
        watcher.start()
    try:
        run: Run[Step] = run_side(command, metrics, read_steps, folder / "run.log", arguments.threads)
    finally:
        if watcher:
            watcher.end()
    if watcher:
        logger.info("the page had news %d times; the server took %.1f processor s", watcher.num_news, watcher.cpu_s)
        if not watcher.num_news:
            raise SystemExit("The watched run was not watched: its page had no news.")
    return run


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=["1m", "3m"], choices=list(SIZES), help="parameters of the model")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side, alternating")
    parser.add_argument("--steps", type=int, default=30, help="of each run; the first 5 are a warm-up")
    parser.add_argument("--threads", type=int, default=2, help="processors and OpenMP threads")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args(arguments)


def main() -> None:
    """Run both sides in turns for each size, and print a table."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    arguments = parse_arguments()
    BENCH.mkdir(exist_ok=True)
    (BENCH / ".gitignore").write_text("*\n")
    print("| size | | seconds per step, median of each run | processor seconds per step |\n|---|---|---|---|")
    for size in arguments.sizes:
        runs: dict[str, list[Run[Step]]] = {side: [] for side in SIDES}
        for number in range(arguments.repeats):
            for side in SIDES[:: -1 if number % 2 else 1]:
                runs[side].append(measure(side, size, arguments))
        for side, of_side in runs.items():
            seconds = ", ".join(show(statistics.median(run.step_seconds)) for run in of_side)
            used = ", ".join(show(statistics.median(run.step_cpu_seconds)) for run in of_side)
            print(f"| {size} | {side} | {seconds} | {used} |", flush=True)


if __name__ == "__main__":
    main()
