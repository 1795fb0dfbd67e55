"""Read numbers exactly and with their units, and compare them exactly or by the rule for decimals (`equal_numbers`)."""

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from nemo_rl.environments.grading.comparison.text import DOLLAR, MAX_DEPTH, closing, without_text

MAX_DIGITS = 4000
"""Largest number of digits of a number. Python refuses to convert longer numbers."""

MIN_DECIMALS = 6
"""Smallest number of decimals of a number that may be a rounded value of a more exact number."""

_FLOAT_DIGITS = 15
"""Significant digits from which on a decimal may have been printed by a program that computes with floats."""

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
    """Exact value of the number."""
    decimals: int | None = None
    """Digits after the decimal point when the number is written without an exponent, or None if it is not a decimal."""
    digits: int = 0
    """Significant digits of a decimal."""


def read_number(text: str, depth: int = 0) -> Number | None:
    """Read a number in the spelling of `text.clean`, or return None for another text or a number of huge size.

    Args:
        depth: Number of brackets and fractions around the number.
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
    """Return the digits that repeat in a decimal with an ellipsis, such as 3 in 0.333..., or None if none repeat."""
    for size in range(1, len(after) // 2 + 1):
        period = after[-size:]
        repeats = 3 if size == 1 else 2
        if after.endswith(period * repeats):
            return period
    return None


def equal_numbers(truth: Number, answer: Number) -> bool:
    """Compare two numbers exactly, or by the rule for decimals.

    A decimal with at least `MIN_DECIMALS` decimals and significant digits also equals an exact number if it is the
    rounded or cut value of that number. If the ground truth is such a decimal, an answer with more digits counts as the
    exact number. A decimal of 15 or more digits (as programs print floats) equals a number of at most 12 digits if only
    the rounding of floats separates the two.
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
    """Return whether a decimal is the rounded or cut value of a number that has more digits or is not a decimal."""
    if exact.decimals is not None and decimal.decimals is not None and exact.decimals <= decimal.decimals:
        return False
    if exact.decimals is None and exact.value.denominator == 1:
        return False
    return is_close_decimal(decimal, abs(decimal.value - exact.value))


def is_close_decimal(decimal: Number, difference: Fraction) -> bool:
    """Return whether a decimal may be the rounded or cut value of a number that differs from it by `difference`."""
    if decimal.decimals is None or decimal.decimals < MIN_DECIMALS or decimal.digits < MIN_DECIMALS:
        return False
    return difference < Fraction(1, 10**decimal.decimals)


PERCENT, DEGREE, RADIAN = "percent", "degree", "radian"


@dataclass(frozen=True)
class Unit:
    """A unit of measurement, or a thing that is counted."""

    kind: tuple[tuple[str, int], ...]
    """Basic units with their powers, such as (("length", 2),). Only units of the same kind can be converted."""
    factor: Fraction = Fraction(1)
    """Size of the unit in the first unit of its kind."""
    words: frozenset[str] = frozenset()
    """Things that are counted, such as "apple", in the singular."""

    @property
    def name(self) -> str:
        """Return the name of a kind that is one basic unit, such as "percent", or "" for any other kind."""
        return self.kind[0][0] if len(self.kind) == 1 and self.kind[0][1] == 1 else ""

    def is_like(self, other: "Unit") -> bool:
        """Return whether both units have the same kind. The words of one unit may be a part of those of the other."""
        is_described = self.words <= other.words or other.words <= self.words
        return self.kind == other.kind and is_described and bool(self.words) is bool(other.words)


