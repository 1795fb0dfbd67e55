"""Show how Muon and AdamW learn the sums of `sft_cpu.yaml`: validation loss by step and by second.

    uv run --extra cpu python tools/benchmarks/muon_learning.py [--size 3m] [--steps 60] [--seeds 1 2 3]

Each run trains a model from random weights, and validates every 20 steps; both depend on the seed. The optimizers run
in turns. A Markdown table has the mean over the seeds and the range, for each learning rate. Finished runs are kept in
the file `--results`, so that a long measurement can be done in pieces. Linux only.
"""

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from side_by_side import BENCH, ROOT, Run, Step, run_side
from workloads import SIZES, TINY_CHAT

logger = logging.getLogger("muon_learning")

RATES = {"AdamW": (1e-3, 2e-3, 4e-3), "Muon": (1e-3, 2e-3, 4e-3)}
PERIOD = 20


@dataclass
class Losses(Step):
    """One training step or validation.

    Attributes:
        kind: `train` or `validation`.
        step: training steps before it, for a validation, or up to it.
        loss: loss per trained token.
    """

    kind: str
    step: int
    loss: float


def read_losses(lines: Iterator[str]) -> Iterator[Losses]:
    """Yield training steps and validations in metrics.jsonl."""
    for line in lines:
        row = json.loads(line)
        name = {"train": "loss", "validation": "val_loss"}.get(row["prefix"])
        if name is not None:
            yield Losses(row["prefix"], row["step"], row["metrics"][name])


def model_of(size: str, seed: int) -> Path:
    """Return the folder of a random model with the tokenizer of tiny-chat; make it if necessary."""
    from tiny_models import make_tiny_model, save_tiny_checkpoint
    from transformers import AutoTokenizer

    folder = BENCH / f"random-{size}-{seed}"
    if not (folder / "model.safetensors").exists():
        model = make_tiny_model("qwen2", SIZES[size], seed=seed)
        save_tiny_checkpoint(folder, model, AutoTokenizer.from_pretrained(TINY_CHAT))
    return folder


def optimizer_overrides(optimizer: str, rate: float) -> list[str]:
    """Return the settings of an optimizer. Muon's rate is that of AdamW, whose updates are as large."""
    own = [f"policy.optimizer.kwargs.lr={rate}", "policy.optimizer.kwargs.weight_decay=0.01"]
    if optimizer == "AdamW":
        return [*own, "policy.optimizer.kwargs.betas=[0.9,0.95]", "policy.optimizer.kwargs.eps=1e-8"]
    own += ["policy.optimizer.name=torch.optim.Muon", "+policy.optimizer.kwargs.adjust_lr_fn=match_rms_adamw"]
    own += ["+policy.optimizer.kwargs.adamw={betas: [0.9, 0.95]}"]
    return [*own, "~policy.optimizer.kwargs.betas", "~policy.optimizer.kwargs.eps"]


def measure(optimizer: str, rate: float, seed: int, arguments: argparse.Namespace) -> list[Losses]:
    """Run an optimizer and return its losses."""
    folder = BENCH / "runs" / f"{optimizer}-{rate}-{seed}-{int(time.time())}"
    folder.mkdir(parents=True)
    command = [sys.executable, "examples/run_sft.py", "--config", str(ROOT / "examples/configs/sft_cpu.yaml")]
    command += [f"policy.model_name={model_of(arguments.size, seed)}", f"sft.seed={seed}"]
    command += [f"sft.max_num_steps={arguments.steps}", f"sft.val_period={PERIOD}", "sft.val_at_start=true"]
    command += [f"policy.train_{kind}_batch_size={arguments.rows}" for kind in ("global", "micro")]
    command += ["checkpointing.enabled=false", f"logger.log_dir={folder / 'logs'}", "logger.tensorboard_enabled=false"]
    command += [f"cluster.threads_per_rank={arguments.threads}", *optimizer_overrides(optimizer, rate)]
    metrics = folder / "logs" / "exp_001" / "metrics.jsonl"
    run: Run[Losses] = run_side(command, metrics, read_losses, folder / "run.log", arguments.threads)
    shown = ", ".join(f"{each.step}: {each.loss:.3f}" for each in run.steps if each.kind == "validation")
    logger.info("%s, lr %g, seed %d: %s", optimizer, rate, seed, shown)
    return run.steps


def table(results: dict[tuple[str, float], list[list[Losses]]]) -> str:
    """Format mean and range of validation losses, and medians of the seconds and processor seconds of a step."""
    lines: list[str] = []
    for (optimizer, rate), runs in sorted(results.items()):
        validated = [{each.step: each.loss for each in run if each.kind == "validation"} for run in runs]
        if not lines:
            steps = list(validated[0])
            heads = [*(f"step {step}" for step in steps), "seconds a step", "processor seconds a step"]
            lines += [f"| optimizer | lr | seeds | {' | '.join(heads)} |", f"|---|---:|---:|{'---:|' * len(heads)}"]
        cells = []
        for step in validated[0]:
            losses = [losses[step] for losses in validated]
            cells.append(f"{statistics.mean(losses):.3f} [{min(losses):.3f}, {max(losses):.3f}]")
        pairs = [pair for run in runs for pair in _trained_in_turn(run)]
        cells.append(f"{statistics.median(later.seen_at_s - earlier.seen_at_s for earlier, later in pairs):.2f}")
        cells.append(f"{statistics.median(later.cpu_s - earlier.cpu_s for earlier, later in pairs):.2f}")
        lines.append(f"| {optimizer} | {rate:g} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _trained_in_turn(run: list[Losses]) -> Iterator[tuple[Losses, Losses]]:
    """Yield each pair of training steps without a validation in between, after the warm-up."""
    for earlier, later in zip(run, run[1:], strict=False):
        if earlier.kind == later.kind == "train" and earlier.step > Run().warm_up_steps:
            yield earlier, later


def load_results(path: Path, size: str) -> dict[tuple[str, float], list[list[Losses]]]:
    """Load stored runs of models of a size by optimizer and learning rate."""
    found: dict[tuple[str, float], list[list[Losses]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        row = json.loads(line)
        if row["size"] == size:
            found.setdefault((row["optimizer"], row["rate"]), []).append([Losses(**step) for step in row["run"]])
    return found


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", default="3m", choices=list(SIZES), help="parameters of the model")
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("--rows", type=int, default=32, help="of each step")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3], help="of the runs; none: only print")
    parser.add_argument("--optimizers", nargs="+", default=list(RATES), choices=list(RATES))
    parser.add_argument("--rates", type=float, nargs="+", help="learning rates of all optimizers")
    parser.add_argument("--threads", type=int, default=2, help="processors and OpenMP threads")
    parser.add_argument("--results", type=Path, default=BENCH / "muon.jsonl", help="file for finished runs")
    return parser.parse_args(arguments)


def main() -> None:
    """Run the optimizers in turns, and print the table of all stored runs."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    arguments = parse_arguments()
    BENCH.mkdir(exist_ok=True)
    (BENCH / ".gitignore").write_text("*\n")
    for seed in arguments.seeds:
        for optimizer in arguments.optimizers:
            for rate in arguments.rates or RATES[optimizer]:
                run = [asdict(step) for step in measure(optimizer, rate, seed, arguments)]
                row = {"size": arguments.size, "optimizer": optimizer, "rate": rate, "run": run}
                with arguments.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    print(table(load_results(arguments.results, arguments.size)))


if __name__ == "__main__":
    main()
