r"""Make pairs for DPO of a model's own answers: a right answer is preferred to a wrong answer to the same prompt.

uv run --extra cpu python examples/use_cases/own_answers.py EVALUATION ROWS FILE

EVALUATION  folder of an evaluation (`eval.save_path`) with several answers to each prompt
ROWS        the file of the evaluation's prompts (`data.data_path`), without `data.max_samples`
FILE        {"prompt": "Name one of the jobs. Answer with one word.", "chosen": "doctor", "rejected": "A doctor is ..."}
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from parts import write_rows

Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    """Return the rows of a file with a JSON object in each line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def pairs(answers: Iterable[Row], prompts: Sequence[str]) -> Iterable[dict[str, str]]:
    """Yield pairs of answers to the same prompt, each answer in at most one pair.

    An answer that reached the limit of tokens is in no pair: it has no end, and DPO would teach the model one.

    Args:
        answers: records of the evaluation.
        prompts: by the index of a record.
    """
    graded: dict[int, dict[bool, list[str]]] = defaultdict(lambda: {True: [], False: []})
    for answer in answers:
        if prompts[answer["idx"]] not in answer["prompt"]:
            raise SystemExit(f"The evaluation read other rows: its prompt {answer['idx']} is {answer['prompt']!r}.")
        if answer["outcome"] == "finished":
            graded[answer["idx"]][answer["reward"] >= 1.0].append(answer["response"])
    for index, texts in graded.items():
        for chosen, rejected in zip(texts[True], texts[False], strict=False):
            yield {"prompt": prompts[index], "chosen": chosen, "rejected": rejected}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("evaluation", "rows", "file"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args(arguments)
    answers = read(given.evaluation / "evaluation_data.jsonl")
    found = list(pairs(answers, [row["prompt"] for row in read(given.rows)]))
    given.file.parent.mkdir(parents=True, exist_ok=True)
    write_rows(given.file, found)
    print(f"{given.file}: {len(found)} pairs of {len(answers)} answers")


if __name__ == "__main__":
    main()
