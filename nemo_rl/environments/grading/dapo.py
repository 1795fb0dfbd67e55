r"""Compare final answers as normalised text, the rule that DAPO was trained with.

The final answer is the text in the last `\boxed{...}` or after the last `Answer:`, whichever comes later (DAPO,
arXiv 2503.14476, section 4). Cheap and deterministic, no algebra; two spellings of one number are equal only if
normalisation makes them so.
"""

import re

from nemo_rl.environments.grading.final_answer import last_boxed
from nemo_rl.environments.grading.grade import VerifierResult

_ANSWER_LINE = re.compile(r"answer\**\s*:\**[ \t]*([^\n]+)", re.IGNORECASE)
_WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|overline)\s*\{([^{}]*)\}")
_SHORT_FRAC = re.compile(r"\\frac\s*(\w)\s*(\w)")
_SHORT_SQRT = re.compile(r"\\sqrt\s*(\w)")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?:\D|$))")
_TRAILING_ZEROS = re.compile(r"(\d+)\.0+")
_UNITS = re.compile(
    r"\b(?:degrees?|dollars?|cents?|percent|inch(?:es)?|feet|foot|units?|square|cubic|cm|km|meters?"
    r"|hours?|minutes?|seconds?|days?|points?|students?|mph)\b"
)
_DELETED = (
    "\\left",
    "\\right",
    "\\displaystyle",
    "\\!",
    "\\,",
    "\\;",
    "\\:",
    "\\ ",
    "~",
    "^{\\circ}",
    "^\\circ",
    "\\%",
    "%",
    "\\$",
    "$",
)


def verify_final_answer(response: str, ground_truth: str) -> VerifierResult:
    """Compare the final answer of a response with the ground truth as normalised text.

    Returns:
        Reward 1.0 if equal, else 0.0; 0.0 also if the response states no final answer.
    """
    answer = final_answer(response)
    if answer is None:
        return VerifierResult(0.0, None)
    return VerifierResult(float(normalize_answer(answer) == normalize_answer(ground_truth)), answer)


def final_answer(response: str) -> str | None:
    r"""Return the text of the last `\boxed{...}` or `Answer:` line; None if there is neither."""
    lines = list(_ANSWER_LINE.finditer(response))
    tail = response[lines[-1].start() :] if lines else response
    if (boxed := last_boxed(tail)) is not None:
        return boxed
    return lines[-1].group(1).strip() if lines else None


def normalize_answer(answer: str) -> str:
    r"""Strip what does not change the meaning of a short LaTeX answer.

    Example:
        >>> normalize_answer("x = \\$1,234.00\\text{ dollars}.")
        '1234'
    """
    text = answer.strip()
    if (boxed := last_boxed(text)) is not None:
        text = boxed
    text = text.split("=")[-1]
    text = _WRAPPER.sub(r"\1", text)
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    for piece in _DELETED:
        text = text.replace(piece, "")
    text = _UNITS.sub("", text)
    text = _SHORT_FRAC.sub(r"\\frac{\1}{\2}", text)
    text = _SHORT_SQRT.sub(r"\\sqrt{\1}", text)
    text = _THOUSANDS.sub("", text)
    text = "".join(text.split()).rstrip(".")
    whole = _TRAILING_ZEROS.fullmatch(text)
    return whole.group(1) if whole else text
