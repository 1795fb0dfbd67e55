"""Find rows whose texts contain control tokens. The rows are reported once per data set, or left out.

Arrow tables are searched column by column, and rows in memory one by one. Only rows with a match are formatted.
Invariant: only tokens in texts that the chat template gets are counted.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_rl.data.bad_rows import BadRow
from nemo_rl.data.datasets.raw_dataset import FormattedRow, FormattedRows, RowView, row_place
from nemo_rl.data.datasets.rows.images import is_image_column
from nemo_rl.data.datasets.rows.readers import is_table
from nemo_rl.data.messages.control_tokens import ControlTokens

if TYPE_CHECKING:
    # # pyarrow is imported when the first table is read.
    import pyarrow

logger = logging.getLogger(__name__)

_TEXT_KEYS = ("messages", "pair", "feedback", "scored", "labelled_steps", "choice", "tools")
"""Keys of formatted rows with the rendered texts. If a row has none of these keys, all of its texts are searched."""
_ESCAPED = r"\\u00"
"""Start of the escaped form of a character in JSON inside a text."""
_BATCH_ROWS = 10_000
_LOOKED_AT = 2000
"""Number of rows that are searched in a data set that makes its rows when they are read."""


def check_control_tokens(
    name: str, rows: Sequence[FormattedRow], control: ControlTokens, policy: str
) -> tuple[Sequence[FormattedRow], list[BadRow]]:
    """Report the rows of a data set whose texts contain special tokens, or leave these rows out.

    Args:
        name: name of the data set, for messages.

    Returns:
        The rows to use, and the rows left out.
    """
    if policy == "allow" or not control.special:
        return rows, []
    found, num_searched = rows_with_control_tokens(rows, control)
    if not found:
        return rows, []
    if policy == "leave_out":
        kept = np.array([position for position in range(len(rows)) if position not in found], dtype=np.int64)
        reason = "its texts hold the control token {!r} (data.control_tokens_in_rows=leave_out)"
        bad = [BadRow(*row_place(rows, position), reason.format(token)) for position, token in found.items()]
        return RowView(rows, kept), bad
    first, token = next(iter(found.items()))
    file, line = row_place(rows, first)
    logger.warning(
        "Data set %s: %d of %d rows hold control tokens in their texts, the first %r in %s:%d. They are encoded as %s "
        "(data.control_tokens_in_rows).",
        name,
        len(found),
        num_searched,
        token,
        file,
        line,
        "text" if policy == "as_text" else "such",
    )
    return rows, []


def rows_with_control_tokens(rows: Sequence[FormattedRow], control: ControlTokens) -> tuple[dict[int, str], int]:
    """Return the first special token by the position of each row that has one, and the number of searched rows."""
    if not len(rows):
        return {}, 0
    candidates = _candidates(rows, _Search(control.special))
    num_searched = min(len(rows), _LOOKED_AT) if candidates is None else len(rows)
    positions = range(num_searched) if candidates is None else np.flatnonzero(candidates).tolist()
    found = {}
    for position in positions:
        row = rows[position]
        rendered = [row[key] for key in _TEXT_KEYS if key in row] if isinstance(row, Mapping) else [row]
        tokens = (control.first_in(text) for text in _texts(rendered or row))
        token = next((token for token in tokens if token is not None), None)
        if token is not None:
            found[position] = token
    return found, num_searched


class _Search:
    """Search for texts that may contain one of the given tokens."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.pattern = "|".join((*map(re.escape, tokens), _ESCAPED))
        """Regular expression for both Python and Arrow."""
        self._find = re.compile(self.pattern).search
        # # A search for a few short texts first is ten times as fast as the regular expression on each text.
        self._beginnings = tuple({token[:2] for token in (*tokens, "\\u00")})

    def may_match(self, text: str) -> bool:
        """Return whether a text may contain one of the tokens."""
        return any(beginning in text for beginning in self._beginnings) and self._find(text) is not None


def _candidates(rows: Any, search: _Search) -> np.ndarray | None:
    """Return `[rows]` bool: whether a row may contain a token. None if rows are made only when they are read."""
    if isinstance(rows, RowView):
        below = _candidates(rows.rows, search)
        return None if below is None else below[rows.indices]
    if isinstance(rows, FormattedRows):
        below = _candidates(rows.table.rows, search)
        return None if below is None else below[rows.indices]
    if is_table(rows):
        arrow = rows.with_format("arrow")
        tables = (arrow[start : start + _BATCH_ROWS] for start in range(0, len(rows), _BATCH_ROWS))
        return np.concatenate([_in_table(table, search.pattern) for table in tables])
    if isinstance(rows, list):
        return np.fromiter((_any_text(row, search.may_match) for row in rows), bool, len(rows))
    return None


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a value, including texts in nested values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for below in value.values():
            yield from _texts(below)
    elif isinstance(value, list | tuple):
        for below in value:
            yield from _texts(below)


def _any_text(value: Any, test: Callable[[str], bool]) -> bool:
    """Return `any(map(test, _texts(value)))`, in a third of the time."""
    if isinstance(value, str):
        return test(value)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return isinstance(value, Mapping) and any(_any_text(each, test) for each in value.values())
    for each in value:  # noqa: SIM110  (a generator takes most of the time that is saved)
        if _any_text(each, test):
            return True
    return False


def _in_table(table: "pyarrow.Table", pattern: str) -> np.ndarray:
    found = np.zeros(len(table), dtype=bool)
    for column in table.columns:
        if is_image_column(column.type):
            continue
        found |= _in_array(column.combine_chunks(), pattern)
    return found


def _in_array(array: Any, pattern: str) -> np.ndarray:
    """Return `[values]` bool for an Arrow array, which may be nested. Values that cannot be searched are True."""
    import pyarrow
    import pyarrow.compute

    kind, types = array.type, pyarrow.types
    if isinstance(array, pyarrow.ChunkedArray):
        return np.concatenate([np.zeros(0, dtype=bool), *(_in_array(chunk, pattern) for chunk in array.chunks)])
    if types.is_dictionary(kind):
        return _in_array(array.dictionary_decode(), pattern)
    if types.is_string(kind) or types.is_large_string(kind):
        try:
            matches = pyarrow.compute.match_substring_regex(array, pattern)
        except pyarrow.ArrowInvalid:  # not UTF-8
            return np.ones(len(array), dtype=bool)
        return matches.fill_null(False).to_numpy(zero_copy_only=False)
    found = np.zeros(len(array), dtype=bool)
    if types.is_struct(kind):
        for below in array.flatten():
            found |= _in_array(below, pattern)
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        parents = pyarrow.compute.list_parent_indices(array).to_numpy(zero_copy_only=False)
        found[parents[_in_array(pyarrow.compute.list_flatten(array), pattern)]] = True
    return found
