r"""Compare expressions, equations and sets of numbers with math-verify's parser and sympy.

Invariant: small differences count. Numbers are compared with `_DIGITS` digits relative to their size, and expressions
with variables by their values at several points, or by math-verify where they have no values.
"""

import logging
import re
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy.core.relational import Relational

from nemo_rl.environments.grading.comparison.numbers import MIN_DECIMALS, Number
from nemo_rl.environments.grading.comparison.text import DOLLAR

logging.getLogger("math_verify").setLevel(logging.ERROR)

MAX_CHARS = 800
"""Length in characters of the longest text that is parsed."""

_HUGE_DIGITS = 10_000
_MAX_DEPTH = 12
_MOST = {"=": 6, "|": 12, "^": 60}
_SIGNS = re.compile(r"(?:[-+]\s{0,9}){4}")
_DIGITS = 40
_CLOSE = sympy.Rational(1, 10**25)
_VANISHED = sympy.Rational(1, 10**60)
_READING = (
    LatexExtractionConfig(
        try_extract_without_anchor=False,
        boxed_match_priority=0,
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False
        ),
    ),
)
_POINTS = (("17/23", "-5/11"), ("-29/31", "7/3"), ("41/13", "37/19"), ("-53/17", "-13/7"))
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\\circ")
_COMPARING = (ArithmeticError, AttributeError, TypeError, ValueError, NotImplementedError)


class NotComparableError(ValueError):
    """Raised for an answer that was read as mathematics but cannot be compared."""


@lru_cache(maxsize=64)
def read_expression(text: str) -> Any:
    """Parse an answer, or return None if math-verify cannot read it as mathematics."""
    if DOLLAR in text or not _is_simple(text):
        return None
    latex = _DEGREES.sub(r"(\\frac{\1 \\pi}{180})", text).replace(r"\text", "")
    found = parse(f"\\boxed{{{latex}}}", _READING, "no_fallback", parsing_timeout=None, raise_on_error=True)
    return _exact(found[0]) if found else None


def _is_simple(text: str) -> bool:
    """Return whether a text is short and flat enough for the parser, whose time grows fast with nested brackets."""
    if len(text) > MAX_CHARS or _SIGNS.search(text) or any(text.count(sign) > most for sign, most in _MOST.items()):
        return False
    depth, braces = 0, 0
    for position, char in enumerate(text):
        if char in "([{" or char in ")]}":
            depth += 1 if char in "([{" else -1
        if char in "{}" and text[position - 1 : position] != "\\":
            braces += 1 if char == "{" else -1
        if braces < 0 or abs(depth) > _MAX_DEPTH:
            return False
    return braces == 0 and abs(depth) <= 1


def _exact(expression: Any) -> Any:
    """Replace floats by exact fractions, and `i` by the imaginary unit."""
    if not isinstance(expression, sympy.Basic | sympy.MatrixBase):
        return expression
    floats = {number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)}
    units = {symbol: sympy.I for symbol in expression.atoms(sympy.Symbol) if symbol.name == "i"}
    return expression.xreplace({**floats, **units}) if floats or units else expression


def equal_expressions(truth: Any, answer: Any) -> bool:
    """Compare two parsed answers.

    Raises:
        NotComparableError: sympy fails.
    """
    try:
        if isinstance(truth, sympy.Expr) and isinstance(answer, sympy.Expr):
            return _equal_values(truth, answer)
        if isinstance(truth, Relational) and isinstance(answer, Relational):
            return _equal_relations(truth, answer)
        return bool(_is_same_kind(truth, answer) and _verified(truth, answer))
    except _COMPARING as error:
        what = f"{str(truth)[:100]} with {str(answer)[:100]}"
        raise NotComparableError(f"sympy cannot compare {what}: {error}") from error


def _is_same_kind(truth: Any, answer: Any) -> bool:
    """Return whether the answers can be equal: a plain value never equals a relation or a set."""
    return not (isinstance(truth, sympy.Expr) or isinstance(answer, sympy.Expr)) or isinstance(
        truth, sympy.MatrixBase | sympy.MatrixExpr
    )


def _verified(truth: Any, answer: Any) -> bool:
    return bool(verify(truth, answer, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True))


def rational(number: Number) -> sympy.Rational:
    """Return the exact value of a number."""
    return sympy.Rational(number.value.numerator, number.value.denominator)


