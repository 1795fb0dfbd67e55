"""Measure one side of a benchmark: TRL's environment, a run as a child process, its memory and its time.

Invariant: both sides are measured in the same way, and never at the same time. All times are read in this process: a
step ends when its line appears in the side's metrics file.
"""

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / ".bench"
TRL_PACKAGES = (
    "trl==1.16.0",
    "transformers==5.19.0",
    "torch==2.13.0",
    "accelerate==1.15.0",
    "datasets==5.2.0",
)
WARM_UP_STEPS = 5
MEMORY_PERIOD_S = 0.5
PSS_EVERY = 12
POLL_PERIOD_S = 0.02
RUN_LIMIT_S = 1800


@dataclass
class Step:
    """One step of one side and its end; each benchmark adds the side's report about it.

    Attributes:
        seen_at_s: seconds from the start of the side's process to the step's end.
        cpu_s: processor seconds that the side's processes had used at the step's end.
    """

    seen_at_s: float = field(default=0.0, kw_only=True)
    cpu_s: float = field(default=0.0, kw_only=True)


@dataclass
class Run[StepT: Step]:
    """One side's run.

    Attributes:
        steps: the steps, in order.
        peak_rss_mb: largest sum of resident memory over the process tree; a page that processes share
            counts once per process.
        peak_pss_mb: the same sum with shared pages divided among their users.
        warm_up_steps: number of first steps that are not measured.
    """

    steps: list[StepT] = field(default_factory=list)
    peak_rss_mb: float = 0.0
    peak_pss_mb: float = 0.0
    warm_up_steps: int = WARM_UP_STEPS

    @property
    def step_seconds(self) -> list[float]:
        """Seconds from one step's end to the next, without the warm-up."""
        return differences([step.seen_at_s for step in self.steps[self.warm_up_steps - 1 :]])

    @property
    def step_cpu_seconds(self) -> list[float]:
        """Processor seconds from one step's end to the next, without the warm-up."""
        return differences([step.cpu_s for step in self.steps[self.warm_up_steps - 1 :]])

    @property
    def measured(self) -> list[StepT]:
        """The steps that `step_seconds` covers."""
        return self.steps[self.warm_up_steps :]


def differences(values: list[float]) -> list[float]:
    """Return each value minus the previous one."""
    return [later - earlier for earlier, later in zip(values, values[1:], strict=False)]


def tree_of(root: int) -> list[int]:
    """Return the process ids of `root` and all of its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, waiting = [], [root]
    while waiting:
        found.append(waiting.pop())
        waiting += children.get(found[-1], [])
    return found


def rss_mb(pids: list[int]) -> float:
    """Return the sum of the resident memory of some processes; ended processes count as 0."""
    pages = 0
    for pid in pids:
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except OSError:
            continue
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def pss_mb(pids: list[int]) -> float:
    """Return the sum of the proportional memory of some processes; expensive: the kernel walks all their pages."""
    kilobytes = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        kilobytes += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kilobytes / 1024


def cpu_seconds(pids: list[int]) -> float:
    """Return the processor time of some processes and of their ended children."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(int(value) for value in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def run_side[StepT: Step](
    command: list[str],
    metrics: Path,
    read: Callable[[Iterator[str]], Iterator[StepT]],
    log: Path,
    threads: int,
    warm_up_steps: int = WARM_UP_STEPS,
) -> Run[StepT]:
    """Start one side, watch it until it ends, and return its figures.

    Args:
        command: command to start.
        metrics: JSONL file that it writes.
        read: turns the file's lines, as they arrive, into steps.
        log: file for its output.
        threads: number of processors it may use.
        warm_up_steps: number of first steps that are not measured.

    Raises:
        SystemExit: it failed or took longer than `RUN_LIMIT_S`.
    """
    run: Run[StepT] = Run(warm_up_steps=warm_up_steps)
    processors = sorted(os.sched_getaffinity(0))[:threads]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    started = time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, processors),
        )
        watcher = threading.Thread(target=watch_memory, args=(process, run), daemon=True)
        watcher.start()
        try:
            for step in read(follow(metrics, process, started)):
                step.seen_at_s = time.perf_counter() - started
                step.cpu_s = cpu_seconds(tree_of(process.pid))
                run.steps.append(step)
            process.wait(RUN_LIMIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            watcher.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command[:3])} ended with status {process.returncode}; see {log}.")
    return run


def follow(path: Path, process: subprocess.Popen[bytes], started: float) -> Iterator[str]:
    """Yield the lines of a file as they are written, until the process has ended."""
    while not path.exists() and process.poll() is None:
        time.sleep(POLL_PERIOD_S)
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        rest = ""
        while True:
            is_over = process.poll() is not None
            rest += file.read()
            *lines, rest = rest.split("\n")
            yield from lines
            if is_over:
                return
            if time.perf_counter() - started > RUN_LIMIT_S:
                raise SystemExit(f"No end after {RUN_LIMIT_S} s.")
            time.sleep(POLL_PERIOD_S)


def watch_memory[StepT: Step](process: subprocess.Popen[bytes], run: Run[StepT]) -> None:
    """Sample the tree's memory until the process ends."""
    num_samples = 0
    while process.poll() is None:
        pids = tree_of(process.pid)
        run.peak_rss_mb = max(run.peak_rss_mb, rss_mb(pids))
        if num_samples % PSS_EVERY == 0:
            run.peak_pss_mb = max(run.peak_pss_mb, pss_mb(pids))
        num_samples += 1
        time.sleep(MEMORY_PERIOD_S)


def trl_python(trl: str = TRL_PACKAGES[0]) -> Path:
    """Return the Python of the environment of a version of TRL, which is made on first use."""
    packages = (trl, *TRL_PACKAGES[1:])
    environment = BENCH / trl.replace("==", "-")
    python = environment / "bin" / "python"
    marker = environment / "installed.txt"
    if not marker.exists() or marker.read_text().split() != list(packages):
        logger.info("Installing %s into %s ...", trl, environment)
        subprocess.run(["uv", "venv", "--quiet", "--clear", "--python", "3.12", str(environment)], check=True)
        install = ["uv", "pip", "install", "--quiet", "--compile-bytecode", "--python", str(python)]
        subprocess.run([*install, *packages], check=True)
        marker.write_text("\n".join(packages))
    return python


def show(value: float | None) -> str:
    """Format a figure with three significant digits."""
    if value is None:
        return "not reached"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def ratio(ours: float | None, theirs: float | None) -> str:
    """Format the ratio nemo_rl / TRL."""
    return "" if ours is None or not theirs else f"{ours / theirs:.2f}"


def prepare(trl: str = TRL_PACKAGES[0]) -> None:
    """Create the folder for all output, ignored by git, and the environment of a version of TRL in it."""
    BENCH.mkdir(exist_ok=True)
    (BENCH / ".gitignore").write_text("*\n")
    trl_python(trl)
