r"""Write the questions and worked answers of GSM8K as rows for SFT.

uv run --extra cpu python examples/use_cases/gsm8k.py FOLDER [--source FOLDER]

FOLDER/train.jsonl       {"input": "Natalia sold clips to 48 of her friends ...", "output": "... The answer is 72."}
FOLDER/validation.jsonl  128 questions of the test part

The rows come from the hub, or from the files train.jsonl and test.jsonl of --source, which have the same columns.
"""

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from datasets import load_dataset
from parts import write_rows

NUM_VALIDATION = 128


def worked(answer: str) -> str:
    """Return an answer without the marks of a calculator (`<<48/2=24>>`), with its result (`#### 72`) in a sentence."""
    text, result = re.sub(r"<<.*?>>", "", answer).split("####")
    return f"{text.strip()}\nThe answer is {result.strip()}."


def read(part: str, source: Path | None) -> Iterable[dict[str, str]]:
    """Return the rows of a part, with `question` and `answer`."""
    if source is None:
        return load_dataset("openai/gsm8k", "main", split=part)
    return map(json.loads, (source / f"{part}.jsonl").read_text(encoding="utf-8").splitlines())


def main(arguments: Sequence[str] | None = None) -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the files; made if it does not exist")
    parser.add_argument("--source", type=Path, help="folder of train.jsonl and test.jsonl, in place of the hub")
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, part, num_rows in (("train", "train", None), ("validation", "test", NUM_VALIDATION)):
        rows = [{"input": row["question"], "output": worked(row["answer"])} for row in read(part, given.source)]
        write_rows(given.folder / f"{name}.jsonl", rows[:num_rows])


if __name__ == "__main__":
    main()