def is_close(decimal: Number, expression: Any) -> bool:
    """Return whether a decimal equals an expression without variables, or is its rounded or cut value."""
    if not isinstance(expression, sympy.Expr) or expression.free_symbols:
        return False
    if equal_expressions(rational(decimal), expression):
        return True
    if decimal.decimals is None or decimal.decimals < MIN_DECIMALS or decimal.digits < MIN_DECIMALS:
        return False
    value = sympy.N(expression, _DIGITS)
    if not value.is_real or expression.is_integer:
        return False
    exact = rational(decimal)
    return bool(abs(value - exact) < sympy.Rational(1, 10**decimal.decimals))


def _equal_values(truth: sympy.Expr, answer: sympy.Expr) -> bool:
    symbols = truth.free_symbols | answer.free_symbols
    if symbols:
        return _equal_with_symbols(truth, answer, sorted(symbols, key=str))
    if truth == answer:
        return True
    return _equal_complex(truth, answer)


def _equal_complex(truth: sympy.Expr, answer: sympy.Expr) -> bool:
    """Compare two values without variables, with a tolerance relative to their size."""
    if not (_is_huge(truth) or _is_huge(answer)):
        truth, answer = truth.doit(), answer.doit()
    if truth.is_Rational and answer.is_Rational:
        return bool(truth == answer)
    if truth in _UNBOUNDED or answer in _UNBOUNDED:
        return bool(truth == answer)
    values = [sympy.N(value, _DIGITS) for value in (truth, answer)]
    if not all(value.is_number and value.is_finite is not False for value in values):
        return _verified(truth, answer)
    size = max(abs(value) for value in values)
    if size < _VANISHED and not (truth.is_Rational and answer.is_Rational):
        return bool(sympy.simplify(truth - answer) == 0)
    return bool(abs(values[0] - values[1]) <= _CLOSE * size)


def _is_huge(expression: sympy.Expr) -> bool:
    """Return whether the expression has a power or a factorial with too many digits to compute."""
    for power in expression.atoms(sympy.Pow):
        base, exponent = power.args
        if base.is_Rational and exponent.is_number:
            size = max(len(str(part)) for part in (base.p, base.q))
            if not exponent.is_Rational or abs(exponent.p) * size > _HUGE_DIGITS:
                return True
    return any(not call.args[0].is_Integer or call.args[0] > _HUGE_DIGITS for call in expression.atoms(sympy.factorial))


_UNBOUNDED = (sympy.oo, -sympy.oo, sympy.zoo, sympy.nan)


def _equal_with_symbols(truth: sympy.Expr, answer: sympy.Expr, symbols: list[Any]) -> bool:
    """Compare the values of two expressions at several points, or let math-verify decide if they have none there."""
    decided = 0
    for number, point in enumerate(_POINTS):
        values = {
            symbol: sympy.Rational(point[(place + number) % 2]) + sympy.Rational(place, 7)
            for place, symbol in enumerate(symbols)
        }
        pair = [expression.xreplace(values) for expression in (truth, answer)]
        if any(value.free_symbols or not value.doit().is_number for value in pair):
            continue
        if any(value.doit().has(*_UNBOUNDED) for value in pair):
            continue
        if not _equal_complex(pair[0], pair[1]):
            return False
        decided += 1
    return decided >= 2 or _verified(truth, answer)


_FLIPPED = {sympy.StrictLessThan: sympy.StrictGreaterThan, sympy.LessThan: sympy.GreaterThan}


def _equal_relations(truth: Relational, answer: Relational) -> bool:
    """Compare two relations, where equations may differ by a constant factor and inequalities by a positive one."""
    (first, first_kind), (second, second_kind) = _one_sided(truth), _one_sided(answer)
    if first_kind is not second_kind:
        return False
    if first.free_symbols != second.free_symbols:
        return False
    ratio = sympy.cancel(sympy.together(first / second)) if second != 0 else sympy.nan
    if ratio.is_number and ratio.is_finite and ratio != 0:
        return bool(first_kind in (sympy.Eq, sympy.Ne) or ratio.is_positive)
    if first_kind is sympy.Eq:
        parts = [sympy.fraction(sympy.together(side))[0] for side in (first, second)]
        ratio = sympy.cancel(parts[0] / parts[1]) if parts[1] != 0 else sympy.nan
        return bool(ratio.is_number and ratio.is_finite and ratio != 0)
    if len(first.free_symbols) == 1:
        return bool(truth.as_set() == answer.as_set())
    return False


def _one_sided(relation: Relational) -> tuple[sympy.Expr, type]:
    """Rewrite a relation with 0 on its right side, and return its left side and the class of its sign."""
    kind = type(relation)
    left, right = relation.lhs, relation.rhs
    if kind in _FLIPPED:
        return (right - left).doit(), _FLIPPED[kind]
    return (left - right).doit(), kind
