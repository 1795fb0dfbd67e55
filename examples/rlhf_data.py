r"""Write chats and ranked pairs for RLHF, whose true preference is a function, so that the outcome can be checked.

uv run --extra cpu python examples/rlhf_data.py FOLDER

The readers of this example prefer answers that show their work, and right ones: `preference` gives 2 points for a sum
that is written out and 1 point for the right result. The chats answer in both styles, as found on the web; the pairs
compare two answers by the points. The reward model sees the pairs only, never the points.

FOLDER/chats.jsonl  {"messages": [{"role": "user", "content": "37+85="}, {"role": "assistant", ...}]}
FOLDER/pairs.jsonl  {"prompt": "37+85=", "chosen": "7+5=12, 3+8+1=12, \\boxed{122}", "rejected": "\\boxed{122}"}
"""

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from chain_data import questions, worked

NUM_CHATS = 4000
NUM_PAIRS = 3000
_RESULT = re.compile(r"\\boxed\{(\d+)\}")
_WORK = re.compile(r"^\d\+\d=\d+, \d\+\d(\+1)?=\d+, ")


def bare(left: int, right: int, slip: bool = False) -> str:
    """Write only the result, right or ten too small."""
    return f"\\boxed{{{left + right - 10 * slip}}}"


def preference(question: str, answer: str) -> int:
    """Return the points that readers give an answer: 2 for its work, 1 for the right result.

    Args:
        question: for example "37+85=".
        answer: text of the answer.
    """
    results = _RESULT.findall(answer)
    is_right = bool(results) and int(results[-1]) == sum(map(int, re.findall(r"\d+", question)))
    return 2 * bool(_WORK.match(answer)) + is_right


def answers(left: int, right: int) -> list[str]:
    """Return an answer of each number of points, from 0 to 3."""
    return [bare(left, right, slip=True), bare(left, right), worked(left, right, carry_slip=True), worked(left, right)]


def chats(num_rows: int) -> Iterable[dict[str, Any]]:
    """Yield questions with right answers, alternately with and without work."""
    for number, (question, left, right) in enumerate(questions(num_rows, seed=21)):
        text = worked(left, right) if number % 2 else bare(left, right)
        yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": text}]}


def pairs(num_rows: int) -> Iterable[dict[str, str]]:
    """Yield questions with a preferred and a rejected answer, all pairs of points in turn."""
    orders = [(high, low) for high in range(4) for low in range(high)]
    for number, (question, left, right) in enumerate(questions(num_rows, seed=22)):
        high, low = orders[number % len(orders)]
        texts = answers(left, right)
        yield {"prompt": question, "chosen": texts[high], "rejected": texts[low]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the files; made if it does not exist")
    folder = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in {"chats": chats(NUM_CHATS), "pairs": pairs(NUM_PAIRS)}.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
