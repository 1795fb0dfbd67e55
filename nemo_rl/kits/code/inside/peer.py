"""Let each of two programs use objects of the other one through two pipes.

Plain data is copied to the other program, and containers are shared (`heap`). Any other object stays in its own
program. The other program holds a `Remote`, which turns each access to an attribute, call and special method into a
request. A request may cause requests in the other direction, such as the call of a function that was an argument.

Invariant: no code of one program runs in the other, and an object of the other program is not equal to plain data only
because that program claims it.
"""

import builtins
from collections.abc import Callable, Iterator
from types import CoroutineType, GeneratorType, MethodType
from typing import Any, NoReturn

from heap import Heap
from offers import BASES, REQUESTS, SPECIAL
from values import ITERATORS, Channel, decode, encode, iterator_data

_MOST_ITEMS = 1000  # items of an iterator in one message
_TEXT = 1000


class StopError(RuntimeError):
    """Raised for a `StopIteration` of the other program, which would silently end a loop of this one."""


class Name:
    """A name in the other program, which can be the target of a request."""

    def __init__(self, text: str) -> None:
        self.text = text


class Remote:
    """An object of the other program."""

    __slots__ = ("_remote_base", "_remote_hash", "_remote_peer", "_remote_reference", "_remote_tainted")
    _remote_peer: "Peer"
    _remote_reference: dict[str, Any]
    _remote_base: str | None
    _remote_hash: int | None
    _remote_tainted: bool

    def __getattr__(self, name: str) -> Any:
        return ask_of(self, "get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        ask_of(self, "set", name, value)

    def __delattr__(self, name: str) -> None:
        ask_of(self, "delete", name)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and ask_of(self, "isinstance", value) is True

    def __subclasscheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and ask_of(self, "issubclass", value) is True

    def __repr__(self) -> str:
        return str(ask_of(self, "repr"))

    def __str__(self) -> str:
        return str(ask_of(self, "str"))

    def __format__(self, form: str) -> str:
        return str(ask_of(self, "format", form))

    def __copy__(self) -> Any:
        return ask_of(self, "copy")

    def __deepcopy__(self, memo: Any) -> Any:
        return ask_of(self, "deepcopy")

    def __hash__(self) -> int:
        found = object.__getattribute__(self, "_remote_hash")
        return object.__hash__(self) if found is None else found


def ask_of(remote: Remote, do: str, *arguments: Any, **keywords: Any) -> Any:
    """Send a request to the program to which the object belongs."""
    peer: Peer = object.__getattribute__(remote, "_remote_peer")
    return peer.ask(do, remote, *arguments, **keywords)


def _method(name: str) -> Callable[..., Any]:
    def special(self: Remote, *arguments: Any, **keywords: Any) -> Any:
        return object.__getattribute__(self, "_remote_peer").special(name, self, arguments, keywords)

    return special


class _Method(Remote):
    """A method of an object of the other program."""

    __slots__ = ()
    __call__ = _method("__call__")


def _new(kind: type[Remote], peer: "Peer", reference: dict[str, Any], base: str | None = None) -> Remote:
    remote = object.__new__(kind)
    state = {"peer": peer, "reference": reference, "base": base, "hash": None, "tainted": False}
    for field, value in state.items():
        object.__setattr__(remote, f"_remote_{field}", value)
    return remote


def tainted(remote: Remote) -> Remote:
    """Return a copy of the reference to an object, with a mark that the object was computed with plain data."""
    fields = (object.__getattribute__(remote, f"_remote_{name}") for name in ("peer", "reference", "base"))
    made = _new(type(remote), *fields)
    object.__setattr__(made, "_remote_tainted", True)
    return made


class Peer:
    """One program's end of the pipes.

    Args:
        first: 0 in one program, and 1 in the other.
    """

    def __init__(self, channel: Channel, first: int) -> None:
        self.channel = channel
        self.heap = Heap(first)
        self._first = first
        self._objects: dict[int, Any] = {}  # objects of this program by number
        self._numbers: dict[int, int] = {}
        self._described: set[int] = set()
        self._remotes: dict[int, Any] = {}
        self._classes: dict[tuple[str, tuple[str, ...]], type[Remote]] = {}
        self._errors: dict[int, type[BaseException]] = {}

    def ask(self, do: str, target: Any, *arguments: Any, **keywords: Any) -> Any:
        """Return the answer of the other program, or raise its exception."""
        place = {"type": "name", "value": target.text} if isinstance(target, Name) else self._encode(target)
        request = {"do": do, "target": place, "arguments": self._encode(arguments)}
        if keywords:
            request["keywords"] = {name: self._encode(value) for name, value in keywords.items()}
        self._send(request)
        while "do" in (answer := self._receive()):
            self._send(self.answer(answer))
        if "error" in answer:
            self._raise(answer)
        return self._decode(answer["result"])

    def serve(self) -> None:
        """Answer requests until the other program closes the pipes."""
        while True:
            try:
                request = self._receive()
            except EOFError:
                return
            self._send(self.answer(request))

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request."""
        try:
            target = self._decode(request["target"])
            arguments = self._decode(request["arguments"])
            keywords = {name: self._decode(value) for name, value in request.get("keywords", {}).items()}
            self.permit(request["do"], target, arguments)
            result = self.do(request["do"], target, arguments, keywords)
            return {"result": self._encode(result)}
        except BaseException as error:  # also an exit, which must not end this program
            return self._error(error)

    def do(self, name: str, target: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Do what a request asks."""
        return REQUESTS[name](target, *arguments, **keywords)

    def permit(self, do: str, target: Any, arguments: tuple[Any, ...]) -> None:
        """Refuse a request of the other program by raising an exception. The base class refuses none."""

    def permit_reference(self, value: Any) -> None:
        """Refuse to let the other program use an object by raising an exception. The base class refuses none."""

    def special(self, name: str, remote: Remote, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Return the result of a special method of an object of the other program."""
        if name == "__exit__":  # a traceback stays in the program that raised it
            arguments = (*arguments[:2], None)
        try:
            return self.ask(name, remote, *arguments, **keywords)
        except StopError:
            if name != "__next__":
                raise
        raise StopIteration

    def resolve_name(self, name: str) -> Any:
        """Return the object that a name of this program refers to."""
        raise NameError(f"name {name!r} is not defined")

    def printed(self) -> str:
        """Return the output of this program since the last message. The base class has no output."""
        return ""

    def print(self, text: str) -> None:
        """Print the output of the other program. The base class drops it."""

    def _send(self, message: dict[str, Any]) -> None:
        if changed := self.heap.changes(self._refer):
            message["heap"] = changed
        if self._first == 0 and (unused := self.heap.forget_unused()):
            message["unused"] = unused
        if printed := self.printed():
            message["printed"] = printed
        self.channel.send(message)

    def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = self.channel.receive()
        self.heap.apply(message.get("heap", ()), self._decode)
        self.heap.forget(message.get("unused", ()))
        if "printed" in message:
            self.print(str(message["printed"]))
        return message

    def _encode(self, value: Any) -> Any:
        return encode(value, self._refer, self.heap.share)

    def _decode(self, data: Any) -> Any:
        return decode(data, self._resolve)

    def _refer(self, value: Any) -> dict[str, Any]:
        """Return the data that represents an object that is not plain data."""
        if isinstance(value, Remote):
            return object.__getattribute__(value, "_remote_reference")
        if isinstance(value, BaseException):
            remote = getattr(value, "remote_object", None)
            return self._refer(remote) if remote is not None else {"type": "error", "value": self._error(value)}
        if isinstance(value, type) and issubclass(value, BaseException):
            if "_remote_number" in vars(value):
                return {"type": "mine", "value": vars(value)["_remote_number"]}
            return {"type": "error class", "value": self._lineage(value)}
        if self._first == 0 and getattr(value, "__module__", None) == "builtins" and _is_builtin(value):
            return {"type": "builtin function", "value": value.__name__}
        if isinstance(value, ITERATORS) and self._first == 0:
            return iterator_data(value, self._refer, self.heap.share)
        self.permit_reference(value)
        if isinstance(value, MethodType) and not isinstance(value.__self__, Remote):
            return {"type": "method", "value": [self._theirs(value.__self__), value.__name__]}
        return self._theirs(value)

    def _theirs(self, value: Any) -> dict[str, Any]:
        """Return the data that represents an object of this program."""
        number = self._numbers.get(id(value))
        if number is None:
            number = len(self._objects)
            self._objects[number], self._numbers[id(value)] = value, number
        kind = {GeneratorType: "generator", CoroutineType: "coroutine"}.get(type(value), "object")
        if kind == "object" and isinstance(value, ITERATORS):
            kind = "items"
        return {"type": "theirs", "value": number, "about": self._about(number, value, kind)}

    def _about(self, number: int, value: Any, kind: str) -> list[Any] | None:
        """Return name, kind, special methods, plain base and hash of an object, or None after the first call for it."""
        if number in self._described:
            return None
        self._described.add(number)
        owner = type(value)
        members = {name for one in owner.__mro__[:-1] for name, member in vars(one).items() if member is not None}
        special = [name for name in SPECIAL if name in members]
        base = next((base.__name__ for base in BASES if isinstance(value, base)), None)
        digest: Any = None
        if owner.__hash__ is None:
            digest = "unhashable"
        elif owner.__hash__ is not object.__hash__:
            try:
                digest = hash(value)
            except Exception:
                digest = "unhashable"
        return [owner.__name__, kind, special, base, digest]

    def _resolve(self, data: dict[str, Any]) -> Any:
        kind, value = data["type"], data["value"]
        if kind == "shared":
            return self.heap.resolve(value)
        if kind == "mine":
            return self._objects[value]
        if kind == "theirs":
            return self._remote(value, data["about"])
        if kind == "attribute":
            return self._attribute(self._decode(value[0]), value[1])
        if kind == "method":
            return self._method_of(self._decode(value[0]), value[1])
        if kind == "name":
            return self.resolve_name(value)
        if kind == "builtin function" and self._first == 1:  # a test may pass `eval` to a solution, but not the reverse
            return getattr(builtins, value)
        if kind == "error class":
            return self._error_class(value)
        if kind == "error":
            return self._made(value)
        raise ValueError(f"unknown data: {kind}")

    def _remote(self, number: int, about: list[Any] | None) -> Any:
        if number in self._remotes:
            return self._remotes[number]
        assert about is not None
        name, kind, special, base, digest = about
        members = tuple(sorted(one for one in special if one in SPECIAL and one != "__float__"))
        unhashable = digest == "unhashable"
        key = (str(name), (*members, "unhashable") if unhashable else members)
        if key not in self._classes:
            content: dict[str, Any] = {"__slots__": (), **{one: _method(one) for one in members}}
            content["__hash__"] = None if unhashable else Remote.__hash__
            self._classes[key] = type(str(name), (Remote,), content)
        remote = _new(self._classes[key], self, {"type": "mine", "value": number}, base)
        if digest is not None and not unhashable:
            object.__setattr__(remote, "_remote_hash", int(digest))
        stand_ins: dict[str, Callable[[Remote], Any]]
        stand_ins = {"generator": _generator, "items": _items, "coroutine": _coroutine}
        found: Any = stand_ins.get(kind, _itself)(remote)
        self._remotes[number] = found
        return found

    def _attribute(self, owner: Any, name: str) -> Any:
        """Return an attribute of an object of this program if the other program may read it."""
        self.permit("get", owner, (name,))
        return getattr(owner, name)

    def _method_of(self, owner: Any, name: str) -> Any:
        """Return a method of an object, or a stand-in for the method if the object is of the other program."""
        if not isinstance(owner, Remote):
            return self._attribute(owner, name)
        place = [object.__getattribute__(owner, "_remote_reference"), name]
        return _new(_Method, self, {"type": "attribute", "value": place})

    def _error(self, error: BaseException) -> dict[str, Any]:
        try:
            text = str(error)[:_TEXT]
        except Exception:
            text = ""
        answer: dict[str, Any] = {"error": self._lineage(type(error)), "text": text, "arguments": None, "object": None}
        try:
            answer["arguments"] = self._encode(error.args)
            if type(error).__module__ != "builtins":
                self.permit_reference(error)
                answer["object"] = self._theirs(error)
        except Exception:
            answer["object"] = None
        return answer

    def _lineage(self, kind: type[BaseException]) -> list[list[Any]]:
        """Return the name of each base class of an exception, with its number or, for a class of Python's own, None."""
        lineage: list[list[Any]] = []
        for one in kind.__mro__:
            if getattr(builtins, one.__name__, None) is one:
                lineage.append([one.__name__, None])
                continue
            if id(one) not in self._numbers:
                number = len(self._objects)
                self._objects[number], self._numbers[id(one)] = one, number
            lineage.append([one.__name__, self._numbers[id(one)]])
        return lineage

    def _error_class(self, lineage: list[list[Any]]) -> type[BaseException]:
        """Return the class that represents an exception class of the other program. Python's own classes are kept."""
        name, number = lineage[0]
        if number is None:
            kind = getattr(builtins, name)
            return kind if isinstance(kind, type) and issubclass(kind, BaseException) else Exception
        if number not in self._errors:
            own = next((rest for at in range(1, len(lineage)) if (rest := lineage[at:])[0][1] is not None), None)
            base = self._error_class(own or lineage[1:]) if len(lineage) > 1 else Exception
            bases = (base,) if issubclass(base, _ErrorOfOther) else (_ErrorOfOther, base)
            self._errors[number] = type(str(name), bases, {"_remote_number": number})
        return self._errors[number]

    def _made(self, answer: dict[str, Any]) -> BaseException:
        """Return the exception that an answer describes."""
        kind, text = self._error_class(answer["error"]), str(answer["text"])
        if issubclass(kind, StopIteration | StopAsyncIteration | GeneratorExit):
            return StopError(f"{kind.__name__}: {text}")
        try:
            arguments = (text,) if answer["arguments"] is None else self._decode(answer["arguments"])
            error = kind.__new__(kind, *arguments)
            error.args = tuple(arguments)
            if kind.__module__ == "builtins":
                error.__init__(*arguments)  # type: ignore[misc]
        except TypeError:  # for example UnicodeDecodeError, which takes five arguments
            error = ValueError(text) if issubclass(kind, ValueError) else RuntimeError(text)
        if answer["object"] is not None and isinstance(error, _ErrorOfOther):
            error.remote_object, error._remote_text = self._decode(answer["object"]), text
        return error

    def _raise(self, answer: dict[str, Any]) -> NoReturn:
        raise self._made(answer)


class _ErrorOfOther:
    """Base class of the exceptions that represent exceptions of the other program."""

    remote_object: Any = None
    _remote_text: str | None = None

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def __str__(self) -> str:
        return self._remote_text if self._remote_text is not None else ", ".join(map(str, self.args))

    def __getattr__(self, name: str) -> Any:
        if self.remote_object is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.remote_object, name)


def _is_builtin(value: Any) -> bool:
    return getattr(builtins, getattr(value, "__name__", ""), None) is value


def _itself(remote: Remote) -> Remote:
    return remote


def _items(remote: Remote) -> Iterator[Any]:
    """Yield the items of an iterator of the other program. The number of items for each message doubles each time."""
    most, finished = 1, False
    while not finished:
        items, finished = ask_of(remote, "batch", most)
        most = min(2 * most, _MOST_ITEMS)
        yield from items


def _generator(remote: Remote) -> Iterator[Any]:
    """Return a generator that represents a generator of the other program. Values can be sent to it."""
    items: list[Any] = []
    finished, num_read = False, 0
    while items or not finished:
        if not items:
            # The first items come one by one, because the test may send values between them.
            more, finished = ask_of(remote, "batch", min(max(num_read - 15, 1), _MOST_ITEMS))
            items = list(more)
            num_read += len(items)
            continue
        sent = yield items.pop(0)
        if sent is not None:
            try:
                items.insert(0, ask_of(remote, "send", sent))
            except StopError:
                return


async def _coroutine(remote: Remote) -> Any:
    """Run a coroutine of the other program in that program, and return its result."""
    return ask_of(remote, "run")
