"""Try all causal model types of the installed transformers as `nemo_rl doctor --model` does, and store the results.

    python tools/model_trials.py [--types llama,olmo] [--again] [--engines hf,vllm]

One line of JSON per type is stored in `docs/reference/model-support.jsonl`, from which `tools/model_support_table.py`
makes the page. Types that are stored for the installed version of transformers are skipped, so the tool can be stopped
and started again; `--again` tries them again. The exit status is 1 if a trial failed. `tools/megatron_trials.py` does
the same for Megatron Core.
"""

import argparse
import datetime
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers
from model_support_table import TRIALS, stored_trials
from parity.every_type import model_types, tiny_form
from parity.quiet import be_quiet

from nemo_rl.commands.doctor.model import Question
from nemo_rl.commands.doctor.model_cells import Cell, TrialResult
from nemo_rl.utils.errors import ConfigError

_LONGEST_REASON = 300


def tried(model_type: str, engines: Sequence[str] = ()) -> dict[str, Any]:
    """Try a type and return its row for the file."""
    began, cells, reason = time.monotonic(), list[Cell](), ""
    try:
        with tempfile.TemporaryDirectory(prefix="model-trials-") as folder:
            tiny_form(model_type)[1].save_pretrained(folder)
            found = list(Question.of(folder, []).cells(engines, megatron=False))
            cells = [replace(cell, told=cell.told.replace(folder, model_type)) for cell in found]
    except (ValueError, ConfigError) as error:
        reason = str(error)[:_LONGEST_REASON]
    return {
        "model_type": model_type,
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "transformers": transformers.__version__,
        "seconds": round(time.monotonic() - began),
        "not_built": reason,
        "cells": [list(_shown(cell)) for cell in cells],
    }


def _shown(cell: Cell) -> Iterator[Any]:
    yield from (cell.part, cell.what, str(cell.result))
    yield None if cell.difference is None else float(f"{cell.difference:.1e}")
    yield "" if cell.result is TrialResult.RIGHT else cell.told.replace("\n", " ")[:_LONGEST_REASON]


def write(rows: dict[str, dict[str, Any]], file: Path) -> None:
    """Write the results in the order of the types."""
    file.write_text("".join(json.dumps(rows[name]) + "\n" for name in sorted(rows)), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Try types, store each result as soon as it is there, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", help="comma-separated; all by default")
    parser.add_argument("--again", action="store_true", help="try types again whose results are stored")
    parser.add_argument("--engines", default="", help="comma-separated engines to try, a minute or more each")
    parser.add_argument("--store", type=Path, default=TRIALS, help="file of the results")
    given = parser.parse_args(arguments)
    engines = [name for name in given.engines.split(",") if name]
    be_quiet()
    failed = 0
    for name in given.types.split(",") if given.types else model_types():
        rows = stored_trials(given.store)
        if not given.again and rows.get(name, {}).get("transformers") == transformers.__version__:
            continue
        row = tried(name, engines)
        write(rows | {name: row}, given.store)
        results = [cell[2] for cell in row["cells"]]
        failed += results.count(TrialResult.FAILED)
        told = row["not_built"] or ", ".join(f"{results.count(each)} {each}" for each in TrialResult if each in results)
        sys.stdout.write(f"{name:24} {row['seconds']:4d} s  {told}\n")
        for cell in row["cells"]:
            if cell[2] == TrialResult.FAILED:
                sys.stdout.write(f"    {cell[0]}, {cell[1]}: {cell[4]}\n")
        sys.stdout.flush()
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
