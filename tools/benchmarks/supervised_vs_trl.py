"""Measure SFT, DPO and reward-model training here and in TRL, alternately, on the same model and rows.

    uv run python tools/benchmarks/supervised_vs_trl.py [--cases sft_padded dpo] [--repeats 3]
    uv run python tools/benchmarks/supervised_vs_trl.py --size 135m [--published-model FOLDER]

The model has 3 million random parameters, or is the published SmolLM2-135M-Instruct. The program generates the rows,
gives both sides the same token ids, runs them as child processes on the same processors, and prints a Markdown table
for each case. Finished runs are kept in the file `--results`, so that a long measurement can be done in pieces.
Invariant: both sides get the same tokens in the same order, and the table shows the difference of their losses in the
first steps.
"""

import argparse
import json
import logging
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from side_by_side import BENCH, ROOT, WARM_UP_STEPS, Run, Step, prepare, ratio, run_side, show, trl_python
from workloads import PUBLISHED, PUBLISHED_FOLDER, published_model

logger = logging.getLogger("supervised_vs_trl")

SEED = 7
MEDIAN_WORDS = 10
MAX_TOKENS = 400
MIN_TOKENS = 20
LEARNING_RATE = 1e-4
BETA = 0.1
COMPARED_STEPS = 5
SIDES = ("nemo_rl", "TRL")


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        algorithm: sft, dpo or rm: the example script and the trainer.
        packed: pack rows instead of padding them; TRL packs for SFT only.
    """

    algorithm: str
    packed: bool = False


@dataclass(frozen=True)
class Size:
    """How much a run does with a model of a size.

    Attributes:
        rows_per_step: rows of one optimizer update; half as many pairs.
        rows_per_microbatch: rows of a padded microbatch.
        packed_rows_per_step: packed rows of one update of TRL: as many tokens as the unpacked rows.
        steps: updates of a run, unless `--steps` is given.
        warm_up_steps: first steps of a run, which are not measured.
    """

    rows_per_step: int = 64
    rows_per_microbatch: int = 8
    packed_rows_per_step: int = 3
    steps: int = 25
    warm_up_steps: int = WARM_UP_STEPS

    @property
    def tokens_per_microbatch(self) -> int:
        """Most tokens of a padded microbatch, and the size of a packed one."""
        return self.rows_per_microbatch * MAX_TOKENS

    @property
    def tokens_of_pairs(self) -> int:
        """Size of a packed microbatch of pairs: the mean size of TRL's padded microbatches, 2,021 tokens of 8 rows."""
        return self.rows_per_microbatch * MAX_TOKENS * 5 // 8


SIZES = {"3m": Size(), PUBLISHED: Size(16, 4, packed_rows_per_step=1, steps=5, warm_up_steps=1)}
CASES = {
    "sft_padded": Case("sft"),
    "sft_packed": Case("sft", packed=True),
    "dpo": Case("dpo", packed=True),
    "rm": Case("rm", packed=True),
}


@dataclass
class TrainingStep(Step):
    """Report of one side about one step.

    Attributes:
        loss: loss of the step's batch, before the update.
        tokens: real tokens of the batch; padding does not count.
    """

    loss: float
    tokens: float


type TrainingRun = Run[TrainingStep]


def make_words(rng: random.Random) -> list[str]:
    """Return a vocabulary of random words with 2 to 9 letters."""
    letters = "etaoinshrdlucmfwypvbgk"
    return ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(500)]


def make_text(words: list[str], rng: random.Random, median: float) -> str:
    """Return random words; their number is log-normally distributed."""
    count = max(2, round(rng.lognormvariate(0.0, 0.8) * median))
    return " ".join(rng.choices(words, k=count))


