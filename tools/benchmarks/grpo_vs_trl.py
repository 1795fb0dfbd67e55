"""Measure GRPO here and in TRL, one after the other, on the same model, prompts and sampling.

    uv run python tools/benchmarks/grpo_vs_trl.py [--models tiny-chat warm-3m] [--steps 150]

Makes TRL's environment by itself under `.bench/` (kept for the next time), runs both sides as child
processes on the same processors, and prints Markdown tables. All clocks are this process's: it watches the
metrics file of each side and notes when a step's line appears, and it samples the memory of the whole
process tree. Law: both sides are measured with the same ruler, and never at the same time.
"""

import argparse
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

logger = logging.getLogger("grpo_vs_trl")

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / ".bench"
TRL_PACKAGES = (
    "trl==1.16.0",
    "transformers==5.19.0",
    "torch==2.13.0",
    "accelerate==1.15.0",
    "datasets==5.2.0",
)
NUM_PROMPTS = 20_000
PROMPT_SEED = 1
SAMPLES_PER_STEP = 64
WARM_UP_STEPS = 5
GOAL_REWARD = 0.9
MEMORY_PERIOD_S = 0.5
PSS_EVERY = 30
POLL_PERIOD_S = 0.02
RUN_LIMIT_S = 1800
WARM_3M = "warm-3m"


@dataclass
class Step:
    """What one side said about one step, and when.

    Attributes:
        reward: mean reward of the step's samples.
        gen_tokens: tokens generated in the step.
        all_tokens: prompt and response tokens of the step.
        generation_s: seconds the side spent in its generation phase.
        seen_at_s: seconds since the side's process was started.
        cpu_s: processor seconds that the side's processes had used by then.
    """

    reward: float
    gen_tokens: float
    all_tokens: float
    generation_s: float
    seen_at_s: float = 0.0
    cpu_s: float = 0.0


@dataclass
class Run:
    """One side's run.

    Attributes:
        steps: in order.
        peak_rss_mb: largest sum of resident memory over the process tree; pages that processes share
            count once for each.
        peak_pss_mb: the same with shared pages divided among their users.
    """

    steps: list[Step] = field(default_factory=list)
    peak_rss_mb: float = 0.0
    peak_pss_mb: float = 0.0

    @property
    def step_seconds(self) -> list[float]:
        """Seconds from one step's end to the next, without the warm-up."""
        return differences([step.seen_at_s for step in self.steps[WARM_UP_STEPS - 1 :]])

    @property
    def step_cpu_seconds(self) -> list[float]:
        """Processor seconds from one step's end to the next, without the warm-up."""
        return differences([step.cpu_s for step in self.steps[WARM_UP_STEPS - 1 :]])

    @property
    def measured(self) -> list[Step]:
        """The steps that `step_seconds` covers."""
        return self.steps[WARM_UP_STEPS:]

    def seconds_to_reward(self, goal: float) -> float | None:
        """Seconds from process start to the first step whose mean reward reaches `goal`."""
        return next((step.seen_at_s for step in self.steps if step.reward >= goal), None)


def differences(values: list[float]) -> list[float]:
    """Each value less the one before."""
    return [later - earlier for earlier, later in zip(values, values[1:], strict=False)]


def tree_of(root: int) -> list[int]:
    """Process ids of `root` and all that descend from it."""
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
    """Sum of the resident memory of some processes; those that have ended count as nothing."""
    pages = 0
    for pid in pids:
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except OSError:
            continue
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def pss_mb(pids: list[int]) -> float:
    """Sum of the proportional memory of some processes; dear, the kernel walks all their pages."""
    kilobytes = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        kilobytes += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kilobytes / 1024


def cpu_seconds(pids: list[int]) -> float:
    """Processor time of some processes and of their children that have ended."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(int(value) for value in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def run_side(
    command: list[str], metrics: Path, read: Callable[[Iterator[str]], Iterator[Step]], log: Path, threads: int
) -> Run:
    """Start one side, watch it to its end, and report.

    Args:
        command: what to start.
        metrics: the JSONL file it writes.
        read: turns the file's lines, as they come, into steps.
        log: where its output goes.
        threads: processors it may use.

    Raises:
        SystemExit: it failed or took longer than `RUN_LIMIT_S`.
    """
    run = Run()
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
    """Lines of a file as they are written, until the process has ended."""
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


def watch_memory(process: subprocess.Popen[bytes], run: Run) -> None:
    """Sample the tree's memory until the process ends."""
    num_samples = 0
    while process.poll() is None:
        pids = tree_of(process.pid)
        run.peak_rss_mb = max(run.peak_rss_mb, rss_mb(pids))
        if num_samples % PSS_EVERY == 0:
            run.peak_pss_mb = max(run.peak_pss_mb, pss_mb(pids))
        num_samples += 1
        time.sleep(MEMORY_PERIOD_S)


