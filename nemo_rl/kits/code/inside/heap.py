"""Share lists, dicts and sets between two programs.

Each container that one program sends to the other gets a number. A message carries the content of all numbered
containers that have changed since the last message. In this way, both programs see the change if a call changes an
argument in place or a test changes a result, and two names of one container remain names of one container. Invariant: a
program can change only those containers of the other program that were sent to it.
"""

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from operator import is_
from typing import Any

from values import Refer, encode

_MOST = 20_000  # containers that are shared; further ones are copied
_FACTORIES = {kind.__name__: kind for kind in (bool, dict, float, int, list, set, str)}


class Heap:
    """The shared containers, as one of the two programs knows them.

    Args:
        first: 0 or 1, so that this program gives even or odd numbers to containers.
    """

    def __init__(self, first: int) -> None:
        self._next = first
        self._objects: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        self._contents: dict[int, Any] = {}
        self._added: list[int] = []

    def share(self, value: Any) -> dict[str, Any] | None:
        """Return the JSON data that represents a container, or None if the container has to be copied."""
        number = self._numbers.get(id(value))
        if number is None:
            if len(self._objects) >= _MOST:
                return None
            number, self._next = self._next, self._next + 2
            self._add(number, value)
        return {"type": "shared", "value": number}

    def changes(self, refer: Refer) -> list[Any]:
        """Return the content of all containers that are new or have changed since the last message."""
        changed, self._added = [], list(self._objects)
        while self._added:  # the content of a container may hold further containers
            number = self._added.pop()
            content = _content(self._objects[number])
            if not _is_same(content, self._contents.get(number)):
                data = encode(tuple(content), refer, self.share)["value"]
                changed.append([number, _kind(self._objects[number]), data])
                self._contents[number] = content
        return changed

    def apply(self, changed: list[Any], read: Callable[[Any], Any]) -> None:
        """Update the containers with the content that the other program sent.

        Raises:
            ValueError: `changed` is not the content of containers.
        """
        for number, kind, _ in changed:
            if number not in self._objects:
                if number % 2 == self._next % 2:
                    raise ValueError("a number of the other program")
                self._add(number, _empty(kind))
        for number, _, data in changed:
            _fill(self._objects[number], [read(item) for item in data])
            self._contents[number] = _content(self._objects[number])

    def resolve(self, number: int) -> Any:
        """Return the container with a number."""
        return self._objects[number]

    def forget_unused(self) -> list[int]:
        """Forget the containers to which only this object still refers, and return their numbers."""
        # Two references remain: that of the table, and the argument of getrefcount.
        unused = [number for number in self._objects if sys.getrefcount(self._objects[number]) == 2]
        self.forget(unused)
        return unused

    def forget(self, numbers: list[int]) -> None:
        """Forget containers, so that they get new numbers if they are sent again."""
        for number in numbers:
            if number in self._objects:
                del self._numbers[id(self._objects.pop(number))]
                self._contents.pop(number, None)

    def _add(self, number: int, value: Any) -> None:
        self._objects[number] = value
        self._added.append(number)
        self._numbers[id(value)] = number


def _content(value: Any) -> list[Any]:
    """Return the items of a container, with keys before values, without calling methods that a subclass overrides."""
    if isinstance(value, dict):
        return [*dict.keys(value), *dict.values(value)]
    if isinstance(value, bytearray):
        return [int(one) for one in value]
    kind: Any = next(kind for kind in (list, set, deque) if isinstance(value, kind))
    return list(kind.__iter__(value))


def _is_same(content: list[Any], other: list[Any] | None) -> bool:
    return other is not None and len(content) == len(other) and all(map(is_, content, other))


def _fill(value: Any, items: list[Any]) -> None:
    if isinstance(value, dict):
        half = len(items) // 2
        dict.clear(value)
        for key, item in zip(items[:half], items[half:], strict=True):
            dict.__setitem__(value, key, item)
    elif isinstance(value, set):
        value.clear()
        value.update(items)
    elif isinstance(value, deque):
        value.clear()
        value.extend(items)
    else:
        value[:] = items


def _kind(value: Any) -> str:
    if isinstance(value, defaultdict):
        name = getattr(value.default_factory, "__name__", "")
        return f"defaultdict:{name if _FACTORIES.get(name) is value.default_factory else ''}"
    if isinstance(value, deque):
        return f"deque:{value.maxlen or ''}"
    kinds = (Counter, OrderedDict, dict, set, bytearray)
    return next((kind.__name__ for kind in kinds if isinstance(value, kind)), "list")


def _empty(kind: str) -> Any:
    name, _, more = kind.partition(":")
    if name == "defaultdict":
        return defaultdict(_FACTORIES.get(more))
    if name == "deque":
        return deque(maxlen=int(more) if more else None)
    kinds: tuple[type[Any], ...] = (list, dict, set, bytearray, Counter, OrderedDict)
    found = next((one for one in kinds if one.__name__ == name), None)
    if found is None:
        raise ValueError(f"{name} is no container")
    return found()