def conversation_rows(num_rows: int) -> Iterator[dict[str, Any]]:
    """Yield rows for SFT: a question and an answer, with `MIN_TOKENS` to `MAX_TOKENS` tokens in total."""
    rng = random.Random(SEED)
    words = make_words(rng)
    while num_rows:
        question, answer = make_text(words, rng, MEDIAN_WORDS / 2), make_text(words, rng, MEDIAN_WORDS)
        if not MIN_TOKENS <= len(question) + len(answer) + 40 <= MAX_TOKENS:
            continue
        num_rows -= 1
        yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def pair_rows(num_rows: int) -> Iterator[dict[str, Any]]:
    """Yield rows for DPO and reward models: a question, a preferred answer and another one."""
    rng = random.Random(SEED)
    words = make_words(rng)
    while num_rows:
        question = make_text(words, rng, MEDIAN_WORDS / 2)
        answers = [make_text(words, rng, MEDIAN_WORDS) for _ in range(2)]
        lengths = [len(question) + len(answer) + 40 for answer in answers]
        if not MIN_TOKENS <= min(lengths) <= max(lengths) <= MAX_TOKENS:
            continue
        num_rows -= 1
        yield {"prompt": question, "chosen": answers[0], "rejected": answers[1]}


def find_model(algorithm: str, arguments: argparse.Namespace) -> Path:
    """Return the folder of the model, with a scalar head for reward models; make it if necessary."""
    import torch
    from tiny_models import TinyShape, make_char_tokenizer, make_tiny_model, save_tiny_checkpoint
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    is_published = arguments.size == PUBLISHED
    if is_published and algorithm != "rm":
        return published_model(arguments.published_model)
    folder = BENCH / f"{'published' if is_published else 'random'}-{arguments.size}-{_kind(algorithm)}"
    if (folder / "model.safetensors").exists():
        return folder
    source = published_model(arguments.published_model) if is_published else folder
    if is_published:
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    else:
        shape = TinyShape(hidden_size=256, intermediate_size=768, num_heads=8, num_kv_heads=4)
        save_tiny_checkpoint(folder, make_tiny_model("qwen2", shape), make_char_tokenizer())
    if algorithm == "rm":
        torch.manual_seed(SEED)
        scorer = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1, dtype=torch.float32)
        scorer.save_pretrained(folder)
    return folder


def _kind(algorithm: str) -> str:
    return "scores" if algorithm == "rm" else "text"


def write_rows(algorithm: str, model: Path, num_rows: int) -> tuple[Path, Path]:
    """Write the rows as text for this library and in the format of TRL's trainers; return both paths."""
    text = BENCH / f"{algorithm}-{num_rows}-{model.name}.jsonl"
    for_trl = text.with_suffix(".trl.jsonl")
    make = conversation_rows if algorithm == "sft" else pair_rows
    text.write_text("".join(json.dumps(row) + "\n" for row in make(num_rows)), encoding="utf-8")
    rows = as_messages(text) if algorithm == "dpo" else tokenised(algorithm, model, text)
    for_trl.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return text, for_trl


def tokenised(algorithm: str, model: Path, text: Path) -> Iterator[dict[str, list[int]]]:
    """Yield this library's token ids of the rows, in the columns that SFTTrainer and RewardTrainer read."""
    from nemo_rl.config import RMMasterConfig, SFTMasterConfig, load_config
    from nemo_rl.data.collate_fn import preference_collate_fn, sft_collate_fn
    from nemo_rl.data.datasets.setup import setup_preference_data, setup_sft_data
    from nemo_rl.data.tokenizer import get_tokenizer

    overrides = {**data_overrides(algorithm, text), "policy.model_name": model}
    written = [f"{key}={value}" for key, value in overrides.items()]
    schema = SFTMasterConfig if algorithm == "sft" else RMMasterConfig
    config = load_config(config_file(algorithm), written, schema=schema)
    tokenizer = get_tokenizer(config.policy.tokenizer)
    setup = setup_sft_data if algorithm == "sft" else setup_preference_data
    collate = partial(sft_collate_fn) if algorithm == "sft" else partial(preference_collate_fn, add_loss_mask=True)
    data = setup(tokenizer, config.data).train
    for index in range(len(data)):
        batch = collate([data[index]], tokenizer=tokenizer, make_sequence_length_divisible_by=1)
        lengths = batch["input_lengths"].tolist()
        ids = [row[:length].tolist() for row, length in zip(batch["input_ids"], lengths, strict=True)]
        masks = [row[:length].long().tolist() for row, length in zip(batch["token_mask"], lengths, strict=True)]
        if algorithm == "sft":
            yield {"input_ids": ids[0], "completion_mask": masks[0]}
        else:
            yield {"chosen_ids": ids[0], "rejected_ids": ids[1]}


