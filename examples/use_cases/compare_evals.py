"""Compare two evaluations of the same problems: intervals, pass@k, and the difference prompt by prompt.

    uv run --extra cpu python examples/use_cases/compare_evals.py results/eval_before results/eval_after

A folder is the `eval.save_path` of `examples/run_eval.py`. The unit is the prompt: answers to one prompt are not
independent, so they are averaged first.
"""

import argparse
import json
import math
import random
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from nemo_rl.evals.report import pass_at_k

Z = 1.959963984540054
"""Quantile of the normal distribution for an interval of 95 %."""
NUM_DRAWS = 10_000

Interval = tuple[float, float]
Grades = Mapping[int, Sequence[bool]]


def wilson(successes: int, trials: int) -> Interval:
    """Return the 95 % interval of Wilson (1927) for a share.

    Args:
        successes: number of right answers, to different prompts.
        trials: number of answers.
    """
    share, spread = successes / trials, Z * Z / trials
    middle = (share + spread / 2) / (1 + spread)
    half = Z / (1 + spread) * math.sqrt(share * (1 - share) / trials + spread / (4 * trials))
    return middle - half, middle + half


def grades_of(folder: Path) -> dict[int, list[bool]]:
    """Read whether each answer is right, by the number of its prompt; an answer without a reward is not right."""
    grades: dict[int, list[bool]] = defaultdict(list)
    for line in (folder / "evaluation_data.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        grades[row["idx"]].append((row["reward"] or 0.0) >= 1.0)
    return dict(grades)


def bootstrap(values: Sequence[float], seed: int = 0) -> Interval:
    """Return the 95 % interval of a mean over prompts, by drawing prompts with replacement."""
    generator = random.Random(seed)
    means = sorted(fmean(generator.choices(values, k=len(values))) for _ in range(NUM_DRAWS))
    return means[round(0.025 * NUM_DRAWS)], means[round(0.975 * NUM_DRAWS) - 1]


def sign_flip_test(differences: Sequence[float], seed: int = 0) -> float:
    """Return how often chance alone gives a mean difference at least as large, if the two sides are equal.

    Args:
        differences: score of a prompt on the second side minus that on the first.
        seed: seed of the random signs.
    """
    generator = random.Random(seed)
    found = abs(sum(differences)) - 1e-12
    flipped = (sum(value * generator.choice((-1, 1)) for value in differences) for _ in range(NUM_DRAWS))
    return (1 + sum(abs(total) >= found for total in flipped)) / (1 + NUM_DRAWS)


def described(name: str, grades: Grades) -> str:
    """Describe one evaluation in a few lines."""
    rates = [fmean(answers) for answers in grades.values()]
    num_answers = min(len(answers) for answers in grades.values())
    error = stdev(rates) / math.sqrt(len(rates)) if len(rates) > 1 else math.nan
    low, high = bootstrap(rates)
    lines = [f"{name}: {len(rates)} prompts, {num_answers} answers each"]
    lines.append(f"  pass@1 {fmean(rates):.3f}, standard error {error:.3f}, 95 % by bootstrap {low:.3f} to {high:.3f}")
    right = sum(answers[0] for answers in grades.values())
    low, high = wilson(right, len(grades))
    lines.append(f"  first answers: {right} of {len(grades)} right, 95 % by Wilson {low:.3f} to {high:.3f}")
    ks = [k for k in (2, 4, 8, 16, 32) if k <= num_answers]
    scores = {k: fmean(pass_at_k(len(each), sum(each), k) for each in grades.values()) for k in ks}
    return "\n".join([*lines, *(f"  pass@{k} {score:.3f}" for k, score in scores.items())])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison; returns 2 if the evaluations have different prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs=2, help="folder of an evaluation")
    before, after = parser.parse_args(arguments).folders
    first, second = grades_of(before), grades_of(after)
    if first.keys() != second.keys():
        print("The two evaluations have different prompts; a paired comparison needs the same ones.", file=sys.stderr)
        return 2
    print(described(str(before), first), described(str(after), second), sep="\n")
    differences = [fmean(second[prompt]) - fmean(first[prompt]) for prompt in first]
    low, high = bootstrap(differences)
    better, worse = sum(value > 0 for value in differences), sum(value < 0 for value in differences)
    print(f"difference {fmean(differences):+.3f}, 95 % by bootstrap {low:+.3f} to {high:+.3f}")
    print(f"  {better} prompts better, {worse} worse, {len(differences) - better - worse} equal")
    print(f"  p = {sign_flip_test(differences):.4f} if there is no difference (signs of the differences flipped)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
