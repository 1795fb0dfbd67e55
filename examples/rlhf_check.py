"""Compare answers before and after RLHF by the true preference; the exit status is 1 unless those after it win.

    uv run --extra cpu python examples/rlhf_check.py results/rlhf/grpo/logs

The answers are those of the first and the last validation, to sums that no stage was trained on.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_data import preference

Answers = dict[tuple[int, int], tuple[str, str]]


def validations(folder: Path) -> list[Path]:
    """Return the files of answers of the newest run in a `logger.log_dir`, in the order of their steps."""
    files = [file for run in sorted(folder.glob("exp_*"))[-1:] for file in run.glob("val_data_step*.jsonl")]
    return sorted(files, key=lambda file: int(re.findall(r"\d+", file.stem)[-1]))


def answers_in(file: Path) -> Answers:
    """Return question and answer by row and sample."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {(row["idx"], row["sample"]): _question_and_answer(row["content"]) for row in rows}


def _question_and_answer(content: list[dict[str, str]]) -> tuple[str, str]:
    found = re.search(r"\d+(\+\d+)+=", content[0]["content"])
    assert found is not None, content
    return found[0], content[-1]["content"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print points and win rate; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="logger.log_dir of the GRPO run")
    files = validations(parser.parse_args(arguments).folder)
    if len(files) < 2:
        sys.stderr.write("There are fewer than two validations with answers (logger.save_trajectories).\n")
        return 1
    before, after = answers_in(files[0]), answers_in(files[-1])
    points = [{key: preference(*pair) for key, pair in answers.items()} for answers in (before, after)]
    means = [sum(each.values()) / len(each) for each in points]
    wins = [(points[1][key] > points[0][key]) + (points[1][key] == points[0][key]) / 2 for key in points[0]]
    rate = sum(wins) / len(wins)
    print(f"    {'points of 3 by the true preference':34} {means[0]:8.4f} -> {means[1]:8.4f}")
    verdict = "ok" if rate > 0.5 else "should: rise"
    verdict = "ok" if rate > 0.5 else "should: rise"
    print(f"    {'preferred to the answers before':34} {0.5:8.4f} -> {rate:8.4f}   {verdict}")
    return 0 if rate > 0.5 else 1


if __name__ == "__main__":
    sys.exit(main())
