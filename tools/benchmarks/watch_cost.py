"""Measure what `nemo_rl watch` costs the run that it shows: seconds of a step with and without it, in turns.

    uv run --extra cpu python tools/benchmarks/watch_cost.py [--sizes 1m 3m] [--repeats 3]

The run is that of `grpo_vs_trl.py` with stored trajectories. `nemo_rl watch` shows it, and a client asks for news as
the page does; both are stopped (SIGSTOP) in every second turn of some steps. The turns are in the same run, because two
runs of the same command differ by more than the server costs. Linux only.
"""

import argparse
import contextlib
import json
import logging
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from grpo_vs_trl import own_command
from side_by_side import BENCH, ROOT, Run, Step, cpu_seconds, differences, run_side, show
from workloads import SIZES

logger = logging.getLogger("watch_cost")

SIDES = ("alone", "watched")
WARM_UP_STEPS = 10
"""Steps before the first turn; the server starts in them."""
STEPS_OF_A_TURN = 5
_ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/\S+/")


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
        self._server: subprocess.Popen[str] | None = None
        self._shows = threading.Event()
        self._ended = threading.Event()

    def run(self) -> None:
        """Follow the run until `end`."""
        while not (self.logs / "metrics.jsonl").exists():
            if self._ended.wait(0.2):
                return
        command = [sys.executable, "-m", "nemo_rl", "watch", str(self.logs), "--port", "0"]
        self._server = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True)
        assert self._server.stdout is not None
        try:
            address = next(found.group() for line in self._server.stdout if (found := _ADDRESS.search(line)))
            self._shows.set()
            self._follow(address)
            self.cpu_s = cpu_seconds([self._server.pid])
        finally:
            self._server.terminate()
            self._server.wait(30)

    def _follow(self, address: str) -> None:
        version = 0
        while not self._ended.is_set():
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}news?after={version}") as answer:
                news = json.load(answer)
                self.num_news += news["version"] != version
                version = news["version"]

    def start_turn(self, side: str) -> None:
        """Stop the server, or let it go on; the client waits for its answer meanwhile.

        Raises:
            SystemExit: it has not started.
        """
        if self._server is None or not self._shows.is_set():
            raise SystemExit(f"`nemo_rl watch` has not started within {WARM_UP_STEPS} steps.")
        os.kill(self._server.pid, signal.SIGCONT if side == "watched" else signal.SIGSTOP)

    def end(self) -> None:
        """End the server."""
        self._ended.set()
        if self._server is not None:
            os.kill(self._server.pid, signal.SIGCONT)
        self.join(60)


def side_of(step: int) -> str | None:
    """Return the side to which a step belongs, counted from 0; None in the warm-up."""
    turn = (step - WARM_UP_STEPS) // STEPS_OF_A_TURN
    return SIDES[turn % 2] if step >= WARM_UP_STEPS else None


def read_steps(lines: Iterator[str], watcher: Watcher) -> Iterator[Step]:
    """Yield a step for each line of metrics.jsonl that ends one, and start the turn of the next step."""
    num_steps = 0
    for line in lines:
        if json.loads(line)["prefix"] == "timing/train":
            num_steps += 1
            side = side_of(num_steps)
            if side is not None and side != side_of(num_steps - 1):
                watcher.start_turn(side)
            yield Step()


def measure(size: str, arguments: argparse.Namespace) -> dict[str, tuple[list[float], list[float]]]:
    """Run once and return the seconds and the processor seconds of the steps of each side."""
    folder = BENCH / "runs" / f"watch-{size}-{int(time.time())}"
    folder.mkdir(parents=True)
    command, metrics = own_command("uniform", size, folder, arguments)
    command += ["logger.save_trajectories=true"]
    watcher = Watcher(metrics.parent)
    watcher.start()
    try:
        run: Run[Step] = run_side(
            command, metrics, lambda lines: read_steps(lines, watcher), folder / "run.log", arguments.threads
        )
    finally:
        watcher.end()
    logger.info("the page had news %d times; the server took %.1f processor s", watcher.num_news, watcher.cpu_s)
    if not watcher.num_news:
        raise SystemExit("The watched run was not watched: its page had no news.")
    seconds = differences([step.seen_at_s for step in run.steps])
    used = differences([step.cpu_s for step in run.steps])
    # The first difference is that of the second step.
    numbers = {side: [n for n in range(len(seconds)) if side_of(n + 1) == side] for side in SIDES}
    return {side: ([seconds[n] for n in mine], [used[n] for n in mine]) for side, mine in numbers.items()}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=["1m", "3m"], choices=list(SIZES), help="parameters of the model")
    parser.add_argument("--repeats", type=int, default=3, help="runs")
    parser.add_argument("--steps", type=int, default=70, help=f"of each run; the first {WARM_UP_STEPS} are a warm-up")
    parser.add_argument("--threads", type=int, default=2, help="processors and OpenMP threads")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args(arguments)


def main() -> None:
    """Run each size, and print a table of its sides."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    arguments = parse_arguments()
    BENCH.mkdir(exist_ok=True)
    (BENCH / ".gitignore").write_text("*\n")
    print("| size | | seconds per step, median and mean of each run | processor seconds per step |\n|---|---|---|---|")
    for size in arguments.sizes:
        runs = [measure(size, arguments) for _ in range(arguments.repeats)]
        for side in SIDES:
            seconds = "; ".join(
                f"{show(statistics.median(run[side][0]))}, {show(statistics.fmean(run[side][0]))}" for run in runs
            )
            used = ", ".join(show(statistics.median(run[side][1])) for run in runs)
            print(f"| {size} | {side} | {seconds} | {used} |", flush=True)


if __name__ == "__main__":
    main()
