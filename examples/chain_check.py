"""Compare the first and the last value of a metric; the exit status is 1 unless it rose or fell as expected.

    uv run --extra cpu python examples/chain_check.py validation/val_loss falls results/chain/sft/logs
    uv run --extra cpu python examples/chain_check.py score rises results/chain/eval_before results/chain/eval_after

A folder is the `logger.log_dir` of a run, or the `eval.save_path` of an evaluation, whose metric is `score`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path


def values(metric: str, folder: Path) -> list[float]:
    """Return the values of a metric, in the order of the steps.

    Args:
        metric: prefix and name, for example "train/reward"; "score" for an evaluation.
        folder: folder of a run or of an evaluation.
    """
    if metric == "score":
        return [json.loads((folder / "results.json").read_text(encoding="utf-8"))["score"]["value"]]
    by_step: dict[int, float] = {}
    for file in sorted(folder.glob("exp_*/metrics.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            named = {f"{row['prefix']}/{name}": value for name, value in row["metrics"].items()}
            if metric in named:
                by_step[row["step"]] = named[metric]
    return [by_step[step] for step in sorted(by_step)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the values and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metric", help="prefix/name, or score")
    parser.add_argument("direction", choices=["rises", "falls"])
    parser.add_argument("folders", type=Path, nargs="+", help="log_dir of a run, or save_path of evaluations")
    parser.add_argument("--window", type=int, default=1, help="average this many first and last values (default: 1)")
    options = parser.parse_args(arguments)
    found = [value for folder in options.folders for value in values(options.metric, folder)]
    if len(found) < 2 * options.window:
        sys.stderr.write(f"{options.metric}: {len(found)} values in {', '.join(map(str, options.folders))}.\n")
        return 1
    first, last = (sum(part) / options.window for part in (found[: options.window], found[-options.window :]))
    learned = last > first if options.direction == "rises" else last < first
    print(
        f"    {options.metric:34} {first:8.4f} -> {last:8.4f}   {'ok' if learned else f'should: {options.direction}'}"
    )
    return 0 if learned else 1


if __name__ == "__main__":
    sys.exit(main())
