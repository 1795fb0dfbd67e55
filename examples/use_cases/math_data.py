r"""Write sums as questions with known answers, in a file to train on and one to evaluate with.

uv run --extra cpu python examples/use_cases/math_data.py FOLDER

FOLDER/train.jsonl  {"question": "37+85=", "answer": "122"}
FOLDER/test.jsonl   the same, of sums that are not in the other file
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

NUM_TEST = 128
NUMBERS = range(10, 100)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the files; made if it does not exist")
    folder = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    sums = [{"question": f"{left}+{right}=", "answer": str(left + right)} for left in NUMBERS for right in NUMBERS]
    random.Random(0).shuffle(sums)
    for name, rows in {"test": sums[:NUM_TEST], "train": sums[NUM_TEST:]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
