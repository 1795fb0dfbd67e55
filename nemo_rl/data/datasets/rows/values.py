"""Read values from raw rows, and report unusable ones.

Invariant: a value is either usable or raises a `RowError` with a readable reason.
"""

import math
from decimal import Decimal
from typing import Any

from nemo_rl.data.bad_rows import RowError
from nemo_rl.data.datasets.rows.readers import Row, WrittenFloat

_MOST_DIGITS = 400
"""Largest number of digits before or after the decimal point."""


def text_of(row: Row, key: str) -> str:
    """Return the text of a column, with numbers written out (43.0 as "43", 1e-7 as "0.0000001").

    Raises:
        RowError: The key is missing, or its value is empty, not text, or not valid Unicode.
    """
    text = plain_text(value_of(row, key), repr(key))
    if not text.strip():
        raise RowError(f"empty {key!r}")
    return text


def plain_text(value: Any, what: str) -> str:
    """Return a value as text, which may be empty, with numbers written out (43.0 as "43").

    Args:
        value: A value of a row.
        what: Name of the value, for errors.

    Raises:
        RowError: The value is not text, or not valid Unicode.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowError(f"{what} is {kind_of(value)}, not text or a number")
    try:
        text = _float_text(value, what) if isinstance(value, float) else str(value)
    except ValueError:  # an integer with more digits than Python can write
        raise RowError(f"{what} is a number of too many digits") from None
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise RowError(f"{what} is not valid Unicode (lone surrogate)") from None
    return text


def _float_text(value: float, what: str) -> str:
    """Return a number with the digits in the file, without an exponent, and without a point if it is an integer."""
    if not math.isfinite(value):
        raise RowError(f"{what} is not a finite number")
    number = Decimal(value.text if isinstance(value, WrittenFloat) else repr(float(value)))
    if abs(number.adjusted()) > _MOST_DIGITS:
        raise RowError(f"{what} is a number of too many digits")
    return format(number.quantize(Decimal(1)) if value.is_integer() and abs(value) < 2**53 else number, "f")


def value_of(row: Row, key: str) -> Any:
    """Return the value of a column.

    Raises:
        RowError: The key is missing, or its value is null or an empty list.
    """
    if key not in row:
        raise RowError(f"missing {key!r}")
    if row[key] is None or row[key] == []:
        raise RowError(f"empty {key!r}")
    return row[key]


def kind_of(value: Any) -> str:
    """Return a description of a value's type, for messages."""
    names = {bool: "true/false", list: "a list", dict: "an object", str: "text"}
    return names.get(type(value), f"a {type(value).__name__}")
