"""Measure where the time of a GRPO step goes: by phase, by process, and inside the processes.

    uv run --extra cpu python tools/benchmarks/where_time_goes.py [--sizes 1m 3m] [--steps 60]
    uv run --extra cpu python tools/benchmarks/where_time_goes.py --workload instructions --sizes 135m

It runs the GRPO run of `grpo_vs_trl` and prints four Markdown tables for each model: processor seconds and memory of
each kind of process at the end of the first step, which includes the start; seconds of the phases of a step (the run's
own timers), and of their matrix products at the speed that this machine reaches; processor seconds and context switches
of each kind of process (from /proc, at the end of each step); and the work of the threads of driver, policy and engine
while they used a processor (py-spy, in a second run, so that it does not disturb the first). Linux only; use an idle
machine.
"""

import argparse
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from grpo_vs_trl import SAMPLES_PER_STEP, STEPS, STEPS_OF_PUBLISHED, own_command
from side_by_side import BENCH, Run, Step, cpu_seconds, differences, pss_mb, run_side, show, tree_of
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from workloads import ALL_SIZES, PUBLISHED, PUBLISHED_FOLDER, WORKLOADS, find_model

logger = logging.getLogger("where_time_goes")

PY_SPY = ("uv", "tool", "run", "py-spy==0.4.1")
SAMPLES_PER_SECOND = 200
PROFILE_S = 12
NO_PHASES = ("total_step_time", "exposed_generation")
"""Timings that contain phases, or repeat one."""
PEAK_SHAPE = (4096, 576, 1536)
"""Rows, inner dimension and columns of the product with which the machine's speed is measured."""
ANSWERS_PER_PROMPT = 8
"""Samples that share a prompt, which is computed once for them."""

KINDS = {
    "policy": re.compile(r"PolicyRank|lm_policy"),
    "engine": re.compile(r"GenerationWorker|vllm_engine"),
    "environment": re.compile(r"EnvironmentActor|grading"),
    "Ray's daemons": re.compile(r"gcs_server|raylet|ray_agents"),
    "fork server": re.compile(r"examples/run_"),
    "Ray's other workers": re.compile(r"ray::|default_worker"),
}
"""Kind of a process -> pattern of its command line; the first match counts."""

PARTS = (
    ("weight sync", re.compile(r"weight_sync|load_tensors|weight_update|weight_bucket|receive_bucket|sync_probe")),
    ("model: forward", re.compile(r"_model_forward|/model_executor/|modeling_|/dtensor/causal_lm")),
    ("model: backward", re.compile(r"backward|autograd")),
    ("optimizer", re.compile(r"/optim/|optimizer|clip_grad")),
    ("log-probs and loss", re.compile(r"parallel_logprobs|/losses/")),
    ("sampling", re.compile(r"sampler|/sample/|sampling")),
    ("scheduling", re.compile(r"/sched/|scheduler")),
    ("inputs of the model", re.compile(r"prepare_inputs|model_runner|input_batch|block_table|/worker/")),
    ("outputs, detokenizing", re.compile(r"output_processor|detokenizer|process_outputs|logprobs")),
    ("vLLM, other", re.compile(r"/vllm/")),
    ("rollouts in the driver", re.compile(r"experience/|engine_group|environments/workers/client")),
    ("batches and tensors", re.compile(r"batched_data_dict|rollout/batches|packing/|models/inputs")),
    ("logging", re.compile(r"logger|log_backends|trajectory_log|logging")),
    ("Ray", re.compile(r"/ray/|ray::")),
    ("asyncio", re.compile(r"asyncio")),
)
"""Part of the work -> pattern of a stack's frames; the first pattern that matches any frame counts."""


