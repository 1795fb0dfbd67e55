"""Read a browser's query for samples: filters, order and page."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from nemo_rl.commands.report.sample_lines import COLUMNS

_RANGES = ("step", "reward", "length")
_EQUAL = ("phase", "outcome", "task", "step", "group", "idx")
_MOST_ROWS = 200
_LARGEST = 2**62


@dataclass(frozen=True)
class SampleQuery:
    """A query for one page of the samples that match some filters."""

    equal: Mapping[str, str] = field(default_factory=dict)
    """Value that a column must have, by column."""
    least: Mapping[str, float] = field(default_factory=dict)
    """Smallest value of a column, by column."""
    most: Mapping[str, float] = field(default_factory=dict)
    """Largest value of a column, by column."""
    text: str = ""
    """Text that the end of the answer must contain; upper and lower case are the same."""
    first_of_step: bool = False
    """Whether only the first matching sample of each step is wanted."""
    sort: str = ""
    """Column to sort by; "": the order of steps."""
    descending: bool = False
    """Whether the largest value is first; samples without a value are last in any case."""
    offset: int = 0
    """Number of samples before the page."""
    limit: int = 25
    """Largest number of rows of the page."""

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> Self:
        """Read the parameters of a request: `phase`, `step_from`, `step_to`, `text`, `sort`, `offset` and so on.

        Raises:
            ValueError: a parameter is unknown, or its value has the wrong type.
        """
        given: dict[str, Any] = {"equal": {}, "least": {}, "most": {}}
        for name, value in parameters.items():
            column, _, bound = name.rpartition("_")
            if column in _RANGES and bound in ("from", "to"):
                given["least" if bound == "from" else "most"][column] = _number(name, value)
            elif name in _EQUAL:
                given["equal"][name] = value
            elif name == "text" or (name == "sort" and value in ("", *COLUMNS)):
                given[name] = value
            elif name in ("first_of_step", "descending") and value in ("0", "1"):
                given[name] = value == "1"
            elif name in ("offset", "limit"):
                given[name] = int(_number(name, value))
            else:
                raise ValueError(f"{name}={value!r} is not a filter of samples")
        query = cls(**given)
        if not 0 <= query.offset < _LARGEST or not 1 <= query.limit <= _MOST_ROWS:
            raise ValueError(f"offset must be at least 0, and limit from 1 to {_MOST_ROWS}")
        return query

    def conditions(self) -> tuple[str, list[Any]]:
        """Return a condition in SQL, and the values of its placeholders."""
        conditions, values = ["1"], list[Any]()
        for sign, wanted in (("=", self.equal), (">=", self.least), ("<=", self.most)):
            for name, value in wanted.items():
                conditions.append(f'"{name}" {sign} ?')
                values.append(value)
        if self.text:
            conditions.append("has(preview, ?)")
            values.append(self.text.lower())
        return " AND ".join(conditions), values

    def order(self) -> str:
        """Return the order in SQL."""
        by_steps = "step, phase, number"
        if not self.sort:
            return by_steps
        return f'"{self.sort}" IS NULL, "{self.sort}" {"DESC" if self.descending else "ASC"}, {by_steps}'


def _number(name: str, text: str) -> float:
    """Return a finite number."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name}={text!r} is no number")
    return number
