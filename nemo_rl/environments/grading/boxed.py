r"""Grade plain numbers in a box without a computer algebra system.

`math_environment` grades an answer in its own process if `grade_plain_number` can. Invariant: where it returns a
result, `hf_math_verify.verify_math` returns the same.
"""

import re
from decimal import Decimal

from nemo_rl.environments.grading.final_answer import last_boxed
from nemo_rl.environments.grading.grade import VerifierResult

_PLAIN_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,6})?")
_ANOTHER_BOX = re.compile(r"\\f(?:rame)?box")
_RIVAL_ANCHOR = re.compile(r"I hope", re.IGNORECASE)


def grade_plain_number(response: str, ground_truth: str) -> VerifierResult | None:
    r"""Grade by exact comparison where truth and the only boxed answer are plain numbers.

    A plain number has at most 15 digits before the point and 6 after it, no separators, units or
    leading zeros; there the rule for decimals is exact equality too. An answer with several
    boxes, or with the phrase "I hope" (which may follow another final answer), is left to the
    full verifier.

    Returns:
        The result, or None if this answer needs the full verifier.
    """
    truth = ground_truth.strip()
    if _PLAIN_NUMBER.fullmatch(truth) is None or response.count("\\boxed") != 1 or _ANOTHER_BOX.search(response):
        return None
    answer = last_boxed(response)
    if answer is None or _PLAIN_NUMBER.fullmatch(answer) is None:
        return None
    if _RIVAL_ANCHOR.search(response):
        return None
    return VerifierResult(float(Decimal(answer) == Decimal(truth)), answer)