_TABLE: dict[str, dict[str, str]] = {
    "length": {
        "1": "m meter metre",
        "1/1000000": "micrometer micron",
        "1/1000": "mm millimeter millimetre",
        "1/100": "cm centimeter centimetre",
        "1/10": "dm decimeter",
        "1000": "km kilometer kilometre",
        "0.0254": "in inch inche",
        "0.3048": "ft foot feet",
        "0.9144": "yd yard",
        "1609.344": "mi mile",
    },
    "mass": {
        "1": "kg kilogram kilo",
        "1/1000": "g gram gm",
        "1/1000000": "mg milligram",
        "1000": "tonne",
        "0.45359237": "lb pound",
        "0.028349523125": "oz ounce",
    },
    "time": {
        "1": "s sec second",
        "1/1000": "ms millisecond",
        "60": "min minute",
        "3600": "h hr hour",
        "86400": "day",
        "604800": "week wk",
    },
    "months": {"1": "month", "12": "year yr"},
    "volume": {"1": "l L liter litre", "1/1000": "ml mL milliliter millilitre", "1/100": "cl cL", "1/10": "dl dL"},
    DOLLAR: {"1": f"{DOLLAR} dollar usd USD buck", "1/100": "cent ¢"},
    "euro": {"1": "€ euro eur EUR"},
    "sterling": {"1": "£ GBP"},
    "rupee": {"1": "₹ rupee rs Rs INR"},
    "yen": {"1": "¥ yen JPY"},
    PERCENT: {"1": "% percent percentage pct"},
    DEGREE: {"1": "deg degree"},
    RADIAN: {"1": "rad radian"},
    "celsius": {"1": "°C celsius"},
    "fahrenheit": {"1": "°F fahrenheit"},
    "force": {"1": "N newton"},
    "energy": {"1": "J joule", "1000": "kJ kilojoule"},
    "power": {"1": "W watt", "1000": "kW kilowatt"},
    "voltage": {"1": "V volt"},
    "current": {"1": "A ampere amp"},
    "frequency": {"1": "Hz hertz"},
    "resistance": {"1": "ohm"},
    "temperature": {"1": "K kelvin"},
    "unit": {"1": "unit"},
}
_KNOWN = {
    name: (kind, Fraction(factor))
    for kind, sizes in _TABLE.items()
    for factor, names in sizes.items()
    for name in names.split()
}
_COMPOUNDS = {"mph": "mi/h", "kmph": "km/h", "kph": "km/h", "cc": "cm^3", "sqm": "m^2", "sqft": "ft^2", "cuft": "ft^3"}
_NOT_UNITS = {"pi", "and", "or", "to", "if", "mod", "where", "for", "is", "the", "are", "not", "no", "when", "with"}
_SYMBOLS = rf"{DOLLAR}€£₹¥"
_LEADING = re.compile(rf"([+-]?)\s*([{_SYMBOLS}])\s*([^{_SYMBOLS}]+)")
_BRACKETED = re.compile(r"([^()]{1,200}?)\s{0,3}\(([A-Za-z\\][^()]{0,200})\)")
_ARTICLES = {"of", "the", "a", "an", "in", "for", "each"}
_POWER_OF_UNIT = re.compile(r"\^\s*(?:\{\s*(-?\d)\s*\}|(-?\d))\s*$")
_WORDS = re.compile(r"[A-Za-z][A-Za-z.]*(?:(?:\s*/\s*|\s+|-)[A-Za-z][A-Za-z.]*){0,5}")
_FUNCTION = re.compile(r"\\(?!frac|sqrt|pi)[A-Za-z]")
_HYPHEN = re.compile(r"(?<=[A-Za-z])-(?=[A-Za-z])")
_UNIT_TOKEN = re.compile(r"([^\W\d_]+\.?|[%¢€£₹¥＄]|°[CF])\s*(?:\^\s*\{?\s*(-?\d)\s*\}?)?")
_PREFIX_POWER = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_SUFFIX_POWER = {"squared": 2, "cubed": 3}


def split_unit(text: str) -> tuple[str, Unit | None]:
    """Split a quantity into the text of its number and its unit, or return the whole text and None if it has no unit.

    The function does not check that the number's text is a number.
    """
    leading = _LEADING.fullmatch(text)
    if leading is not None:
        number, unit = split_unit(leading[3].strip())
        sign = read_unit(leading[2])
        assert sign is not None, "signs of currencies are in the table"
        return leading[1] + number, sign if unit is None or unit.kind == sign.kind else None
    for split in (_in_brackets, _degrees, _text_command, _plain_words):
        found = split(text)
        if found is not None:
            return found
    return text, None


def _in_brackets(text: str) -> tuple[str, Unit | None] | None:
    """Split a number before words in brackets, as in `51 (trucks)`."""
    found = _BRACKETED.fullmatch(text)
    if found is None or read_number(found[1]) is None:
        return None
    words = without_text(found[2])
    return (found[1], read_unit(words)) if len(words) > 3 or _known(words) else None


def _degrees(text: str) -> tuple[str, Unit | None] | None:
    r"""Split a number from a sign of degrees (`30^\circ`, `30^\circ C`), percent or a currency after it."""
    before, mark, after = text.rpartition(r"^\circ")
    if mark and before.strip() and not _FUNCTION.search(before):
        letter = without_text(after).strip(" ().")
        names = {"": "degree", "C": "°C", "F": "°F"}
        return (before.strip(), read_unit(names[letter])) if letter in names else None
    if text[-1:] in tuple(f"%¢{_SYMBOLS}") and text[:-1].strip():
        return text[:-1].strip(), read_unit(text[-1])
    return None


