"""A calculator: arithmetic expressions, computed exactly where possible, without `eval`."""

import ast
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

_MAX_CHARS = 1000
_MAX_BITS = 4096
"""Largest number of bits of an integer. Larger integers take too long to compute and to read."""

type Number = Fraction | float

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(math, name)
    for name in ("sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tan", "asin", "acos", "atan", "floor", "ceil")
} | {"abs": abs, "round": round, "min": min, "max": max}
_CONSTANTS = {"pi": math.pi, "e": math.e}


def calculator(expression: str) -> str:
    """Compute an arithmetic expression, for example 3*(2+5)/4 or sqrt(2)**3.

    Args:
        expression: numbers, + - * / // % ** ^, brackets, functions such as sqrt, log, sin, min and round, pi and e.
    """
    if len(expression) > _MAX_CHARS:
        raise ValueError(f"the expression has {len(expression)} characters; at most {_MAX_CHARS} are allowed")
    try:
        tree = ast.parse(expression.strip().removesuffix("=").replace("^", "**"), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError(f"{expression!r} is not an arithmetic expression") from None
    return _shown(_value(tree.body))


def _value(node: ast.expr) -> Number:
    """Compute a node of the syntax tree, with exact integers and exact quotients of integers."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return Fraction(value) if isinstance(value, int) else _finite(value)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BINARY:
            return _checked(_BINARY[type(sign)](_value(left), _value(right)))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            return _checked(_UNARY[type(sign)](_value(operand)))
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _checked(_FUNCTIONS[name](*[_plain(_value(argument)) for argument in arguments]))
    raise ValueError(f"{ast.unparse(node)[:80]!r} is not allowed; use numbers, + - * / // % **, and {_known()}")


def _known() -> str:
    return ", ".join([*_FUNCTIONS, *_CONSTANTS])


def _power(base: Number, exponent: Number) -> Number:
    """Return the power, or refuse it before computing if its result is too long."""
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = max(abs(base.numerator).bit_length(), base.denominator.bit_length())
        if bits * abs(exponent) > _MAX_BITS and bits > 1:
            raise ValueError(f"the result has more than {_MAX_BITS} bits")
        return base ** int(exponent)
    result = float(base) ** float(exponent)
    if isinstance(result, complex):
        raise ValueError("the result is not a real number")
    return _finite(result)


def _checked(value: Any) -> Number:
    if isinstance(value, int):
        value = Fraction(value)
    if isinstance(value, Fraction):
        if max(abs(value.numerator).bit_length(), value.denominator.bit_length()) > _MAX_BITS:
            raise ValueError(f"the result has more than {_MAX_BITS} bits")
        return value
    return _finite(value)


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"the result is {value}")
    return value


def _plain(value: Number) -> int | float:
    """Convert a number, unless it is an integer, to the type that functions of `math` accept."""
    return int(value) if isinstance(value, Fraction) and value.denominator == 1 else float(value)


def _shown(value: Number) -> str:
    """Return a number as text, with all digits of an integer and up to 12 significant digits of any other number."""
    if isinstance(value, Fraction) and value.denominator == 1:
        return str(value.numerator)
    if float(value).is_integer() and abs(float(value)) < 2**53:
        return str(int(value))
    return f"{float(value):.12g}"
