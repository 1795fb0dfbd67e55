"""Values that two programs exchange as text: only plain data of Python, so neither runs code of the other.

Lists, texts, numbers, true, false and null are JSON; other types are objects `{"type": ..., "value": ...}`.
"""

import json
import os
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from types import GeneratorType
from typing import Any

COMPLETED, RAISED = 64, 65
"""Exit codes of `session`: the last block came to its end, or raised an exception."""
MAX_BYTES = 8 << 20
"""Length of one message."""
_MAX_ITEMS = 100_000  # of an iterator, which may have no end
_ITERATORS: tuple[type[Any], ...] = (
    GeneratorType,
    map,
    filter,
    zip,
    enumerate,
    reversed,
    type(iter([])),
    type(iter(())),
    type(iter({})),
)
_SEQUENCES: dict[str, type[Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "bytes": bytes,
    "bytearray": bytearray,
}
_MAPPINGS: dict[str, type[Any]] = {"counter": Counter, "ordered": OrderedDict, "dict": dict}
_TEXTS: dict[str, tuple[type[Any], Callable[[Any], str], Callable[[str], Any]]] = {
    "decimal": (Decimal, str, Decimal),
    "fraction": (Fraction, str, Fraction),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
    "timedelta": (timedelta, lambda delta: str(delta.total_seconds()), lambda text: timedelta(seconds=float(text))),
    "complex": (complex, str, complex),
    "range": (range, lambda one: f"{one.start},{one.stop},{one.step}", lambda text: range(*map(int, text.split(",")))),
}
_KINDS: tuple[type[Any], ...] = (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)
_TYPES = {kind.__name__: kind for kind in _KINDS}
_LONG = 1 << 200  # Python refuses to write longer integers than some limit in decimals


class NotPlainError(TypeError):
    """A value is no plain data."""


def encode(value: Any, refer: Callable[[Any], Any] | None = None) -> Any:
    """Return a value as JSON data.

    Args:
        value: Any value.
        refer: Returns the JSON data that stands for a value that is no plain data; None refuses such values.
    """
    if value is None or isinstance(value, bool | float | str):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, int):
        return int(value) if -_LONG < value < _LONG else {"type": "int", "value": hex(value)}
    if isinstance(value, list):
        return [encode(item, refer) for item in value]
    for name, kind in _MAPPINGS.items():
        if isinstance(value, kind):
            return {"type": name, "value": [[encode(key, refer), encode(item, refer)] for key, item in value.items()]}
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {"type": name, "value": [encode(item, refer) for item in value]}
    for name, (kind, write, _) in _TEXTS.items():
        if isinstance(value, kind):
            return {"type": name, "value": write(value)}
    if isinstance(value, _ITERATORS):
        return {"type": "iterator", "value": [encode(item, refer) for item in islice(value, _MAX_ITEMS)]}
    for name, kind in _TYPES.items():
        if value is kind:
            return {"type": "builtin", "value": name}
    if refer is None:
        raise NotPlainError(f"{type(value).__name__} is no plain data")
    return refer(value)


def decode(data: Any, resolve: Callable[[Any], Any] | None = None) -> Any:
    """Return the value of JSON data.

    Args:
        data: What `encode` returned.
        resolve: Returns the value for data that `refer` returned.
    """
    if isinstance(data, list):
        return [decode(item, resolve) for item in data]
    if not isinstance(data, dict):
        return data
    name, inner = data["type"], data["value"]
    if name in _TEXTS:
        return _TEXTS[name][2](inner)
    if name == "int":
        return int(inner, 16)
    if name in _MAPPINGS:
        return _MAPPINGS[name]({decode(key, resolve): decode(item, resolve) for key, item in inner})
    if name in _SEQUENCES:
        return _SEQUENCES[name](decode(item, resolve) for item in inner)
    if name == "builtin":
        return _TYPES[inner]
    if name == "iterator":
        return iter([decode(item, resolve) for item in inner])
    if resolve is None:
        raise NotPlainError(f"{name} is unknown")
    return resolve(data)


class Channel:
    """Two pipes on which programs exchange messages, one line of JSON each."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        self._incoming = os.fdopen(incoming, "rb")
        self._outgoing = os.fdopen(outgoing, "wb")

    def send(self, message: Any) -> None:
        """Send JSON data."""
        self._outgoing.write(json.dumps(message).encode() + b"\n")
        self._outgoing.flush()

    def receive(self) -> Any:
        """Return the next message.

        Raises:
            EOFError: The other program has ended or its message is too long.
        """
        line = self._incoming.readline(MAX_BYTES)
        if not line.endswith(b"\n"):
            raise EOFError
        return json.loads(line)
