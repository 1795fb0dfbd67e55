"""Records and reports rows that cannot be used: their place, the reason, and whether there are too many.

Readers and data sets collect bad rows; `datasets.setup` checks their share, and the loader does so for prompts that
turn out to be too long. Invariant: a row is either used or reported with its place; no row is dropped silently.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nemo_rl.utils.errors import DataError

logger = logging.getLogger(__name__)

PLACES_SHOWN = 5


class RowError(Exception):
    """A row cannot be used, for the reason in the message. Readers of rows catch this error."""


@dataclass(frozen=True)
class BadRow:
    """A row that is left out."""

    file: str
    """Path of the file, or name of the data set."""
    line: int
    """1-based line of a text file where the row begins; 0-based row index of a table (Parquet, Arrow, hub data
    sets)."""
    reason: str
    """The reason, as a phrase."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def summarize_bad_rows(bad_rows: Sequence[BadRow], num_rows: int) -> str:
    """Return one paragraph: counts by reason, most frequent first, with the first few places of each."""
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
        num_rows: All rows read, bad ones included.
        max_share: `data.max_bad_row_share`, 0 to 1.
        columns: Columns that the first row has, to help when no row is usable.
        keys: Keys of the configuration that choose the columns of question and answer.
        advice: Returns a sentence for the refusal of too many bad rows, or "".

    Raises:
        DataError: No usable row is left, or the share of bad rows is above `max_share`.
    """
    if num_rows == 0:
        raise DataError(f"data set {name} has no rows.")
    summary = summarize_bad_rows(bad_rows, num_rows)
    if len(bad_rows) == num_rows:
        found = f"\nIts first row has the columns {', '.join(columns)}; " if columns else "\n"
        raise DataError(
            f"data set {name} has no usable row. {summary}{found}"
            f"choose the columns of question and answer with {' and '.join(keys)}."
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
