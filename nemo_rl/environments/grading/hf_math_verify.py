r"""Compare the final answer of a response with the ground truth mathematically. Boxed answers come first.

This module runs only in a grading process, because it imports sympy and a comparison may never end. The deadlines of
the pool replace the `signal.alarm` deadlines of math-verify. Invariant: an answer that cannot be compared raises an
error, and never gets a reward of 0.
"""

import re

from nemo_rl.environments.grading.comparison.compare import MAX_CHARS, same_answer
from nemo_rl.environments.grading.comparison.text import clean
from nemo_rl.environments.grading.final_answer import final_answer, last_boxed
from nemo_rl.environments.grading.grade import VerifierResult, require_final_answer

_INTEGER = re.compile(r"[+-]?[0-9]+(?:,[0-9]{3})*")


def verify_math(response: str, ground_truth: str) -> VerifierResult:
    """Judge whether the response's final answer equals the ground truth mathematically.

    Args:
        response: The model's whole answer.
        ground_truth: The correct answer, in LaTeX or plain, without box or dollar signs.

    Returns:
        Reward 1.0 or 0.0. A response without a recognisable answer gets 0.0.

    Raises:
        ValueError: The ground truth is not a final answer, or the answer cannot be compared.
    """
    truth = last_boxed(ground_truth) or ground_truth
    require_final_answer(truth)
    answer = final_answer(response)
    if answer is None:
        return VerifierResult(0.0, None)
    return VerifierResult(float(same_answer(truth, answer)), clean(answer[:MAX_CHARS]))


def verify_math_components(response: str, ground_truth: str, prompt: str | None = None) -> VerifierResult:
    """Judge three things as separate reward components: correctness, whether the answer is an integer, and the format.

    The final answer is searched in the last `<answer>...</answer>` block, or in the whole
    response if there is none.

    Args:
        response: The model's whole answer.
        ground_truth: As in `verify_math`.
        prompt: The text before the response, or the end of that text, which may contain the opening `<think>`. If it is
            None, responses with and without the opening `<think>` have the right format.

    Returns:
        Rewards of 1.0 or 0.0: `reward/correctness` as `verify_math`; `reward/integer` if the
        final answer is written as an integer; `reward/format` if prompt and response have one
        `<think>...</think>` block followed by one `<answer>...</answer>` block.
    """
    stated = _answer_block(response)
    stated = response if stated is None else stated
    verified = verify_math(stated, ground_truth)
    answer = last_boxed(stated) or verified.extracted_answer or ""
    begins = ("", "<think>") if prompt is None else (_thinking_of_prompt(prompt),)
    return VerifierResult(
        {
            "reward/correctness": float(verified.reward),  # type: ignore[arg-type]
            "reward/integer": float(_INTEGER.fullmatch(answer.strip(" $")) is not None),
            "reward/format": float(any(_is_think_then_answer(begin + response) for begin in begins)),
        },
        verified.extracted_answer,
    )


def _thinking_of_prompt(prompt: str) -> str:
    """Return the thinking tags that end a prompt: an open `<think>`, an empty block of thinking, or "" for none."""
    text = prompt.rstrip()
    if text.endswith("<think>"):
        return "<think>"
    closed = text.removesuffix("</think>")
    return "<think></think>" if closed != text and closed.rstrip().endswith("<think>") else ""


def _answer_block(response: str) -> str | None:
    """Return the text of the last `<answer>...</answer>`, or None if there is none."""
    start = response.rfind("<answer>", 0, max(response.rfind("</answer>"), 0))
    if start < 0:
        return None
    start += len("<answer>")
    return response[start : response.find("</answer>", start)]


def _is_think_then_answer(text: str) -> bool:
    """Return whether a text is a block of thinking and a block with the answer, and nothing else."""
    text = text.strip()
    thought, closing, rest = text.removeprefix("<think>").partition("</think>")
    rest = rest.strip()
    answer = rest.removeprefix("<answer>").removesuffix("</answer>")
    is_wrapped = text.startswith("<think>") and bool(closing) and len(rest) - len(answer) == len("<answer></answer>")
    return is_wrapped and "<think>" not in thought and "<answer>" not in answer and "</answer>" not in answer
