r"""Read numbers exactly, and compare them by the rule for decimals.

Numbers are integers, decimals, repeating decimals, fractions, mixed numbers and powers of whole numbers. Invariant: a
number has the exact value of what is written, and reading takes no longer than its text and its size limit allow.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from nemo_rl.environments.grading.comparison.text import MAX_DEPTH, closing

MAX_DIGITS = 4000
"""Digits of the longest number that is read; Python refuses to convert longer ones."""

MIN_DECIMALS = 6
"""Fewest decimals of a number that may stand for a more exact one."""

_FLOAT_DIGITS = 15
"""Significant digits of a number that a program has computed with floats."""

_SHORT_DIGITS = 12

_PLAIN = re.compile(r"(\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)?(?:\.(\d*))?(?:\\overline\{(\d+)\}|(\\ldots))?")
_EXPONENT = re.compile(r"[eE]([+-]?\d{1,9})|\s*\\cdot\s*10\s*\^\s*(?:\{\s*([+-]?\s*\d{1,9})\s*\}|([+-]?\d{1,9}))")
_POWER = re.compile(r"(\d{1,6})\s*\^\s*(?:\{\s*(-?\d{1,6})\s*\}|(\d{1,6}))")
_FRACTION = re.compile(r"\\frac\s*\{")
_MIXED = re.compile(r"(\d{1,15})\s+(\d{1,15})\s*/\s*(\d{1,15})|(\d{1,15})\s*(?=\\frac)")


@dataclass(frozen=True)
class Number:
    """A number as it is written."""

    value: Fraction
    """Its exact value."""
    decimals: int | None = None
    """Digits after the decimal point, counted at exponent 0; None if it is not written as a decimal."""
    digits: int = 0
    """Significant digits of a decimal."""


def read_number(text: str, depth: int = 0) -> Number | None:
    """Read a number in the spelling of `text.clean`; None if the text is something else, or a number of huge size.

    Args:
        text: The number.
        depth: Brackets and fractions around it.
    """
    text = text.strip()
    negative = False
    while text[:1] in ("-", "+"):
        negative ^= text[0] == "-"
        text = text[1:].lstrip()
    number = _read_unsigned(text, depth + 1) if len(text) <= MAX_DIGITS and depth < MAX_DEPTH else None
    if number is None or not negative:
        return number
    return Number(-number.value, number.decimals, number.digits)


def _read_unsigned(text: str, depth: int) -> Number | None:
    if text.startswith(("(", "{")) and closing(text, 0) == len(text) - 1:
        return read_number(text[1:-1], depth)
    mixed = _MIXED.match(text)
    if mixed is not None and (mixed[4] is not None or mixed.end() == len(text)):
        return _mixed_number(text, mixed, depth)
    if text.startswith(r"\frac"):
        return _fraction(text, depth)
    if "/" in text:
        above, _, below = text.partition("/")
        return _quotient(read_number(above, depth), read_number(below, depth))
    return _power(text) or _decimal(text)


def _mixed_number(text: str, mixed: re.Match[str], depth: int) -> Number | None:
    if mixed[4] is None:
        part = _quotient(Number(Fraction(int(mixed[2]))), Number(Fraction(int(mixed[3]))))
        whole = int(mixed[1])
    else:
        part, whole = _fraction(text[mixed.end() :], depth), int(mixed[4])
    if part is None or not 0 <= part.value < 1:
        return None
    return Number(whole + part.value)


def _fraction(text: str, depth: int) -> Number | None:
    r"""Read `\frac{a}{b}` with numbers a and b."""
    opened = _FRACTION.match(text)
    if opened is None:
        return None
    middle = closing(text, opened.end() - 1)
    if middle is None or text[middle + 1 : middle + 2] != "{" or closing(text, middle + 1) != len(text) - 1:
        return None
    return _quotient(read_number(text[opened.end() : middle], depth), read_number(text[middle + 2 : -1], depth))


def _quotient(above: Number | None, below: Number | None) -> Number | None:
    if above is None or below is None or below.value == 0:
        return None
    return Number(above.value / below.value)


def _power(text: str) -> Number | None:
    power = _POWER.fullmatch(text)
    if power is None:
        return None
    base, exponent = int(power[1]), int(power[2] or power[3])
    if len(power[1]) * abs(exponent) > MAX_DIGITS or (base == 0 and exponent <= 0):
        return None
    return Number(Fraction(base) ** exponent)


def _decimal(text: str) -> Number | None:
    written = _PLAIN.match(text)
    if written is None or not written.end() or (not written[1] and not written[2]):
        return None
    exponent = _EXPONENT.fullmatch(text, written.end())
    if exponent is None and written.end() != len(text):
        return None
    power = int(next(part for part in exponent.groups() if part).replace(" ", "")) if exponent else 0
    if abs(power) > MAX_DIGITS:
        return None
    whole, after = re.sub("[ ,]", "", written[1] or "0"), written[2] or ""
    value = Fraction(int(whole + after), 10 ** len(after))
    period = written[3] or _period(after) if written[3] or written[4] else None
    if written[4] and period is None:
        return None
    if period is not None:
        value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(after))
        return Number(value * Fraction(10) ** power)
    digits = len((whole + after).lstrip("0"))
    is_decimal = written[2] is not None and bool(after)
    return Number(value * Fraction(10) ** power, len(after) - power if is_decimal else None, digits)


def _period(after: str) -> str | None:
    """Return the digits that repeat in a decimal with an ellipsis, such as 3 in 0.333...; None if none do."""
    for size in range(1, len(after) // 2 + 1):
        period = after[-size:]
        repeats = 3 if size == 1 else 2
        if after.endswith(period * repeats):
            return period
    return None


def equal_numbers(truth: Number, answer: Number) -> bool:
    """Compare two numbers exactly, or by the rule for decimals.

    A decimal with at least `MIN_DECIMALS` decimals and significant digits also equals an exact number of which it is
    the rounded or the cut value, and a true decimal equals an answer with more digits in the same way. A decimal of
    15 and more digits, as programs print floats, equals a number of at most 12 digits from which it differs by the
    rounding of floats.
    """
    if truth.value == answer.value or _stands_for(truth, answer):
        return True
    if truth.decimals is None and _stands_for(answer, truth):
        return True
    return _is_float_of(truth, answer) or _is_float_of(answer, truth)


def _is_float_of(printed: Number, exact: Number) -> bool:
    """Return whether a decimal differs from a short number only by the rounding of floats."""
    if printed.decimals is None or printed.digits < _FLOAT_DIGITS or exact.digits > _SHORT_DIGITS:
        return False
    return abs(printed.value - exact.value) * 10**_FLOAT_DIGITS <= 5 * abs(exact.value)


def _stands_for(decimal: Number, exact: Number) -> bool:
    """Return whether a decimal is the rounded or cut value of a number that is written more exactly."""
    if exact.decimals is not None and decimal.decimals is not None and exact.decimals <= decimal.decimals:
        return False
    if exact.decimals is None and exact.value.denominator == 1:
        return False
    return is_close_decimal(decimal, abs(decimal.value - exact.value))


def is_close_decimal(decimal: Number, difference: Fraction) -> bool:
    """Return whether a decimal may stand for an exact number at this distance."""
    if decimal.decimals is None or decimal.decimals < MIN_DECIMALS or decimal.digits < MIN_DECIMALS:
        return False
    return difference < Fraction(1, 10**decimal.decimals)
