"""Finds rows whose tests expect more output than a program may write, so that no program can pass them."""

import json
from collections.abc import Sequence

import numpy as np

from nemo_rl.data.bad_rows import BadRow
from nemo_rl.data.datasets.raw_dataset import FormattedRow, RowView, row_place


def leave_out_long_outputs(
    rows: Sequence[FormattedRow], output_bytes: int | None
) -> tuple[Sequence[FormattedRow], list[BadRow]]:
    """Leave out rows whose tests expect more output than the environment lets a program write.

    Args:
        rows: Formatted rows; the last message has the tests as JSON.
        output_bytes: Most bytes of output; None: the environment runs no programs.

    Returns:
        The rows to use, and the rows left out.
    """
    if output_bytes is None:
        return rows, []
    kept, bad = [], []
    for position in range(len(rows)):
        longest = _longest_output(rows[position], output_bytes)
        if longest <= output_bytes:
            kept.append(position)
            continue
        reason = f"the tests expect an output of {longest} bytes, more than env.code.output_bytes={output_bytes}"
        bad.append(BadRow(*row_place(rows, position), reason))
    return (RowView(rows, np.array(kept, dtype=np.int64)), bad) if bad else (rows, [])


def _longest_output(row: FormattedRow, limit: int) -> int:
    """Return the bytes of the longest expected output of a row; 0 if it has none that is above the limit."""
    text = row["messages"][-1]["content"]
    if not isinstance(text, str) or len(text) <= limit // 2:  # an escape of JSON has more characters than its byte
        return 0
    try:
        tests = json.loads(text)
        outputs = tests.get("outputs") or ()
        return max((len(one.rstrip().encode(errors="surrogatepass")) for one in outputs), default=0)
    except (AttributeError, TypeError, ValueError):  # another kind of answer
        return 0
