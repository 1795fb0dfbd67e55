r"""Compare the final answer of a response with the ground truth as a mathematician does, `\boxed` first.

This runs in a grading process only, because it imports sympy and a comparison may never end. The pool's deadlines
replace math-verify's own `signal.alarm` ones. Invariant: an answer that cannot be compared raises; its reward is never
0.
"""

import re

from nemo_rl.environments.grading.comparison.compare import MAX_CHARS, same_answer
from nemo_rl.environments.grading.comparison.text import clean
from nemo_rl.environments.grading.final_answer import final_answer, last_boxed
from nemo_rl.environments.grading.grade import VerifierResult

_INTEGER = re.compile(r"[+-]?[0-9]+(?:,[0-9]{3})*")


def verify_math(response: str, ground_truth: str) -> VerifierResult:
    """Judge whether the response's final answer equals the ground truth mathematically.

    Args:
        response: The model's whole answer.
        ground_truth: The correct answer, in LaTeX or plain, without box or dollar signs.

    Returns:
        Reward 1.0 or 0.0. A response without a recognisable answer gets 0.0.

    Raises:
        ValueError: The ground truth has no text, or the answer cannot be compared.
    """
    truth = last_boxed(ground_truth) or ground_truth
    if not clean(truth[:MAX_CHARS]):
        raise ValueError(f"there is no expression in the ground truth {ground_truth!r}")
    answer = final_answer(response)
    if answer is None:
        return VerifierResult(0.0, None)
    return VerifierResult(float(same_answer(truth, answer)), clean(answer[:MAX_CHARS]))


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
