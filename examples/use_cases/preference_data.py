r"""Write pairs of answers to sums: readers prefer a right one with its work to a guess, and to one with a wrong carry.

uv run --extra cpu python examples/use_cases/preference_data.py FOLDER

FOLDER/pairs.jsonl  {"prompt": "37+85=", "chosen": "7+5=12, 3+8+1=12, \\boxed{122}", "rejected": "\\boxed{118}"}
"""

import argparse
import json
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from chain_data import questions, worked

NUM_PAIRS = 2000
SHARE_OF_GUESSES = 0.7
FARTHEST_GUESS = 9


def pairs(num_rows: int) -> Iterable[dict[str, str]]:
    """Yield pairs; `SHARE_OF_GUESSES` of the rejected answers are guesses, as the model itself writes them."""
    generator = random.Random(0)
    for question, left, right in questions(num_rows, seed=14):
        guess = left + right + generator.choice((-1, 1)) * generator.randint(1, FARTHEST_GUESS)
        is_guess = generator.random() < SHARE_OF_GUESSES
        rejected = f"\\boxed{{{guess}}}" if is_guess else worked(left, right, carry_slip=True)
        yield {"prompt": question, "chosen": worked(left, right), "rejected": rejected}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the file; made if it does not exist")
    folder = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in pairs(NUM_PAIRS))
    (folder / "pairs.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
