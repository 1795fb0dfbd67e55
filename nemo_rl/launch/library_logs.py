"""Collect what the library logs during a check."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logs_of_library() -> Iterator[list[logging.LogRecord]]:
    """Collect the library's log lines in a block; they reach neither the console nor an enclosing collection."""
    library = logging.getLogger("nemo_rl")
    records: list[logging.LogRecord] = []
    before = library.handlers, library.propagate
    library.handlers, library.propagate = [_Collector(records)], False
    try:
        yield records
    finally:
        library.handlers, library.propagate = before


class _Collector(logging.Handler):
    """Stores records."""

    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__()
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        """Store one record."""
        self._records.append(record)
