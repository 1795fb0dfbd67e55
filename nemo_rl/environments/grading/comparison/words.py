r"""Compare answers that are words, letters of choices, times, ratios, or numbers in other bases.

Each comparison returns None if its rule does not apply to the truth and the answer. Invariant: letters keep their
order, so that no word is read as a product of variables.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from nemo_rl.environments.grading.comparison.numbers import read_number
from nemo_rl.environments.grading.comparison.text import closing, split_top, without_text

Same = Callable[[str, str], bool]
"""Function that compares two parts of answers."""

_WORD_CHARACTERS = re.compile(r"[^\W\d_](?:[^\W_]|[ '\-.,&])*")
_CHOICE_AND_TEXT = re.compile(r"(?:\(\s?([A-J])\s?\)|([A-J])\s?[).:])\s{0,3}\S.{0,300}", re.DOTALL)
_VOWELS = frozenset("aeiou")
_CHOICES = "ABCDE"
_NO_SOLUTION = re.compile(r"(?:there (?:is|are) )?no (?:real |integer |such )?(?:solutions?|numbers?|values?)", re.I)
_TIME = re.compile(r"(\d{1,2})(?::([0-5]\d))?(?::([0-5]\d))?\s*(?:([ap])\.?\s?m\.?)?", re.IGNORECASE)
_RATIO_WORD = re.compile(r"\s+to\s+")
_BASE_WORDS = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
    "eleven": 11,
    "twelve": 12,
    "thirteen": 13,
    "fourteen": 14,
    "fifteen": 15,
    "sixteen": 16,
}
_BASED = re.compile(
    r"(?:\\text)?[({]?\s?([0-9A-Za-z][0-9A-Za-z., ]*)[)}]?\s?_\s?"
    r"(?:\\text)?\s?\{?(?:\\text)?\s?[({]?\s?(\d{1,2}|[a-z]+)\s?[)}]?\}?"
)


def compare_words(truth: str, answer: str, same: Same) -> bool | None:
    """Compare two answers as texts if the truth is a word, or return None if the truth may also be mathematics."""
    lettered = [_CHOICE_AND_TEXT.fullmatch(without_text(text)) for text in (truth, answer)]
    if any(lettered):
        letters = [
            (found[1] or found[2]) if found else plain_words(text)
            for found, text in zip(lettered, (truth, answer), strict=True)
        ]
        if all(letter is not None and len(letter) == 1 for letter in letters):
            return letters[0] == letters[1]
    first, second = plain_words(truth), plain_words(answer)
    if is_empty_set(truth) or is_empty_set(answer):
        return is_empty_set(truth) and is_empty_set(answer)
    if first is None:
        return False if second is not None and not _may_be_product(second) else None
    first_form, second_form = _form(first), _form(second or "")
    if not _may_be_product(first) and "," not in first:
        return second is not None and first_form == second_form
    if second is None:
        return None
    if first_form == second_form:
        return True
    if "," in first or "," in second:
        return None
    spelled = [word.replace(" ", "") for word in (first, second)]
    if all(len(word) == 1 or not _VOWELS & set(word) for word in spelled) and _may_be_product(second):
        return None
    return spelled[0] == spelled[1]


def plain_words(text: str) -> str | None:
    """Return an answer of letters only, without commands and brackets, or None if it has other characters."""
    words = without_text(text)
    if words.startswith("(") and closing(words, 0) == len(words) - 1:
        words = words[1:-1].strip()
    words = words.strip(" .")
    return words if _WORD_CHARACTERS.fullmatch(words) else None


def _form(words: str) -> str:
    """Return words for a comparison, without case and spaces. A single letter keeps its case unless it is a choice."""
    text = " ".join(words.replace(".", " ").split())
    letters = text.replace(" ", "")
    if len(letters) == 1:
        return letters.upper() if letters.upper() in _CHOICES else letters
    return letters.casefold() if letters.isupper() or len(letters) == len(text) else text.casefold()


def _may_be_product(words: str) -> bool:
    """Return whether the text has at most three small letters, which may be variables."""
    letters = words.replace(" ", "").replace(",", "")
    return letters.isascii() and letters.isalpha() and letters.islower() and len(letters) <= 3


def is_empty_set(text: str) -> bool:
    """Return whether an answer is the empty set, or says that there is no solution."""
    symbol = text.replace(" ", "")
    return symbol in (r"\emptyset", r"\{\}", "{}") or _NO_SOLUTION.fullmatch(without_text(text)) is not None


@dataclass(frozen=True)
class _Time:
    """A time of day."""

    seconds: int
    """Seconds since midnight. A time without a.m. and p.m. is read on a 24-hour clock."""
    has_half: bool
    """Whether a.m. or p.m. is written."""
    is_certain: bool
    """Whether the text can only be a time, not a ratio."""


def compare_times(truth: str, answer: str, same: Same) -> bool | None:
    """Compare times of day, or return None if one of the texts may be something else."""
    first, second = _time(truth), _time(answer)
    if first is None or second is None:
        known = first or second
        return False if known is not None and known.is_certain else None
    if first.has_half is second.has_half:
        return first.seconds == second.seconds
    bare, full = (second, first) if first.has_half else (first, second)
    on_a_clock = bare.seconds < 13 * 3600 and (bare.seconds - full.seconds) % (12 * 3600) == 0
    return bare.seconds == full.seconds or on_a_clock


def _time(text: str) -> _Time | None:
    parts = _TIME.fullmatch(without_text(text))
    if parts is None or (parts[2] is None and parts[4] is None):
        return None
    hour, minute, second = (int(part or 0) for part in parts.groups()[:3])
    if hour > 24 or (parts[4] and not 1 <= hour <= 12):
        return None
    if parts[4]:
        hour = hour % 12 + (12 if parts[4].lower() == "p" else 0)
    is_certain = parts[4] is not None or any(part is not None and part[0] == "0" for part in parts.groups()[1:3])
    return _Time(hour * 3600 + minute * 60 + second, parts[4] is not None, is_certain)


def compare_ratios(truth: str, answer: str, same: Same) -> bool | None:
    """Compare ratios of two or more numbers, or a ratio of two with its quotient."""
    first, second = _ratio(truth), _ratio(answer)
    if first is None and second is None:
        return None
    if first is None or second is None:
        ratio, other = (first, answer) if first is not None else (second, truth)
        value = read_number(other)
        return ratio is not None and value is not None and len(ratio) == 2 and ratio[0] / ratio[1] == value.value
    if len(first) != len(second):
        return False
    return all(one * second[0] == other * first[0] for one, other in zip(first, second, strict=True))


def _ratio(text: str) -> list[Fraction] | None:
    parts = split_top(_RATIO_WORD.sub(" : ", without_text(text)), ":")
    if len(parts) < 2:
        return None
    numbers = [number.value for part in parts if (number := read_number(part)) is not None]
    return numbers if len(numbers) == len(parts) and all(numbers) else None


def compare_bases(truth: str, answer: str, same: Same) -> bool | None:
    """Compare numbers that are written with a base, such as 101_2. Both the digits and the base must be equal."""
    first, second = _based(truth), _based(answer)
    if first is None and second is None:
        return None
    return first == second


def _based(text: str) -> tuple[str, int] | None:
    """Return the digits and the base of a number, or None for another text, such as x_2."""
    number = _BASED.fullmatch(text)
    if number is None:
        return None
    name = number[2]
    base = int(name) if name.isdigit() else _BASE_WORDS.get(name, 0)
    digits = re.sub("[ ,]", "", number[1])
    is_lettered = base > 10 and (digits.isupper() or (base == 16 and len(digits) > 1))
    is_number = is_lettered or any(digit.isdigit() for digit in digits)
    digits = digits.upper()
    if not is_number or not 2 <= base <= 36:
        return None
    if not all(digit == "." or int(digit, 36) < max(base, 10) for digit in digits):
        return None
    return digits.lstrip("0") or "0", base
