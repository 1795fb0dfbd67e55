"""Turn what a tool returns into a text of limited length.

Invariant: the text is valid Unicode and not longer than the limit plus one line that says how much was cut.
"""

import json
from typing import Any

_MAX_ERROR_CHARS = 1000


def text_of_output(value: Any, max_bytes: int) -> str:
    """Return a value as text: a string as it is, another value as JSON, what JSON cannot hold as `str`."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return cut_to_bytes(text, max_bytes)


def cut_to_bytes(text: str, max_bytes: int) -> str:
    """Cut a text after `max_bytes` bytes of UTF-8, and say so."""
    if len(text) <= max_bytes // 4:
        return text.encode("utf-8", "replace").decode("utf-8")
    encoded = text[: max_bytes + 1].encode("utf-8", "replace")
    if len(text) <= max_bytes and len(encoded) <= max_bytes:
        return encoded.decode("utf-8")
    kept = encoded[:max_bytes].decode("utf-8", "ignore")
    return f"{kept}\n[cut: {len(text) - len(kept)} more characters]"


def cut_middle(text: str, max_bytes: int) -> str:
    """Cut the middle out of a text with more than `max_bytes` bytes of UTF-8, and say so: both ends may matter."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= max_bytes:
        return encoded.decode("utf-8")
    half = max_bytes // 2
    head, tail = encoded[:half].decode("utf-8", "ignore"), encoded[len(encoded) - half :].decode("utf-8", "ignore")
    return f"{head}\n[cut: {len(text) - len(head) - len(tail)} characters]\n{tail}"


def text_of_error(error: BaseException) -> str:
    """Describe what a tool raised, for the model."""
    return f"Error: {type(error).__name__}: {error}"[:_MAX_ERROR_CHARS].encode("utf-8", "replace").decode("utf-8")
