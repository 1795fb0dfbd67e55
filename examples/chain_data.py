r"""Write chats for SFT, pairs for DPO and labelled answers for KTO, about sums that are not in the evaluation.

uv run --extra cpu python examples/chain_data.py FOLDER

FOLDER/chats.jsonl   {"messages": [{"role": "user", "content": "37+85="}, {"role": "assistant", ...}]}
FOLDER/pairs.jsonl   {"prompt": "37+85=", "chosen": "7+5=12, 3+8+1=12, \\boxed{122}", "rejected": "7+5=12, 3+8=11, ..."}
FOLDER/answers.jsonl {"prompt": "37+85=", "completion": "7+5=12, 3+8=11, \\boxed{112}", "label": false}
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nemo_rl.data.datasets.arithmetic import ArithmeticDataset

NUM_CHATS = 4000
NUM_PAIRS = 2000
NUM_ANSWERS = 2000


def worked(left: int, right: int, carry_slip: bool = False) -> str:
    """Write a sum out, right or with the carry forgotten (or invented).

    Args:
        left: first number, two digits.
        right: second number, two digits.
        carry_slip: make a mistake with the carry.
    """
    units = left % 10 + right % 10
    carry = bool(units >= 10) != carry_slip
    tens = left // 10 + right // 10 + carry
    carried = "+1" if carry else ""
    steps = f"{left % 10}+{right % 10}={units}, {left // 10}+{right // 10}{carried}={tens}"
    return f"{steps}, \\boxed{{{10 * tens + units % 10}}}"


def chats(num_rows: int) -> Iterable[dict[str, Any]]:
    """Yield questions with worked answers."""
    for question, left, right in questions(num_rows, seed=11):
        answer = {"role": "assistant", "content": worked(left, right)}
        yield {"messages": [{"role": "user", "content": question}, answer]}


def pairs(num_rows: int) -> Iterable[dict[str, str]]:
    """Yield questions with a right answer and one with a mistake."""
    for question, left, right in questions(num_rows, seed=12):
        yield {"prompt": question, "chosen": worked(left, right), "rejected": worked(left, right, carry_slip=True)}


def labelled_answers(num_rows: int) -> Iterable[dict[str, Any]]:
    """Yield questions with one answer each, alternately right and with a mistake, and whether it is right."""
    for number, (question, left, right) in enumerate(questions(num_rows, seed=13)):
        is_right = number % 2 == 0
        yield {"prompt": question, "completion": worked(left, right, carry_slip=not is_right), "label": is_right}


def questions(num_rows: int, seed: int) -> Iterable[tuple[str, int, int]]:
    """Yield sums of the training split of the `arithmetic` data set, with their two numbers."""
    for row in ArithmeticDataset("train", num_rows, seed=seed).dataset:
        left, right = row["problem"].rstrip("=").split("+")
        yield row["problem"], int(left), int(right)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the files; made if it does not exist")
    folder = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    files = {"chats": chats(NUM_CHATS), "pairs": pairs(NUM_PAIRS), "answers": labelled_answers(NUM_ANSWERS)}
    for name, rows in files.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