@dataclass
class Usage:
    """Resources that the processes of one kind have used since they started.

    Attributes:
        cpu_s: processor seconds.
        woken: number of times a thread waited and was woken (voluntary context switches).
        preempted: number of times a thread lost its processor (involuntary context switches).
        pss_mb: memory with shared pages divided among their users; only for the first step, since it takes long.
    """

    cpu_s: float = 0.0
    woken: float = 0.0
    preempted: float = 0.0
    pss_mb: float = 0.0


@dataclass
class PhaseStep(Step):
    """One step: its phases in seconds, its tokens, and the processor use by kind of process at its end."""

    phases: dict[str, float]
    response_tokens: float
    prompt_tokens: float
    """Tokens of the prompts, each counted once."""
    usage: dict[str, Usage] = field(default_factory=dict)


def kind_of(pid: int, root: int) -> str:
    """Return the kind of a process; `root` is the driver."""
    if pid == root:
        return "driver"
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "other"
    return next((kind for kind, pattern in KINDS.items() if pattern.search(title)), "other")


def switches(pid: int) -> tuple[float, float]:
    """Return voluntary and involuntary context switches of all threads of a process."""
    counts = [0.0, 0.0]
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        try:
            lines = status.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(":")
            if name.endswith("voluntary_ctxt_switches"):
                counts[name.startswith("non")] += float(value)
    return counts[0], counts[1]


def usage_now(*, with_memory: bool) -> dict[str, Usage]:
    """Return the processor use by kind of process of the run that this process has started."""
    found: dict[str, Usage] = defaultdict(Usage)
    pids = tree_of(os.getpid())[1:]
    for pid in pids:
        use = found[kind_of(pid, pids[0])]
        woken, preempted = switches(pid)
        use.cpu_s, use.woken, use.preempted = (
            use.cpu_s + cpu_seconds([pid]),
            use.woken + woken,
            use.preempted + preempted,
        )
        if with_memory:
            use.pss_mb += pss_mb([pid])
    return dict(found)


def read_phases(lines: Iterator[str]) -> Iterator[PhaseStep]:
    """Read steps from metrics.jsonl, with the processor use at the moment each step ends."""
    is_first, responses, prompts = True, 0.0, 0.0
    for line in lines:
        row = json.loads(line)
        if row["prefix"] == "train":
            responses = row["metrics"]["mean_gen_tokens_per_sample"] * SAMPLES_PER_STEP
            prompts = (row["metrics"]["total_num_tokens"] - responses) / ANSWERS_PER_PROMPT
        elif row["prefix"] == "timing/train":
            yield PhaseStep(row["metrics"], responses, prompts, usage_now(with_memory=is_first))
            is_first = False


def start_table(run: Run[PhaseStep]) -> list[str]:
    """Format processor seconds until the end of the first step, and memory then, by kind of process."""
    lines = ["| process | processor seconds of the start | PSS, MB |", "|---|---:|---:|"]
    usage = run.steps[0].usage
    for kind, use in sorted(usage.items(), key=lambda item: -item[1].cpu_s):
        lines.append(f"| {kind} | {use.cpu_s:.2f} | {use.pss_mb:.0f} |")
    totals = [sum(getattr(use, name) for use in usage.values()) for name in ("cpu_s", "pss_mb")]
    return [*lines, f"| all | {totals[0]:.2f} | {totals[1]:.0f} |"]


@dataclass(frozen=True)
class Arithmetic:
    """Matrix products of a model, and the speed of this machine.

    Attributes:
        body_weights: elements of the weights that every token is multiplied by.
        head_weights: elements of the output head, which only tokens of responses are multiplied by.
        peak: operations per second that a large product reaches.
    """

    body_weights: int
    head_weights: int
    peak: float

    @classmethod
    def of(cls, model: Path, threads: int) -> "Arithmetic":
        """Count the weights of a model and measure this machine."""
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
        head = built.get_output_embeddings()
        linear = [each for each in built.modules() if isinstance(each, nn.Linear) and each is not head]
        return cls(sum(each.weight.numel() for each in linear), head.weight.numel(), peak_speed(threads))

    def seconds(self, step: PhaseStep, phase: str) -> float | None:
        """Return the seconds of a phase's products at the peak; None if the phase has none. Attention is left out."""
        passes = {"generation": 1, "policy_training": 3}.get(phase)  # a backward pass is two products for each one
        if passes is None:
            return None
        body = self.body_weights * (step.response_tokens + step.prompt_tokens)
        return 2 * passes * (body + self.head_weights * step.response_tokens) / self.peak


