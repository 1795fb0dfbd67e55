"""Solutions of a public data set are graded as math-verify grades them."""

import gzip
import json

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from nemo_rl.environments.grading.pool import GradingPool


def reference(response: str, truth: str) -> float:
    """Grade with math-verify as its documentation uses it, in this process, with its own deadlines."""
    gold = parse(f"\\boxed{{{truth}}}", [LatexExtractionConfig()])
    answer = parse(response, [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()])
    return float(verify(gold, answer))


def test_math_solutions_get_the_same_rewards_as_from_math_verify(shared_data):
    with gzip.open(shared_data / "math/math500.jsonl.gz", "rt") as lines:
        problems = [json.loads(line) for line, _ in zip(lines, range(80), strict=False)]
    pairs = [(row["solution"], row["answer"]) for row in problems]
    pairs += [(row["solution"], other["answer"]) for row, other in zip(problems, problems[1:], strict=False)]
    expected = [reference(*pair) for pair in pairs]
    pool = GradingPool("hf_math_verify", num_workers=2, timeout_s=20.0)
    try:
        grades = pool.grade(pairs)
    finally:
        pool.close()
    differing = [
        (pair[1], grade.error, want)
        for pair, grade, want in zip(pairs, grades, expected, strict=True)
        if grade.verified is None or grade.verified.reward != want
    ]
    assert differing == []
    assert sum(expected[:80]) >= 76  # the data set's own solutions
    assert sum(expected[80:]) <= 8  # another problem's answer
