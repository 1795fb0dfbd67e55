r"""Compare final answers as normalised text, by the rule that DAPO was trained with.

The final answer is the text in the last `\boxed{...}` or after the last `Answer:`, whichever comes later (DAPO, arXiv
2503.14476, section 4). The comparison is cheap and deterministic. It uses no algebra, so two spellings of a number are
equal only if normalisation makes them equal. Invariant: answers of different value have different normal forms, so a
majority vote over normal forms never merges them.
"""

import re
from collections.abc import Callable

from nemo_rl.environments.grading.comparison.text import DOLLAR, clean, split_top, squeezed, without_text
from nemo_rl.environments.grading.final_answer import last_boxed, last_match
from nemo_rl.environments.grading.grade import VerifierResult, require_final_answer

MAX_CHARS = 4000
"""Largest length in characters of an answer that is normalised."""

_ANSWER_LINE = re.compile(r"answer\**\s*:\**[ \t]*([^\n]+)", re.IGNORECASE)
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?![\d,]| \d)")
_TRAILING_ZEROS = re.compile(r"(?<![\d.])(\d+)\.0+(?!\d)")
_PLAIN_UNITS = re.compile(rf"(?<=\d) ?(?:dollars?|degrees?)$|\^\\circ$|{DOLLAR}")
_UNITS = re.compile(
    r"(?<=[\d})])(?: ?(?:%|\^\\circ|degrees?|dollars?|percent|cents?|inch(?:es)?|feet|foot|units?|square|cubic|cm|km"
    r"|meters?|hours?|minutes?|seconds?|days?|points?|students?|mph|\^[23]))+$"
)
_NAME = re.compile(r"\\?[A-Za-z]+(?:_\{?\w{1,5}\}?)?(?:\(\\?[A-Za-z]{1,5}\))?")


def verify_final_answer(response: str, ground_truth: str) -> VerifierResult:
    """Compare the final answer of a response with the ground truth as normalised text.

    Returns:
        Reward 1.0 if the answers are equal, or 0.0 if they differ or the response states no final answer.

    Raises:
        ValueError: The ground truth is not a final answer.
    """
    require_final_answer(last_boxed(ground_truth) or ground_truth)
    answer = final_answer(response)
    if answer is None:
        return VerifierResult(0.0, None)
    return VerifierResult(float(_is_equal(ground_truth, answer)), answer)


def final_answer(response: str) -> str | None:
    r"""Return the text of the last `\boxed{...}` or `Answer:` line, or None if there is neither."""
    line = last_match(_ANSWER_LINE, response)
    tail = response[line.start() :] if line else response
    if (boxed := last_boxed(tail)) is not None:
        return boxed
    return line.group(1).strip() if line else None


def normalize_answer(answer: str) -> str:
    r"""Remove the parts of a short LaTeX answer that do not change its meaning.

    Example:
        >>> normalize_answer("\\$1,234.00\\text{ dollars}.")
        '1234'
    """
    return _normal_form(answer, lambda text: _PLAIN_UNITS.sub("", text))


def _normal_form(answer: str, without_units: Callable[[str], str]) -> str:
    boxed = last_boxed(answer)
    text = answer if boxed is None else boxed
    if len(text) > MAX_CHARS:
        return text.strip()
    text = without_units(without_text(clean(text))).strip()
    if not any(bracket in text for bracket in "([{"):
        text = _THOUSANDS.sub(lambda number: re.sub("[, ]", "", number[0]), text)
    return _TRAILING_ZEROS.sub(r"\1", squeezed(text))


def _is_equal(truth: str, answer: str) -> bool:
    """Compare normal forms. One of the two may leave out a unit or the name before an equals sign."""
    forms = [normalize_answer(text) for text in (truth, answer)]
    numbers = [_normal_form(text, _without_unit) for text in (truth, answer)]
    with_units = [_normal_form(text, str) for text in (truth, answer)]
    has_unit = [number != full for number, full in zip(numbers, with_units, strict=True)]
    return _equal_but_for_a_name(*forms) or (has_unit[0] is not has_unit[1] and _equal_but_for_a_name(*numbers))


def _equal_but_for_a_name(truth: str, answer: str) -> bool:
    short_truth, short_answer = _without_name(truth), _without_name(answer)
    if (short_truth != truth) is (short_answer != answer):
        return truth == answer
    return short_truth == short_answer


def _without_name(text: str) -> str:
    """Return the text after "x=" if the text is a single equation, or the text itself."""
    sides = split_top(text, "=")
    is_one = len(sides) == 2 and len(split_top(text, ",;")) == 1 and _NAME.fullmatch(sides[0])
    return sides[1] if is_one else text


def _without_unit(text: str) -> str:
    return _UNITS.sub("", text).replace(DOLLAR, "")