def peak_speed(threads: int) -> float:
    """Return the operations per second of a large product in float32, the best of some tries."""
    torch.set_num_threads(threads)
    rows, inner, columns = PEAK_SHAPE
    left, right = torch.randn(rows, inner), torch.randn(inner, columns)
    best = float("inf")
    for _ in range(10):
        started = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - started)
    return 2 * rows * inner * columns / best


def phase_table(run: Run[PhaseStep], arithmetic: Arithmetic) -> list[str]:
    """Format median seconds of each phase and of its matrix products, and of the time outside all phases."""
    rows: dict[str, list[float]] = defaultdict(list)
    for step, seconds in zip(run.measured, run.step_seconds, strict=True):
        phases = {name: value for name, value in step.phases.items() if name not in NO_PHASES}
        for name, value in phases.items():
            rows[name].append(value)
        rows["between the phases"].append(seconds - sum(phases.values()))
    total = statistics.median(run.step_seconds)
    products = f"products at {arithmetic.peak / 1e9:.0f} GFLOP/s"
    lines = [f"| phase | seconds | share | {products}, s | share of the phase |", "|---|---:|---:|---:|---:|"]
    for name, values in sorted(rows.items(), key=lambda row: -statistics.median(row[1])):
        seconds = statistics.median(values)
        ideal = [arithmetic.seconds(step, name) for step in run.measured]
        found = [value for value in ideal if value is not None]
        share = f"{statistics.median(found):.3f} | {statistics.median(found) / seconds:.0%}" if found else "|"
        lines.append(f"| {name} | {seconds:.4f} | {seconds / total:.0%} | {share} |")
    return [*lines, f"| whole step | {total:.4f} | | | |"]


def process_table(run: Run[PhaseStep]) -> list[str]:
    """Format processor seconds and context switches per step, by kind of process."""
    measured = run.steps[run.warm_up_steps - 1 :]
    kinds = sorted({kind for step in measured for kind in step.usage})
    lines = ["| process | processor seconds | woken | preempted |", "|---|---:|---:|---:|"]
    total = [0.0, 0.0, 0.0]
    for kind in kinds:
        uses = [step.usage.get(kind, Usage()) for step in measured]
        values = [
            statistics.median(differences([getattr(use, name) for use in uses]))
            for name in ("cpu_s", "woken", "preempted")
        ]
        total = [whole + value for whole, value in zip(total, values, strict=True)]
        lines.append(f"| {kind} | {values[0]:.3f} | {values[1]:.0f} | {values[2]:.0f} |")
    return [*lines, f"| all | {total[0]:.3f} | {total[1]:.0f} | {total[2]:.0f} |"]


