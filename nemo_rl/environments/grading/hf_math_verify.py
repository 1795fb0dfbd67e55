r"""Compare answers mathematically with the math-verify library, `\boxed` first.

This runs in a grading process only, because it imports sympy and a comparison may never end. The pool's deadlines
replace math-verify's own `signal.alarm` ones. Invariant: an answer that cannot be compared raises; its reward is never
0.
"""

import logging
import re
from itertools import product

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from nemo_rl.environments.grading.boxed import last_boxed
from nemo_rl.environments.grading.grade import VerifierResult

logging.getLogger("math_verify").setLevel(logging.ERROR)

_TRUTH_TARGETS = (LatexExtractionConfig(),)
_ANSWER_TARGETS = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
_INTEGER = re.compile(r"[+-]?[0-9]+(?:,[0-9]{3})*")
_ANSWER_BLOCK = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
_THINK_THEN_ANSWER = re.compile(
    r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*", re.DOTALL
)


def verify_math(response: str, ground_truth: str) -> VerifierResult:
    """Judge whether the response's final answer equals the ground truth mathematically.

    Args:
        response: The model's whole answer.
        ground_truth: The correct answer, in LaTeX or plain, without box or dollar signs.

    Returns:
        Reward 1.0 or 0.0. A response without a recognisable answer gets 0.0.

    Raises:
        ValueError: The ground truth itself cannot be read.
        Exception: The error of sympy, if no reading of the answer was equal.
    """
    truths = parse(f"\\boxed{{{ground_truth}}}", _TRUTH_TARGETS, parsing_timeout=None, raise_on_error=True)
    if not truths:
        raise ValueError(f"math-verify finds no expression in the ground truth {ground_truth!r}")
    answers = parse(response, _ANSWER_TARGETS, parsing_timeout=None, raise_on_error=True)
    text = next((answer for answer in answers if isinstance(answer, str)), None)
    return VerifierResult(float(_any_equal(truths, answers)), text)


def _any_equal(truths: list, answers: list) -> bool:
    """Compare each reading of the truth with each reading of the answer; raise only if none is equal."""
    failure: Exception | None = None
    for truth, answer in product(truths, answers):
        try:
            if verify(truth, answer, timeout_seconds=None, raise_on_error=True):
                return True
        except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
            failure = error
    if failure is not None:
        raise failure
    return False


def verify_math_components(response: str, ground_truth: str) -> VerifierResult:
    """Judge correctness, an integer answer and the format as separate reward components.

    The final answer is searched in the last `<answer>...</answer>` block, or in the whole
    response if there is none.

    Returns:
        Rewards of 1.0 or 0.0: `reward/correctness` as `verify_math`; `reward/integer` if the
        final answer is written as an integer; `reward/format` if the response is one
        `<think>...</think>` block followed by one `<answer>...</answer>` block.
    """
    blocks = _ANSWER_BLOCK.findall(response)
    stated = blocks[-1] if blocks else response
    verified = verify_math(stated, ground_truth)
    answer = last_boxed(stated) or verified.extracted_answer or ""
    return VerifierResult(
        {
            "reward/correctness": float(verified.reward),  # type: ignore[arg-type]
            "reward/integer": float(_INTEGER.fullmatch(answer.strip(" $")) is not None),
            "reward/format": float(_THINK_THEN_ANSWER.fullmatch(response) is not None),
        },
        verified.extracted_answer,
    )
