r"""Find `\boxed{...}` in a model's answer, and grade plain numbers without a computer algebra system.

`math_environment` grades an answer in its own process if `grade_plain_number` can. Invariant: where it returns a
result, math-verify returns the same.
"""

import re
from decimal import Decimal

from nemo_rl.environments.grading.grade import VerifierResult

_BOXED = re.compile(r"\\boxed\s*\{")
_PLAIN_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,6})?")
_RIVAL_ANCHOR = re.compile(r"I hope", re.IGNORECASE)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` with balanced braces, stripped; None if none."""
    for match in reversed(list(_BOXED.finditer(text))):
        depth = 1
        for position in range(match.end(), len(text)):
            char = text[position]
            escaped = text[position - 1] == "\\"
            if char == "{" and not escaped:
                depth += 1
            elif char == "}" and not escaped:
                depth -= 1
            if depth == 0:
                return text[match.end() : position].strip()
    return None


def grade_plain_number(response: str, ground_truth: str) -> VerifierResult | None:
    r"""Grade by exact comparison where truth and the only boxed answer are plain numbers.

    A plain number has at most 15 digits before the point and 6 after it, no separators, units or
    leading zeros; there math-verify's rounding to 6 decimals is exact equality too. An answer
    with several boxes, or with the phrase "I hope" (which math-verify reads as another anchor of
    the final answer), is left to math-verify.

    Returns:
        The result, or None if this answer needs the full verifier.
    """
    truth = ground_truth.strip()
    if _PLAIN_NUMBER.fullmatch(truth) is None or response.count("\\boxed") != 1:
        return None
    answer = last_boxed(response)
    if answer is None or _PLAIN_NUMBER.fullmatch(answer) is None:
        return None
    if _RIVAL_ANCHOR.search(response):
        return None
    return VerifierResult(float(Decimal(answer) == Decimal(truth)), answer)
