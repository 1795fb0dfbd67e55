"""Write the two parts of generated rows: one to train on, and one to validate with."""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

SIZES = {"train": 4000, "validation": 200}


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write a file with a JSON object in each line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_parts(
    make_rows: Callable[[int, int, int], list[dict[str, Any]]], arguments: Sequence[str] | None = None
) -> None:
    """Write `train.jsonl` and `validation.jsonl` into the folder that the command line names.

    Args:
        make_rows: takes a number of rows, the number of a part and a seed; returns rows that share no topics with those
            of another part.
        arguments: of the command line; None takes those of the process.
    """
    parser = argparse.ArgumentParser(description="Write rows to train on, and rows to validate with.")
    parser.add_argument("folder", type=Path, help="folder of the files; made if it does not exist")
    folder = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    for part, (name, num_rows) in enumerate(SIZES.items()):
        write_rows(folder / f"{name}.jsonl", make_rows(num_rows, part, part))
