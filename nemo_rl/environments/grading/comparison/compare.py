r"""Decide whether a final answer equals the ground truth; the rules are in docs/environments/environments.md.

    clean both ─► equal text ─► words, times, ratios, bases ─► lists, sets, intervals, matrices: part by part
               ─► equations ─► units ─► exact numbers ─► sympy

Invariant: an answer is equal, different, or cannot be compared, which raises.
"""

import re
from collections.abc import Callable
from fractions import Fraction

from nemo_rl.environments.grading.comparison import symbolic
from nemo_rl.environments.grading.comparison.numbers import Number, equal_numbers, read_number
from nemo_rl.environments.grading.comparison.parts import compare_collections, compare_matrices
from nemo_rl.environments.grading.comparison.text import MAX_DEPTH, clean, closing, split_top, squeezed, without_text
from nemo_rl.environments.grading.comparison.units import DEGREE, PERCENT, RADIAN, Unit, read_unit, split_unit
from nemo_rl.environments.grading.comparison.words import (
    Same,
    compare_bases,
    compare_ratios,
    compare_times,
    compare_words,
)

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
    """Compare what is given to a name: both names count, one alone does not."""
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
    """Return None for equations of several variables, which may be solved for another one."""
    if names[0] == names[1]:
        return False
    return None if all(re.search(r"[A-Za-z]", side[-1]) for side in sides) else False


def _equation_sides(text: str) -> list[str]:
    sides = split_top(text, "=")
    return sides if all(sides) and "<" not in text and ">" not in text else [text]


def _name(sides: list[str]) -> str:
    """Return the name that gets a value, such as "x" of x=5 or of 5=x; "" if there is none."""
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
    """Compare numbers with units; a unit may be left out on one side."""
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
    """Return the size of several quantities of one kind, such as 7 h 30 min; None if the text is something else."""
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
