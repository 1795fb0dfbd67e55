"""Record and report rows that cannot be used, with their place and the reason, and refuse too many of them.

Readers and data sets collect bad rows. `datasets.setup` checks their share, and the loader checks the share of prompts
that are too long. Invariant: a row is either used or reported with its place. No row is dropped silently.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nemo_rl.utils.errors import DataError

logger = logging.getLogger(__name__)

PLACES_SHOWN = 5


class RowError(Exception):
    """Error of a row that cannot be used. The message has the reason. Readers of rows catch the error."""


@dataclass(frozen=True)
class BadRow:
    """A row that is left out."""

    file: str
    """Path of the file, or name of the data set."""
    line: int
    """Line of a text file in which the row begins (from 1), or index of the row in a table (from 0)."""
    reason: str
    """The reason in a few words."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def summarize_bad_rows(bad_rows: Sequence[BadRow], num_rows: int) -> str:
    """Return a paragraph with the number of bad rows and some of their places, by reason, most frequent first."""
    places = defaultdict(list)
    for row in bad_rows:
        places[row.reason].append(str(row))
    lines = [f"{len(bad_rows)} of {num_rows} rows cannot be used and are left out:"]
    for reason, where in sorted(places.items(), key=lambda item: (-len(item[1]), item[0])):
        shown = ", ".join(where[:PLACES_SHOWN])
        more = f" and {len(where) - PLACES_SHOWN} more" if len(where) > PLACES_SHOWN else ""
        lines.append(f"  {len(where)} x {reason}: {shown}{more}")
    return "\n".join(lines)


def report_bad_rows(
    name: str,
    bad_rows: Sequence[BadRow],
    num_rows: int,
    max_share: float,
    columns: Sequence[str] = (),
    keys: tuple[str, str] = ("input_key", "output_key"),
    advice: Callable[[], str] = str,
) -> None:
    """Log the bad rows of a data set, and refuse it if there are too many.

    Args:
        name: Name of the data set, for messages.
        bad_rows: The rows left out.
        num_rows: Number of all rows that were read, including bad ones.
        max_share: `data.max_bad_row_share`, 0 to 1.
        columns: Columns of the first row, which the error shows if no row is usable.
        keys: Keys of the configuration that choose the columns of question and answer.
        advice: Function that returns a sentence for the error about too many bad rows, or "".

    Raises:
        DataError: No usable row is left, or the share of bad rows is above `max_share`.
    """
    if num_rows == 0:
        raise DataError(f"data set {name} has no rows.")
    summary = summarize_bad_rows(bad_rows, num_rows)
    if len(bad_rows) == num_rows:
        found = f"\nIts first row has the columns {', '.join(columns)}; " if columns else "\n"
        raise DataError(
            f"data set {name} has no usable row. {summary}{found}choose the columns of question and answer with "
            f"{' and '.join(keys)}."
        )
    share = len(bad_rows) / num_rows
    if share > max_share:
        raise DataError(
            f"data set {name}: {share:.1%} of its rows cannot be used, more than "
            f"data.max_bad_row_share={max_share:g} allows. Fix the file, or raise that key to "
            f"train on the rest. {advice()}{summary}"
        )
    if bad_rows:
        logger.warning("Data set %s: %s", name, summary)
