"""Compare a final answer with the ground truth, by the rules in docs/environments/environments.md.

    clean both ─► equal text ─► words, times, ratios, bases ─► lists, sets, intervals, matrices: part by part
               ─► equations ─► units ─► exact numbers ─► sympy

Invariant: the comparison says that an answer is equal or different, or it raises an error if it cannot decide.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from nemo_rl.environments.grading.comparison import symbolic
from nemo_rl.environments.grading.comparison.numbers import (
    DEGREE,
    PERCENT,
    RADIAN,
    Number,
    Unit,
    equal_numbers,
    read_number,
    read_unit,
    split_unit,
)
from nemo_rl.environments.grading.comparison.text import (
    MAX_DEPTH,
    clean,
    closing,
    split_top,
    squeezed,
    with_commas,
    without_text,
)
from nemo_rl.environments.grading.comparison.words import (
    Same,
    compare_bases,
    compare_ratios,
    compare_times,
    compare_words,
    plain_words,
)

MAX_PARTS = 100
"""Largest number of parts of an answer that is compared."""

LIST, SET, UNION = ",", r"\{\}", r"\cup"

_MATRIX = re.compile(r"\\begin\{([bpvBV]?matrix|array)\}(?:\{[lcr| ]{0,20}\})?")
_MEMBER = re.compile(r"\s*([A-Za-z](?:_\{?\w\}?)?)\s*\\in\s+(.+)", re.DOTALL)
_BUILDER = re.compile(
    r"\\\{\s?[a-z]\s?(?:\\in\s?\\mathbb\s?\{?R\}?)?\s?(?:\\mid(?![A-Za-z])|[|:])\s?([^{}]{1,200})\\\}", re.DOTALL
)
_RELATION = re.compile(r"\\le |\\ge |<|>")
_SIGNS = re.compile(r"\\(pm|mp)(?![A-Za-z])")
_VARIABLE = re.compile(r"\\?[A-Za-z]+(?:_\{?\w{1,5}\}?|'|\(\\?[A-Za-z]{1,5}\))*")
_SPACED_COMMA = re.compile(r",(?!\s)(?=\d{3}(?!\d))")


@dataclass(frozen=True)
class AnswerCollection:
    """An answer with several parts."""

    kind: str
    """`LIST`, `SET`, `UNION`, or the brackets around an interval, such as "[)"."""
    parts: list[str]
    """Parts of the answer in order."""


def read_collection(text: str) -> AnswerCollection | None:
    """Read a list, a set, a tuple or an interval, or return None if the answer is a single value."""
    if r"\cup" in text:
        parts = [part.strip() for part in _split_word(text, r"\cup")]
        if len(parts) > 1:
            return AnswerCollection(UNION, parts)
    inside = _inside(text, r"\{", r"\}")
    if inside is not None and not re.search(r"\\mid|[|:]|\\in ", inside):
        return AnswerCollection(SET, _commas(inside))
    if text[:1] in ("(", "[") and closing(text, 0) == len(text) - 1:
        parts = _commas(text[1:-1])
        return AnswerCollection(text[0] + text[-1], parts) if len(parts) > 1 else None
    if read_number(split_unit(text)[0]) is not None or r"\begin" in text:
        return None
    parts = split_top(_listed(text), ",;")
    return AnswerCollection(LIST, [part for part in parts if part]) if len(parts) > 1 else None


def _listed(text: str) -> str:
    """Return a text with commas for "and", and without thousands separators if other commas are followed by a space."""
    text = with_commas(text)
    return _SPACED_COMMA.sub("", text) if ", " in text and re.search(r"\d, ", text) else text


def _inside(text: str, opening: str, ending: str) -> str | None:
    if not text.startswith(opening) or not text.endswith(ending) or text.count(opening) != 1:
        return None
    return text[len(opening) : -len(ending)]


def _commas(text: str) -> list[str]:
    return split_top(_listed(text), ",;")


def _split_word(text: str, word: str) -> list[str]:
    parts, start = [], 0
    place = text.find(word)
    while place >= 0:
        head = text[start:place]
        if head.count("(") + head.count("[") == head.count(")") + head.count("]"):
            parts.append(head)
            start = place + len(word)
        place = text.find(word, place + len(word))
    return [*parts, text[start:]]


def compare_collections(truth: str, answer: str, same: Same) -> bool | None:
    """Compare two answers of several parts, or return None if neither answer has several parts."""
    truth, answer = _without_name(truth), _without_name(answer)
    signed = r"\pm" in truth or r"\pm" in answer
    first = read_collection(_with_both_signs(truth)) or _interval(truth, answer)
    second = read_collection(_with_both_signs(answer)) or _interval(answer, truth)
    if first is None and second is None:
        return None
    if first is None or second is None:
        known, other = (first, answer) if second is None else (second, truth)
        assert known is not None, "one of them is a collection"
        is_alone = known.kind == SET and len(known.parts) == 1 and not signed
        return same(known.parts[0], other) if is_alone else False
    if max(len(first.parts), len(second.parts)) > MAX_PARTS:
        raise ValueError(f"an answer with more than {MAX_PARTS} parts cannot be compared")
    return _equal_collections(first, second, same)


def _equal_collections(first: AnswerCollection, second: AnswerCollection, same: Same) -> bool:
    if SET in (first.kind, second.kind) and {first.kind, second.kind} <= {SET, LIST}:
        return _equal_unordered(_distinct(first.parts, same), _distinct(second.parts, same), same)
    if len(first.parts) != len(second.parts):
        return False
    if first.kind == second.kind and first.kind in (LIST, UNION):
        if _are_named(first.parts) is not _are_named(second.parts):
            return _equal_ordered(first.parts, second.parts, same)
        return _equal_unordered(first.parts, second.parts, same)
    is_listed = first.kind == LIST and second.kind in ("()", "[]")
    if first.kind == second.kind or is_listed or (first.kind == "()" and second.kind == LIST):
        return _equal_ordered(first.parts, second.parts, same)
    return False


def _equal_ordered(first: list[str], second: list[str], same: Same) -> bool:
    return all(same(one, other) for one, other in zip(first, second, strict=True))


def _equal_unordered(first: list[str], second: list[str], same: Same) -> bool:
    """Return whether each part of one answer equals a different part of the other, in any order."""
    if len(first) != len(second):
        return False
    rest = list(second)
    for part in first:
        match = next((other for other in rest if squeezed(other) == squeezed(part)), None)
        match = match or next((other for other in rest if same(part, other)), None)
        if match is None:
            return False
        rest.remove(match)
    return True


def _distinct(parts: list[str], same: Same) -> list[str]:
    distinct: list[str] = []
    for part in parts:
        if not any(same(part, other) for other in distinct):
            distinct.append(part)
    return distinct


def _are_named(parts: list[str]) -> bool:
    """Return whether the parts give values to different names, such as x=1 and y=2."""
    names = [name.strip() for part in parts if (name := part.partition("=")[0]) != part]
    return len(names) == len(parts) and len(set(names)) > 1


def _without_name(text: str) -> str:
    r"""Return the S of "x \in S" or the list that follows "x =", or the text itself if it has another form."""
    builder = _BUILDER.fullmatch(text)
    if builder is not None:
        return builder[1].strip()
    member = _MEMBER.fullmatch(text)
    if member is not None:
        return member[2].strip()
    name, equals, rest = text.partition("=")
    if equals and "=" not in rest and _VARIABLE.fullmatch(squeezed(name)) and _SIGNS.search(rest):
        return rest.strip()
    if equals and "=" not in rest and read_collection(rest.strip()) is not None:
        tuple_name = name.strip()
        if tuple_name.startswith("(") or _VARIABLE.fullmatch(squeezed(tuple_name)):
            return rest.strip()
    return text


def _with_both_signs(text: str) -> str:
    r"""Replace each part that has \pm by two parts."""
    if _SIGNS.search(text) is None:
        return text
    written = []
    for part in split_top(with_commas(text), ",;"):
        if _SIGNS.search(part) is None:
            written.append(part)
            continue
        written += [_SIGNS.sub(_sign_of(upper), part).strip().removeprefix("+").strip() for upper in ("pm", "mp")]
    return ", ".join(written)


def _sign_of(plus: str) -> Callable[[re.Match[str]], str]:
    """Return a function that replaces `plus` ("pm" or "mp") by "+", and the other of the two commands by "-"."""
    return lambda sign: "+" if sign[1] == plus else "-"


def _interval(text: str, other: str) -> AnswerCollection | None:
    """Return the interval of an inequality if the other answer is an interval, or an inequality of the same name."""
    found = _named_interval(text)
    if found is None:
        return None
    named = _named_interval(other)
    if named is not None:
        return found[1] if named[0] == found[0] else None
    return found[1] if other[:1] in ("(", "[") and read_collection(other) is not None else None


def _named_interval(text: str) -> tuple[str, AnswerCollection] | None:
    parts = [part.strip() for part in _RELATION.split(text)]
    signs = [sign.strip() for sign in _RELATION.findall(text)]
    names = [place for place, part in enumerate(parts) if re.fullmatch(r"[A-Za-z](?:_\{?\w\}?)?", part)]
    if len(parts) not in (2, 3) or len(names) != 1 or (len(parts) == 3 and names != [1]):
        return None
    if len(parts) == 3 and len({sign in ("<", r"\le") for sign in signs}) != 1:
        return None
    name = parts[names[0]]
    if signs[0] in (">", r"\ge"):
        parts, signs = parts[::-1], [{">": "<", r"\ge": r"\le"}[sign] for sign in signs[::-1]]
    place = parts.index(name)
    if any(plain_words(part) is not None for part in parts if part != name):
        return None
    low = (parts[place - 1], "(" if signs[0] == "<" else "[") if place else (r"-\infty", "(")
    high = (parts[place + 1], ")" if signs[-1] == "<" else "]") if place + 1 < len(parts) else (r"\infty", ")")
    return name, AnswerCollection(low[1] + high[1], [low[0], high[0]])


def compare_matrices(truth: str, answer: str, same: Same) -> bool | None:
    """Compare matrices and column vectors entry by entry."""
    first, second = _matrix(truth), _matrix(answer)
    if first is None or second is None:
        return None
    if [len(row) for row in first] != [len(row) for row in second] or sum(map(len, first)) > MAX_PARTS:
        return False
    return all(_equal_ordered(one, other, same) for one, other in zip(first, second, strict=True))


def _matrix(text: str) -> list[list[str]] | None:
    start = _MATRIX.match(text)
    if start is None or start[1] in ("vmatrix", "Vmatrix") or not text.endswith(rf"\end{{{start[1]}}}"):
        return None
    body = text[start.end() : -len(rf"\end{{{start[1]}}}")]
    if r"\begin" in body:
        return None
    rows = [row for row in body.split(r"\\") if row.strip()]
    return [[entry.strip() for entry in row.split("&")] for row in rows]


MAX_CHARS = 4000
"""Longest answer that is compared by more than its text."""

_MAX_DEPTH = 8
_MAX_QUANTITY = 400
_NAME = re.compile(r"\\?[A-Za-z]+(?:_\{?\w{1,5}\}?|'|\(\\?[A-Za-z]{1,5}\)|[A-Z])*")
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z][A-Za-z.]*)\s*(?:,|and)?\s*")
_LEADING_WORDS = re.compile(r"\\text\{[^{}]{1,200}\}\s*(?==|:|\S)")


def same_answer(truth: str, answer: str) -> bool:
    """Compare an answer with the ground truth.

    Raises:
        ValueError: the ground truth has no text, or the answer cannot be compared.
    """
    if truth.strip() == answer.strip():
        return True
    for name, text in (("the ground truth", truth), ("the answer", answer)):
        if len(text) > MAX_CHARS:
            raise ValueError(f"{name} has {len(text)} characters; at most {MAX_CHARS} can be compared")
    return _same(clean(truth), clean(answer), 0)


def _same(truth: str, answer: str, depth: int) -> bool:
    if squeezed(truth) == squeezed(answer):
        return True
    if not truth or not answer or depth > _MAX_DEPTH:
        return False

    def same_part(first: str, second: str) -> bool:
        return _same(clean(first), clean(second), depth + 1)

    for rule in _RULES:
        verdict = rule(truth, answer, same_part)
        if verdict is not None:
            return verdict
    return _same_value(_without_brackets(truth), _without_brackets(answer))


def _compare_equations(truth: str, answer: str, same: Same) -> bool | None:
    """Compare equations that give a value to a name: if both sides have a name, the names must be equal."""
    sides = [list(_equation_sides(text)) for text in (truth, answer)]
    if len(sides[0]) == 1 and len(sides[1]) == 1:
        return None
    names = [_name(side) for side in sides]
    if names[0] and names[1]:
        return names[0] == names[1] and same(sides[0][-1], sides[1][-1]) or _maybe_equation(sides, names)
    if len(sides[0]) == 1:
        return same(truth, sides[1][-1]) if names[1] or read_number(truth) is not None else None
    if len(sides[1]) == 1:
        return same(sides[0][-1], answer) if names[0] else False
    return None


def _maybe_equation(sides: list[list[str]], names: list[str]) -> bool | None:
    """Return None (undecided) if two equations may be one relation, solved for different variables, or else False."""
    if names[0] == names[1]:
        return False
    return None if all(re.search(r"[A-Za-z]", side[-1]) for side in sides) else False


def _equation_sides(text: str) -> list[str]:
    sides = split_top(text, "=")
    return sides if all(sides) and "<" not in text and ">" not in text else [text]


def _name(sides: list[str]) -> str:
    """Return the name that an equation gives a value to, such as "x" in x=5 or in 5=x, or "" if there is none."""
    if len(sides) < 2:
        return ""
    for side in (0, -1):
        name = squeezed(without_text(sides[side]))
        if _NAME.fullmatch(name) and read_number(name) is None:
            if side == -1:
                sides.reverse()
            return name
    if _LEADING_WORDS.fullmatch(sides[0] + " ="):
        return squeezed(without_text(sides[0]))
    return ""


def _compare_quantities(truth: str, answer: str, same: Same) -> bool | None:
    """Compare numbers with units. The unit of one of them may be missing."""
    if max(len(truth), len(answer)) > _MAX_QUANTITY:
        return None
    sums = [_sum_of_units(text) for text in (truth, answer)]
    if sums[0] is not None or sums[1] is not None:
        return _equal_sums(sums, (truth, answer))
    (first, first_unit), (second, second_unit) = split_unit(truth), split_unit(answer)
    if first_unit is None and second_unit is None:
        return None
    if first_unit is not None and second_unit is not None:
        return _equal_units(first, first_unit, second, second_unit, same)
    unit = first_unit or second_unit
    assert unit is not None, "one of them has a unit"
    number, other = (first, second) if first_unit is not None else (second, first)
    if same(first, second):
        return True
    if unit.name == PERCENT:
        return same(other, rf"\frac{{{number}}}{{100}}")
    if unit.name == DEGREE and r"\pi" in other:
        return same(other, rf"({number})\cdot\frac{{\pi}}{{180}}")
    return False


def _equal_units(first: str, first_unit: Unit, second: str, second_unit: Unit, same: Same) -> bool:
    if {first_unit.name, second_unit.name} == {DEGREE, RADIAN}:
        first, second = (
            rf"({number})\cdot\frac{{\pi}}{{180}}" if unit.name == DEGREE else number
            for number, unit in ((first, first_unit), (second, second_unit))
        )
        return same(first, second)
    if not first_unit.is_like(second_unit):
        return False
    if first_unit.factor == second_unit.factor:
        return same(first, second)
    numbers = [read_number(text) for text in (first, second)]
    if numbers[0] is None or numbers[1] is None:
        factor = second_unit.factor / first_unit.factor
        return same(first, rf"({second})\cdot\frac{{{factor.numerator}}}{{{factor.denominator}}}")
    return numbers[0].value * first_unit.factor == numbers[1].value * second_unit.factor


def _sum_of_units(text: str) -> Unit | None:
    """Return the sum of quantities of one kind, such as 7 h 30 min, as one unit, or None for any other text."""
    words, total, kind, position, count = without_text(text), Fraction(0), None, 0, 0
    while (part := _QUANTITY.match(words, position)) is not None:
        unit, number = read_unit(part[2]), read_number(part[1])
        if unit is None or number is None or (kind is not None and unit.kind != kind) or unit.words:
            return None
        total, kind, position, count = total + number.value * unit.factor, unit.kind, part.end(), count + 1
    return Unit(kind, total) if kind is not None and position == len(words) and count > 1 else None


def _equal_sums(sums: list[Unit | None], texts: tuple[str, str]) -> bool:
    sizes = []
    for total, text in zip(sums, texts, strict=True):
        if total is not None:
            sizes.append(total)
            continue
        number_text, unit = split_unit(text)
        number = read_number(number_text)
        if number is None or unit is None:
            return False
        sizes.append(Unit(unit.kind, unit.factor * number.value))
    return sizes[0] == sizes[1]


def _same_value(truth: str, answer: str) -> bool:
    """Compare two values: numbers exactly, everything else with sympy."""
    first, second = read_number(truth), read_number(answer)
    if first is not None and second is not None:
        return equal_numbers(first, second)
    left, right = symbolic.read_expression(truth), symbolic.read_expression(answer)
    if left is None or right is None:
        return squeezed(truth).casefold() == squeezed(answer).casefold()
    for number, expression in ((first, right), (second, left)):
        if number is not None and number.decimals is not None:
            return symbolic.is_close(number, expression)
    return symbolic.equal_expressions(_value(first, left), _value(second, right))


def _value(number: Number | None, expression: object) -> object:
    return expression if number is None else symbolic.rational(number)


def _without_brackets(text: str) -> str:
    for _ in range(MAX_DEPTH):
        if not text.startswith(("(", "[")) or closing(text, 0) != len(text) - 1:
            break
        text = text[1:-1].strip()
    return text


_RULES: tuple[Callable[[str, str, Same], bool | None], ...] = (
    compare_words,
    compare_times,
    compare_bases,
    compare_ratios,
    compare_matrices,
    compare_collections,
    _compare_equations,
    _compare_quantities,
)