def read_own(lines: Iterator[str]) -> Iterator[Step]:
    """Steps from this library's metrics.jsonl: a step is over with its `timing/train` line."""
    reward, gen_tokens, all_tokens = 0.0, 0.0, 0.0
    for line in lines:
        row = json.loads(line)
        values = row["metrics"]
        if row["prefix"] == "train":
            reward = values["reward"]
            gen_tokens = values["mean_gen_tokens_per_sample"] * SAMPLES_PER_STEP
            all_tokens = values["total_num_tokens"]
        elif row["prefix"] == "timing/train":
            yield Step(reward, gen_tokens, all_tokens, values["generation"])


def read_trl(lines: Iterator[str]) -> Iterator[Step]:
    """Steps from the file that `trl_grpo.py` writes."""
    tokens_before = 0.0
    for line in lines:
        row = json.loads(line)
        all_tokens = row["num_tokens_so_far"] - tokens_before
        tokens_before = row["num_tokens_so_far"]
        yield Step(row["reward"], row["mean_gen_tokens"] * SAMPLES_PER_STEP, all_tokens, row["generation_s"])


def run_own(model: Path, folder: Path, arguments: argparse.Namespace) -> Run:
    """This library, without what the other side does not do either: validation, checkpoints, trackers."""
    overrides = {
        "policy.model_name": model,
        "policy.generation.max_new_tokens": 64,
        "policy.optimizer.kwargs.lr": 1e-4,
        "policy.optimizer.kwargs.weight_decay": 0.0,
        "policy.max_grad_norm": 1.0,
        "grpo.num_prompts_per_step": 8,
        "grpo.num_generations_per_prompt": 8,
        "grpo.use_leave_one_out_baseline": "false",
        "grpo.max_num_steps": arguments.steps,
        "grpo.seed": arguments.seed,
        "grpo.val_period": 0,
        "grpo.val_at_start": "false",
        "data.train.num_samples": NUM_PROMPTS,
        "data.train.seed": PROMPT_SEED,
        "checkpointing.enabled": "false",
        "logger.log_dir": folder / "logs",
        "logger.tensorboard_enabled": "false",
        "logger.save_trajectories": "false",
        "cluster.threads_per_rank": arguments.threads,
    }
    command = [sys.executable, "examples/run_grpo.py", "--config", "examples/configs/grpo_math_cpu.yaml"]
    command += [f"{key}={value}" for key, value in overrides.items()]
    metrics = folder / "logs" / "exp_001" / "metrics.jsonl"
    return run_side(command, metrics, read_own, folder / "own.log", arguments.threads)


def run_trl(model: Path, folder: Path, arguments: argparse.Namespace) -> Run:
    """TRL with the settings of `trl_grpo.py`."""
    metrics = folder / "trl.jsonl"
    command = [str(trl_python()), "tools/benchmarks/trl_grpo.py", "--model", str(model)]
    command += ["--prompts", str(write_prompts()), "--metrics", str(metrics), "--generation", arguments.trl_generation]
    command += ["--steps", str(arguments.steps), "--threads", str(arguments.threads), "--seed", str(arguments.seed)]
    return run_side(command, metrics, read_trl, folder / "trl.log", arguments.threads)


def trl_python() -> Path:
    """The Python of TRL's environment, which is made on first use."""
    environment = BENCH / TRL_PACKAGES[0].replace("==", "-")
    python = environment / "bin" / "python"
    marker = environment / "installed.txt"
    if not marker.exists() or marker.read_text().split() != list(TRL_PACKAGES):
        logger.info("Installing %s into %s ...", TRL_PACKAGES[0], environment)
        subprocess.run(["uv", "venv", "--quiet", "--clear", "--python", "3.12", str(environment)], check=True)
        install = ["uv", "pip", "install", "--quiet", "--compile-bytecode", "--python", str(python)]
        subprocess.run([*install, *TRL_PACKAGES], check=True)
        marker.write_text("\n".join(TRL_PACKAGES))
    return python


def write_prompts() -> Path:
    """The arithmetic data set's training rows as JSONL, for the side that cannot import it."""
    from nemo_rl.data.datasets.arithmetic import ArithmeticDataset

    rows = ArithmeticDataset(num_samples=NUM_PROMPTS, seed=PROMPT_SEED).dataset
    path = BENCH / "prompts.jsonl"
    wanted = ({"problem": rows[i]["problem"], "answer": rows[i]["answer"]} for i in range(len(rows)))
    path.write_text("".join(json.dumps(row) + "\n" for row in wanted), encoding="utf-8")
    return path