def _text_command(text: str) -> tuple[str, Unit | None] | None:
    r"""Split a number from the `\text{...}` after it, which may have a power or other units after it."""
    start = text.find(r"\text{")
    if start <= 0:
        return None
    number = text[:start].strip().removesuffix(r"\cdot").rstrip()
    unit = read_unit(without_text(text[start:]))
    return (number, unit) if unit is not None and number else None


def _plain_words(text: str) -> tuple[str, Unit | None] | None:
    """Split a number from a known unit, or from words after a space."""
    power = _POWER_OF_UNIT.search(text[-8:])
    body = text[: len(text) - (len(power[0]) if power else 0)].rstrip()
    start = len(body)
    while start and (body[start - 1].isalpha() or body[start - 1] in " ./-¢"):
        start -= 1
    tail = body[start:]
    number, words = text[:start].strip(), tail.strip(" -")
    if not number or not words or number[-1] not in "0123456789.})" or not _WORDS.fullmatch(words):
        return None
    first = re.split(r"[\s./-]", words)[0]
    spaced = tail[:1] in " -"
    is_known = first in _COMPOUNDS or _known(first) is not None
    if power and not is_known:
        return None
    if len(first) == 1 and not (spaced and is_known):
        return None
    if first.lower() in _NOT_UNITS or not (is_known or (spaced and len(first) > 2)):
        return None
    unit = read_unit(words + (power[0] if power else ""))
    return None if unit is None else (number, unit)


def read_unit(text: str) -> Unit | None:
    """Read a unit, such as "km/h", "square cm" or "apples", or return None if the text is not a unit."""
    text = re.sub(r"\bper\b", "/", text.replace(r"\cdot", " ").strip(" ().")).replace("{", "").replace("}", "")
    kinds: Counter[str] = Counter()
    words: set[str] = set()
    factor = Fraction(1)
    for place, part in enumerate(text.split("/")):
        read = _product(part, kinds, words, 1 if place == 0 else -1)
        if read is None:
            return None
        factor *= read
    kind = tuple(sorted((name, power) for name, power in kinds.items() if power))
    return Unit(kind, factor, frozenset(words)) if kind or words else None


def _product(text: str, kinds: Counter[str], words: set[str], sign: int) -> Fraction | None:
    """Add the powers of a product of units to `kinds` and return its factor, or None if the text is no such product."""
    factor, next_power = Fraction(1), 1
    last: tuple[str, Fraction] | None = None
    tokens = _HYPHEN.sub(" ", text).split()
    matches = [_UNIT_TOKEN.fullmatch(token) for token in _joined_powers(tokens)]
    for token in matches:
        if token is None:
            return None
        word = token[1].rstrip(".")
        name = word.lower()
        if name in _PREFIX_POWER:
            next_power = _PREFIX_POWER[name]
        elif name in _SUFFIX_POWER and last is not None:
            power = sign * (_SUFFIX_POWER[name] - 1)
            kinds[last[0]] += power
            factor *= last[1] ** power
        elif name in _COMPOUNDS:
            unit = read_unit(_COMPOUNDS[name])
            assert unit is not None, "compound units are made of known ones"
            factor *= unit.factor**sign
            kinds.update({part: power * sign for part, power in unit.kind})
        elif (last := _known(word)) is not None:
            power = sign * int(token[2] or next_power)
            kinds[last[0]] += power
            factor *= last[1] ** power
            next_power = 1
        elif name not in _ARTICLES:
            words.add(_singular(name))
    return factor


def _joined_powers(tokens: list[str]) -> list[str]:
    """Join each power with the unit before it, as in "cm ^2"."""
    joined: list[str] = []
    for token in tokens:
        if token.startswith("^") and joined:
            joined[-1] += token
        else:
            joined.append(token)
    return joined


def _known(word: str) -> tuple[str, Fraction] | None:
    for name in (word, word.lower() if len(word) > 1 else word):
        for form in (name, _singular(name) if len(name) > 2 else name):
            if form in _KNOWN:
                return _KNOWN[form]
    return None


def _singular(word: str) -> str:
    if len(word) > 3 and word.endswith("ies"):
        return word[:-3] + "y"
    return word[:-1] if len(word) > 2 and word.endswith("s") and not word.endswith("ss") else word