class Profiles:
    """Runs py-spy on driver, policy and engine of a run after the warm-up."""

    def __init__(self, folder: Path, warm_up_steps: int):
        self._folder = folder
        self._warm_up_steps = warm_up_steps
        self._recording: dict[str, subprocess.Popen[bytes]] = {}

    def read(self, lines: Iterator[str]) -> Iterator[PhaseStep]:
        """Read steps like `read_phases`; start recording after the warm-up."""
        for number, step in enumerate(read_phases(lines), start=1):
            if number == self._warm_up_steps:
                threading.Thread(target=self._record, daemon=True).start()
            yield step

    def _record(self) -> None:
        pids = tree_of(os.getpid())[1:]
        for pid in pids:
            kind = kind_of(pid, pids[0])
            if kind in ("driver", "policy", "engine"):
                command = [*PY_SPY, "record", "--pid", str(pid), "--format", "raw", "--output", str(self._file(kind))]
                command += ["--duration", str(PROFILE_S), "--rate", str(SAMPLES_PER_SECOND), "--nonblocking"]
                self._recording[kind] = subprocess.Popen(
                    command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
                )

    def _file(self, kind: str) -> Path:
        return self._folder / f"{kind}.stacks"

    def table(self, step_s: float) -> list[str]:
        """Format processor seconds per step by process and part of the work, from the stacks.

        Args:
            step_s: seconds of a step, to scale the recording to one step.
        """
        lines = ["| process | part | processor seconds | share of the process |", "|---|---|---:|---:|"]
        for kind, process in sorted(self._recording.items()):
            process.wait(60)
            counts = parts_of(self._file(kind))
            whole = sum(counts.values()) or 1
            for part, count in counts.most_common():
                seconds = count / SAMPLES_PER_SECOND / PROFILE_S * step_s
                if count / whole >= 0.01:
                    lines.append(f"| {kind} | {part} | {seconds:.3f} | {count / whole:.0%} |")
        return lines


def parts_of(stacks: Path) -> Counter[str]:
    """Count samples by part of the work in a file of `frame;frame;... count` lines; empty if there is no file."""
    counts: Counter[str] = Counter()
    if not stacks.exists():
        logger.warning("%s: py-spy wrote nothing.", stacks)
        return counts
    for line in stacks.read_text(errors="replace").splitlines():
        stack, _, count = line.rpartition(" ")
        counts[next((part for part, pattern in PARTS if pattern.search(stack)), "other")] += int(count)
    return counts


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workload", default="uniform", choices=list(WORKLOADS), help="as in grpo_vs_trl.py")
    parser.add_argument("--sizes", nargs="+", default=["1m"], choices=ALL_SIZES, help="as in grpo_vs_trl.py")
    parser.add_argument("--published-model", type=Path, default=PUBLISHED_FOLDER, help="as in grpo_vs_trl.py")
    parser.add_argument("--steps", type=int, help="steps of each of the two runs (default: as in grpo_vs_trl.py)")
    parser.add_argument("--threads", type=int, default=2, help="processors and OpenMP threads")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further overrides of the run")
    arguments = parser.parse_args()
    if arguments.steps is None:
        arguments.steps = STEPS_OF_PUBLISHED if PUBLISHED in arguments.sizes else STEPS
    return arguments


def main() -> None:
    """Run each model twice: once timed, once with sampled stacks."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    arguments = parse_arguments()
    BENCH.mkdir(exist_ok=True)
    (BENCH / ".gitignore").write_text("*\n")
    for size in arguments.sizes:
        name = f"{arguments.workload}-{size}"
        folder = BENCH / "runs" / f"parts-{name}-{int(time.time())}"
        logger.info("%s: load average before the start %.1f %.1f %.1f", name, *os.getloadavg())
        runs, warm_up = [], WORKLOADS[arguments.workload].warm_up_steps
        profiles = Profiles(folder, warm_up)
        model = find_model(arguments.workload, size, arguments.published_model)
        arithmetic = Arithmetic.of(model, arguments.threads)
        for part, read in (("timed", read_phases), ("sampled", profiles.read)):
            (folder / part).mkdir(parents=True)
            command, metrics = own_command(arguments.workload, size, folder / part, arguments)
            command += arguments.overrides
            runs.append(run_side(command, metrics, read, folder / f"{part}.log", arguments.threads, warm_up))
        step_s = statistics.median(runs[0].step_seconds)
        print(f"### {name}: {show(step_s)} s a step, first step after {show(runs[0].steps[0].seen_at_s)} s\n")
        phases = phase_table(runs[0], arithmetic)
        for table in (start_table(runs[0]), phases, process_table(runs[0]), profiles.table(step_s)):
            print("\n".join(table) + "\n")


if __name__ == "__main__":
    main()