def as_messages(text: Path) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Yield the pairs as conversations: DPOTrainer accepts no token ids, but the same template gives the same ids."""
    for line in text.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
        yield {key: [{"role": role, "content": row[key]}] for key, role in roles.items()}


def data_overrides(algorithm: str, text: Path) -> dict[str, Any]:
    """Return the keys with which this library reads the rows, with the chat template's tokens only."""
    return {
        "data.train.dataset_name": "openai_format" if algorithm == "sft" else "BinaryPreferenceDataset",
        "data.train.data_path": str(text),
        "data.train.num_samples": "null",
        "data.validation": "null",
        f"{algorithm}.val_period": 0,
        f"{algorithm}.val_at_start": "false",
        f"{algorithm}.val_at_end": "false",
        "data.shuffle": "false",
        "data.add_bos": "false",
        "data.add_eos": "false",
        "policy.max_total_sequence_length": MAX_TOKENS,
    }


def config_file(algorithm: str) -> Path:
    """Return the example configuration of the run."""
    return ROOT / "examples" / "configs" / f"{algorithm}_cpu.yaml"


def own_overrides(case: Case, model: Path, text: Path, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return this library's settings; features that TRL's side does not use are off."""
    units, size = 1 if case.algorithm == "sft" else 2, SIZES[arguments.size]
    tokens = size.tokens_per_microbatch if units == 1 else size.tokens_of_pairs
    return {
        **data_overrides(case.algorithm, text),
        "policy.model_name": model,
        "policy.train_global_batch_size": size.rows_per_step // units,
        "policy.train_micro_batch_size": size.rows_per_microbatch // units,
        "policy.logprob_batch_size": size.rows_per_microbatch,
        "policy.sequence_packing.enabled": str(case.packed).lower(),
        "policy.sequence_packing.train_mb_tokens": tokens,
        "policy.sequence_packing.logprob_mb_tokens": size.tokens_per_microbatch,
        "policy.max_grad_norm": 1.0,
        "policy.precision": arguments.precision,
        "policy.scheduler": "null",
        "policy.optimizer.kwargs.lr": LEARNING_RATE,
        "policy.optimizer.kwargs.weight_decay": 0.0,
        "policy.optimizer.kwargs.betas": "[0.9,0.999]",
        "policy.optimizer.kwargs.eps": 1e-8,
        f"{case.algorithm}.max_num_steps": arguments.steps,
        f"{case.algorithm}.max_num_epochs": 1,
        **({"dpo.reference_policy_kl_penalty": BETA} if case.algorithm == "dpo" else {}),
        "checkpointing.enabled": "false",
        "logger.log_dir": folder / "logs",
        "logger.tensorboard_enabled": "false",
        "cluster.threads_per_rank": arguments.threads,
    }


def run_own(case: Case, folder: Path, arguments: argparse.Namespace) -> TrainingRun:
    """Run this library."""
    model = find_model(case.algorithm, arguments)
    text, _ = write_rows(case.algorithm, model, num_data_rows(case, arguments))
    command = [sys.executable, f"examples/run_{case.algorithm}.py", "--config", str(config_file(case.algorithm))]
    overrides = own_overrides(case, model, text, folder, arguments)
    command += [f"{key}={value}" for key, value in overrides.items()] + arguments.override
    metrics = folder / "logs" / "exp_001" / "metrics.jsonl"
    warm_up = SIZES[arguments.size].warm_up_steps
    return run_side(command, metrics, read_own, folder / "own.log", arguments.threads, warm_up)


def run_trl(case: Case, folder: Path, arguments: argparse.Namespace) -> TrainingRun:
    """Run TRL with the settings of `trl_supervised.py`."""
    model, size = find_model(case.algorithm, arguments), SIZES[arguments.size]
    _, rows = write_rows(case.algorithm, model, num_data_rows(case, arguments))
    metrics = folder / "trl.jsonl"
    command = [str(trl_python()), "tools/benchmarks/trl_supervised.py", "--algorithm", case.algorithm]
    command += ["--model", str(model), "--rows", str(rows), "--metrics", str(metrics)]
    command += ["--steps", str(arguments.steps), "--threads", str(arguments.threads)]
    command += ["--learning-rate", str(LEARNING_RATE), "--beta", str(BETA), "--precision", arguments.precision]
    units = 1 if case.algorithm == "sft" else 2
    if case.packed and case.algorithm == "sft":
        command += ["--packed-tokens", str(size.tokens_per_microbatch), "--microbatch", "1"]
        command += ["--accumulate", str(size.packed_rows_per_step)]
    else:
        command += ["--microbatch", str(size.rows_per_microbatch // units)]
        command += ["--accumulate", str(size.rows_per_step // size.rows_per_microbatch)]
    return run_side(command, metrics, read_trl, folder / "trl.log", arguments.threads, size.warm_up_steps)


def num_data_rows(case: Case, arguments: argparse.Namespace) -> int:
    """Return the rows of one epoch, plus some for TRL's packing, whose steps differ a little in size."""
    units = 1 if case.algorithm == "sft" else 2
    return (arguments.steps + 5) * SIZES[arguments.size].rows_per_step // units


def read_own(lines: Iterator[str]) -> Iterator[TrainingStep]:
    """Read steps from this library's metrics.jsonl: a step ends with its `timing/train` line."""
    loss, tokens = 0.0, 0.0
    for line in lines:
        row = json.loads(line)
        values = row["metrics"]
        if row["prefix"] == "train":
            loss, tokens = values["loss"], values["total_num_tokens"]
        elif row["prefix"] == "timing/train":
            yield TrainingStep(loss, tokens)


def read_trl(lines: Iterator[str]) -> Iterator[TrainingStep]:
    """Read steps from the file that `trl_supervised.py` writes."""
    before = 0.0
    for line in lines:
        row = json.loads(line)
        yield TrainingStep(row["loss"], row["num_tokens_so_far"] - before)
        before = row["num_tokens_so_far"]


def tokens_per_second(run: TrainingRun) -> float:
    """Return the median over the measured steps of real tokens per second; it ignores single delayed steps."""
    return median_rate(run, run.step_seconds)


def tokens_per_cpu_second(run: TrainingRun) -> float:
    """Return the median over the measured steps of real tokens per processor second of all processes."""
    return median_rate(run, run.step_cpu_seconds)


def median_rate(run: TrainingRun, seconds: list[float]) -> float:
    """Return the median over the measured steps of tokens divided by seconds."""
    return statistics.median(step.tokens / taken for step, taken in zip(run.measured, seconds, strict=True))


FIGURES: dict[str, Callable[[TrainingRun], float]] = {
    "trained tokens/s": tokens_per_second,
    "trained tokens per processor second": tokens_per_cpu_second,
    "seconds per step, median": lambda run: statistics.median(run.step_seconds),
    "tokens per step, mean": lambda run: statistics.mean(step.tokens for step in run.measured),
    "peak memory, sum of RSS, MB": lambda run: run.peak_rss_mb,
    "peak memory, sum of PSS, MB": lambda run: run.peak_pss_mb,
    "seconds to the end of the first step": lambda run: run.steps[0].seen_at_s,
    "loss of the first step": lambda run: run.steps[0].loss,
    "loss of the last step": lambda run: run.steps[-1].loss,
}


def table(name: str, own: list[TrainingRun], trl: list[TrainingRun]) -> str:
    """Format medians over the runs of each side as Markdown; ratios are nemo_rl / TRL."""
    lines = [f"### {name}: {len(own)} and {len(trl)} runs of {len(own[0].steps)} steps", ""]
    lines += ["| | nemo_rl | TRL | ratio |", "|---|---:|---:|---:|"]
    for label, figure in FIGURES.items():
        ours, theirs = (statistics.median(map(figure, runs)) for runs in (own, trl))
        lines.append(f"| {label} | {show(ours)} | {show(theirs)} | {ratio(ours, theirs)} |")
    gap = max(
        abs(ours.loss - theirs.loss)
        for ours, theirs in zip(own[0].steps[:COMPARED_STEPS], trl[0].steps[:COMPARED_STEPS], strict=True)
    )
    lines.append(f"| largest difference of the losses of {COMPARED_STEPS} steps | {gap:.1e} | | |")
    return "\n".join(lines)


def load_results(path: Path) -> dict[str, dict[str, list[TrainingRun]]]:
    """Load stored runs by case and side."""
    found: dict[str, dict[str, list[TrainingRun]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        row = json.loads(line)
        steps = [TrainingStep(**step) for step in row["run"].pop("steps")]
        found.setdefault(row["case"], {}).setdefault(row["side"], []).append(Run(steps, **row["run"]))
    return found


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES), help="cases to run")
    parser.add_argument("--size", default="3m", choices=list(SIZES), help="parameters of the model")
    parser.add_argument(
        "--published-model", type=Path, default=PUBLISHED_FOLDER, help=f"folder of the model of the size {PUBLISHED}"
    )
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32", help="of both sides")
    parser.add_argument("--steps", type=int, help="optimizer updates of each run (default: 25, of the large model 5)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side, alternating")
    parser.add_argument("--sides", nargs="*", default=list(SIDES), choices=list(SIDES))
    parser.add_argument("--threads", type=int, default=2, help="processors and OpenMP threads of each side")
    parser.add_argument("--results", type=Path, default=BENCH / "supervised.jsonl", help="file for finished runs")
    parser.add_argument("--override", nargs="*", default=[], help="further key=value of this library's configuration")
    arguments = parser.parse_args()
    if arguments.steps is None:
        arguments.steps = SIZES[arguments.size].steps
    return arguments


def main() -> None:
    """Run the requested cases and print the tables of all stored runs."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    arguments = parse_arguments()
    warm_up = SIZES[arguments.size].warm_up_steps
    if arguments.steps <= warm_up:
        raise SystemExit(f"--steps: {arguments.steps} leaves nothing after {warm_up} steps of warm-up.")
    if arguments.size == PUBLISHED:
        published_model(arguments.published_model)  # refuses a folder without it before anything starts
    prepare()
    runners = {"nemo_rl": run_own, "TRL": run_trl}
    for number in range(arguments.repeats):
        for name in arguments.cases:
            for side in arguments.sides if number % 2 == 0 else reversed(arguments.sides):
                kind = name if arguments.size == "3m" else f"{name}, {arguments.size}, {arguments.precision}"
                folder = BENCH / "runs" / f"{kind.replace(', ', '-')}-{side}-{int(time.time())}"
                folder.mkdir(parents=True)
                logger.info("%s, %s, load average %.1f %.1f %.1f", kind, side, *os.getloadavg())
                run = runners[side](CASES[name], folder, arguments)
                logger.info("%s, %s: %.0f tokens/s", name, side, tokens_per_second(run))
                with arguments.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"case": kind, "side": side, "run": asdict(run)}) + "\n")
    for name, sides in load_results(arguments.results).items():
        if len(sides) == len(SIDES):
            print(table(name, sides["nemo_rl"], sides["TRL"]) + "\n")


if __name__ == "__main__":
    main()
