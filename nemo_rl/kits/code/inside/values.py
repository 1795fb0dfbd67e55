"""Encode values that two programs exchange as text. Only plain data is encoded, so no code is exchanged.

Texts, numbers, true, false and null are JSON; other types are objects `{"type": ..., "value": ...}`. Callers may share
lists, dicts and sets (`heap`), and may replace all other objects by references (`peer`).
"""

import json
import os
from collections import Counter, OrderedDict, deque, namedtuple
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from types import GeneratorType
from typing import Any

COMPLETED, RAISED = 64, 65
"""Exit codes of `session`: the last block ended normally, or raised an exception."""
MAX_BYTES = 8 << 20
"""Largest length of one message in bytes."""
ITERATORS: tuple[type[Any], ...] = (
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
MUTABLE: tuple[type[Any], ...] = (list, dict, set, bytearray, deque)
"""Types of containers that change in place."""
_MAX_ITEMS = 100_000  # largest number of items of an iterator, which may have no end
_SEQUENCES: dict[str, type[Any]] = {
    "list": list,
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
    "fraction": (
        Fraction,
        lambda one: f"{one.numerator:x}/{one.denominator:x}",
        lambda text: Fraction(*(int(part, 16) for part in text.split("/"))),
    ),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
    "time": (time, time.isoformat, time.fromisoformat),
    "timedelta": (
        timedelta,
        lambda delta: f"{delta.days},{delta.seconds},{delta.microseconds}",
        lambda text: timedelta(*map(int, text.split(","))),
    ),
    "complex": (complex, str, complex),
    "range": (range, lambda one: f"{one.start},{one.stop},{one.step}", lambda text: range(*map(int, text.split(",")))),
}
_KINDS: tuple[Any, ...] = (bool, bytes, complex, dict, float, frozenset, int, list, object, set, str, tuple)
_TYPES = {kind.__name__: kind for kind in _KINDS}
_KNOWN = {"builtins", "collections", "datetime", "decimal", "fractions", "_decimal", "_pydecimal", "_pydatetime"}
COMPARED = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
_SILENT = {  # members of a class that do not change its plain data
    *COMPARED,
    *("__hash__", "__repr__", "__str__", "__format__", "__new__", "__init__", "__module__", "__doc__", "__dict__"),
    *("__weakref__", "__slots__", "__qualname__", "__annotations__", "__orig_bases__", "__parameters__"),
    *("__firstlineno__", "__static_attributes__", "__annotate_func__", "__match_args__", "__getnewargs__"),
    *("_fields", "_field_defaults", "_make", "_replace", "_asdict", "__replace__", "__reduce_ex__", "__sizeof__"),
}
_LONG = 1 << 200  # Python refuses to write integers beyond some length as decimals

type Refer = Callable[[Any], Any]


class NotPlainError(TypeError):
    """Raised for a value that is not plain data."""


def encode(value: Any, refer: Refer | None = None, share: Refer | None = None) -> Any:
    """Return a value as JSON data.

    Args:
        refer: Function that returns the JSON data for a value that is no plain data. With None, such a value raises.
        share: Function that returns the JSON data for a mutable container, or None if the container is to be copied.
    """
    if value is None or isinstance(value, bool):
        return value
    if share is not None and refer is not None and has_own_behaviour(type(value)):
        return refer(value)
    if isinstance(value, float):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value) if -_LONG < value < _LONG else {"type": "int", "value": hex(value)}
    if isinstance(value, MUTABLE) and share is not None and (shared := share(value)) is not None:
        return shared
    if type(value) is list:
        return [encode(item, refer, share) for item in value]
    for name, kind in _MAPPINGS.items():
        if isinstance(value, kind):
            pairs = [[encode(key, refer, share), encode(item, refer, share)] for key, item in value.items()]
            return {"type": name, "value": pairs}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = [type(value).__name__, list(value._fields), [encode(item, refer, share) for item in value]]
        return {"type": "namedtuple", "value": fields}
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {"type": name, "value": [encode(item, refer, share) for item in value]}
    for name, (kind, write, _) in _TEXTS.items():
        if isinstance(value, kind):
            return {"type": name, "value": write(value)}
    if isinstance(value, type) and value in _KINDS:
        return {"type": "builtin", "value": value.__name__}
    if share is None and isinstance(value, ITERATORS):
        return iterator_data(value, refer)
    if refer is None:
        raise NotPlainError(f"{type(value).__name__} is no plain data")
    return refer(value)


def iterator_data(value: Any, refer: Refer | None, share: Refer | None = None) -> dict[str, Any]:
    """Return the items of an iterator as JSON data."""
    return {"type": "iterator", "value": [encode(item, refer, share) for item in islice(value, _MAX_ITEMS)]}


def decode(data: Any, resolve: Callable[[Any], Any] | None = None) -> Any:
    """Return the value that JSON data stands for.

    Args:
        data: What `encode` returned.
        resolve: Function that returns the value for data that `refer` or `share` returned.
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
    if name == "namedtuple":
        kind, fields, items = inner
        return namedtuple(kind, fields)(*(decode(item, resolve) for item in items))
    if name == "builtin":
        return _TYPES[inner]
    if name == "iterator":
        return iter([decode(item, resolve) for item in inner])
    if resolve is None:
        raise NotPlainError(f"{name} is unknown")
    return resolve(data)


def has_own_behaviour(kind: type[Any]) -> bool:
    """Return whether a class adds or changes more than comparisons and texts of its base class of plain data."""
    if kind.__module__ in _KNOWN:
        return False
    fields = getattr(kind, "_fields", ())
    for one in kind.__mro__:
        if one.__module__ in _KNOWN:
            return False
        if any(name not in _SILENT and name not in fields for name in vars(one)):
            return True
    return False


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
        """Wait for the next message and return it.

        Raises:
            EOFError: The other program has ended, or its message is too long.
        """
        line = self._incoming.readline(MAX_BYTES)
        if not line.endswith(b"\n"):
            raise EOFError
        return json.loads(line)