def find_model(name: str) -> Path:
    """The folder of a model; the warm one of 3 million parameters is trained on first use.

    Raises:
        SystemExit: no such model.
    """
    if name == "tiny-chat":
        return ROOT / "examples" / "assets" / "tiny-chat"
    if name != WARM_3M:
        raise SystemExit(f"--models: {name!r} is neither tiny-chat nor {WARM_3M}.")
    folder = BENCH / WARM_3M
    if not (folder / "model.safetensors").exists():
        logger.info("Warming a model of 3 million parameters ...")
        make_warm_model(folder)
    return folder


def make_warm_model(folder: Path) -> None:
    """Train a wider model with the recipe of tiny-chat."""
    sys.path.insert(0, str(ROOT / "tools"))
    from make_tiny_chat_model import Recipe, train

    from nemo_rl.models.huggingface.tiny import TinyShape, make_char_tokenizer, make_tiny_model, save_tiny_checkpoint

    shape = TinyShape(hidden_size=256, intermediate_size=768, num_heads=8, num_kv_heads=4)
    tokenizer, model = make_char_tokenizer(), make_tiny_model("qwen2", shape)
    train(model, tokenizer, Recipe(clean_steps=200, mixed_steps=100))
    save_tiny_checkpoint(folder, model.bfloat16(), tokenizer)


FIGURES: dict[str, Callable[[Run], float | None]] = {
    "seconds per step, median": lambda run: statistics.median(run.step_seconds),
    "processor seconds per step, median": lambda run: statistics.median(run.step_cpu_seconds),
    "generated tokens/s while generating": lambda run: tokens_per_second(run, generated=True),
    "trained tokens/s in the rest of the step": lambda run: tokens_per_second(run, generated=False),
    "peak memory, sum of RSS, MB": lambda run: run.peak_rss_mb,
    "peak memory, sum of PSS, MB": lambda run: run.peak_pss_mb,
    "seconds to the end of the first step": lambda run: run.steps[0].seen_at_s,
    f"seconds to a mean reward of {GOAL_REWARD}": lambda run: run.seconds_to_reward(GOAL_REWARD),
    "seconds to the end of the last step": lambda run: run.steps[-1].seen_at_s,
    "mean reward, first 5 steps": lambda run: mean_reward(run.steps[:5]),
    "mean reward, last 10 steps": lambda run: mean_reward(run.steps[-10:]),
    "mean tokens of a response": lambda run: mean_length(run),
}


def table(name: str, own: Run, trl: Run) -> str:
    """The comparison as Markdown; ratios are ours over TRL's."""
    lines = [f"### {name}, {len(own.steps)} and {len(trl.steps)} steps", ""]
    lines += ["| | nemo_rl | TRL | ratio |", "|---|---:|---:|---:|"]
    for label, figure in FIGURES.items():
        ours, theirs = figure(own), figure(trl)
        lines.append(f"| {label} | {show(ours)} | {show(theirs)} | {ratio(ours, theirs)} |")
    return "\n".join(lines)


def tokens_per_second(run: Run, *, generated: bool) -> float:
    """Median over steps of tokens by the seconds of the phase that handled them."""
    rates = []
    for step, seconds in zip(run.measured, run.step_seconds, strict=True):
        rest = max(seconds - step.generation_s, 1e-6)
        rates.append(step.gen_tokens / step.generation_s if generated else step.all_tokens / rest)
    return statistics.median(rates)


def mean_reward(steps: list[Step]) -> float:
    """Mean over some steps."""
    return statistics.mean(step.reward for step in steps)


def mean_length(run: Run) -> float:
    """Mean response length over the measured steps, in tokens."""
    return statistics.mean(step.gen_tokens for step in run.measured) / SAMPLES_PER_STEP


def show(value: float | None) -> str:
    """A figure with three significant digits."""
    if value is None:
        return "not reached"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def ratio(ours: float | None, theirs: float | None) -> str:
    """Ours over TRL's."""
    return "" if ours is None or theirs is None else f"{ours / theirs:.2f}"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["tiny-chat"], help=f"tiny-chat, {WARM_3M}")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--threads", type=int, default=2, help="processors and OpenMP threads of each side")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument(
        "--trl-generation", choices=("generate", "continuous"), default="generate", help="how TRL generates"
    )
    return parser.parse_args()


def main() -> None:
    """Run both sides for each model and print the tables."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    arguments = parse_arguments()
    BENCH.mkdir(exist_ok=True)
    (BENCH / ".gitignore").write_text("*\n")
    trl_python()
    for name in arguments.models:
        model = find_model(name)
        folder = BENCH / "runs" / f"{name}-{int(time.time())}"
        folder.mkdir(parents=True)
        logger.info("%s: load average before the start %.1f %.1f %.1f", name, *os.getloadavg())
        logger.info("%s: nemo_rl, %d steps ...", name, arguments.steps)
        own = run_own(model, folder, arguments)
        logger.info("%s: TRL, %d steps ...", name, arguments.steps)
        trl = run_trl(model, folder, arguments)
        print(table(name, own, trl) + "\n")


if __name__ == "__main__":
    main()
