"""Distinguish terminals from other streams.

Invariant: no stream causes an error here, even if it is missing, closed or of another kind.
"""

from typing import Any

GONE = (OSError, ValueError)
"""Errors of a closed terminal and of a closed stream."""


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal or its live display. None and a closed stream are not."""
    stream = getattr(stream, "rich_proxied_file", stream)
    try:
        return bool(stream.isatty())
    except (AttributeError, *GONE):
        return False
