"""Samples that runs trained on, from the logs of their steps."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from example_runs import ExampleRun, of_training, read_metrics

Sample = tuple[int, int, tuple[int, ...]]


def trained(*runs: ExampleRun) -> list[dict[str, Any]]:
    """Return the samples of each step, from the newest run that trained on it."""
    steps: dict[str, Path] = {}
    for run in runs:
        steps |= {path.name: path for path in run.log_dir.glob("exp_*/train_data_step*.jsonl")}
    return [json.loads(line) for path in steps.values() for line in path.read_text().splitlines()]


def sequences(samples: list[dict[str, Any]]) -> Counter[Sample]:
    """Count row of the data, place in the group and tokens of each sample."""
    return Counter((sample["idx"], sample["sample"], tuple(sample["token_ids"])) for sample in samples)


def resumed_tokens(run: ExampleRun) -> tuple[float, float]:
    """Return the continued and restarted tokens of a run."""
    metrics = of_training(read_metrics(run.log_dir))
    names = "num_continued_tokens", "num_restarted_tokens"
    continued, restarted = (sum(value for key, value in metrics.items() if key[2] == name) for name in names)
    return continued, restarted
