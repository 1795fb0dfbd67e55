"""Read the fields of a request's JSON objects.

Invariant: a value of a wrong type or out of range raises a `CallError` with status 400 that names the field. A field
that is null counts as left out.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Self

from nemo_rl.agents.endpoint.calls import CallError

MOST_ITEMS = 4_096
"""Largest number of items in a list of a request, such as its messages."""
_SHOWN_CHARS = 80
_SHOWN_DEPTH = 2
_SHOWN_ITEMS = 4
_TYPES = {str: "a text", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}


class Fields:
    """One JSON object of a request.

    Args:
        path: path of the object in the request, such as `messages[2]`, for errors. It is empty for the request itself.

    Raises:
        CallError: `values` is not an object.
    """

    def __init__(self, values: Any, path: str = "") -> None:
        if not isinstance(values, Mapping):
            raise _wrong(path or "body", values, "an object")
        self.values: Mapping[str, Any] = values
        self.path = path

    def name_of(self, name: str) -> str:
        """Return the path of a field in the request."""
        return f"{self.path}.{name}" if self.path else name

    def has(self, name: str) -> bool:
        """Return whether a field is given and not null."""
        return self.values.get(name) is not None

    def wrong(self, name: str, allowed: str) -> CallError:
        """Return an error that says that the value of a field is not allowed."""
        return _wrong(self.name_of(name), self.values.get(name), allowed)

    def text(self, name: str, default: str | None = None) -> str | None:
        """Return a text, or `default` if the field is left out.

        Raises:
            CallError: the field is something else.
        """
        value = self.values.get(name)
        return default if value is None else _text(value, self.name_of(name))

    def required_text(self, name: str, *, may_be_empty: bool = False) -> str:
        """Return a required text field.

        Raises:
            CallError: the field is missing, not a text, or empty.
        """
        text = self.text(name)
        if text is None or not (text or may_be_empty):
            raise self.wrong(name, "a text" if may_be_empty else "a text of at least one character")
        return text

    def one_of(self, name: str, allowed: Collection[str]) -> str:
        """Return a text that is among the allowed texts.

        Raises:
            CallError: the field is missing or not one of them.
        """
        value = self.values.get(name)
        if not isinstance(value, str) or value not in allowed:
            raise self.wrong(name, " or ".join(f'"{each}"' for each in allowed))
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean, or `default` if the field is left out.

        Raises:
            CallError: the field is something else.
        """
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return default if value is None else value

    def integer(self, name: str, low: int, high: int) -> int | None:
        """Return an integer from `low` to `high`, both included, or None if the field is left out.

        Raises:
            CallError: the field is something else.
        """
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        """Return a number from `low` to `high`, both included, or None if the field is left out.

        Raises:
            CallError: the field is something else.
        """
        value = self.values.get(name)
        if value is None:
            return None
        # The value is compared before its conversion, because an integer in JSON may be too large for a float.
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.wrong(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def texts(self, name: str) -> tuple[str, ...]:
        """Return the texts of a field that is a text or a list of texts, or an empty tuple if the field is left out.

        Raises:
            CallError: the field is something else, or has an empty text.
        """
        value = self.values.get(name)
        if value is None:
            return ()
        each_of = [value] if isinstance(value, str) else value
        if isinstance(each_of, list):
            self._check_length(name, each_of)
        if not isinstance(each_of, list) or not all(isinstance(each, str) and each for each in each_of):
            raise self.wrong(name, "a text, or a list of texts, of at least one character each")
        return tuple(_text(each, self.name_of(name)) for each in each_of)

    def items(self, name: str) -> Sequence[Any]:
        """Return a list of any values, which is empty if the field is left out.

        Raises:
            CallError: the field is something else.
        """
        value = self.values.get(name)
        if value is not None and not isinstance(value, list):
            raise self.wrong(name, "a list")
        self._check_length(name, value or ())
        return value or ()

    def _check_length(self, name: str, items: Sequence[Any]) -> None:
        if len(items) > MOST_ITEMS:
            place = self.name_of(name)
            message = f"{place} has {len(items)} items; allowed are {MOST_ITEMS}."
            raise CallError(400, message, "invalid_value", place)

    def objects(self, name: str) -> Iterator[Self]:
        """Yield the objects of a list.

        Raises:
            CallError: the field is not a list of objects.
        """
        for index, each in enumerate(self.items(name)):
            yield type(self)(each, f"{self.name_of(name)}[{index}]")

    def object(self, name: str) -> Self | None:
        """Return an object, or None if the field is left out.

        Raises:
            CallError: the field is something else.
        """
        value = self.values.get(name)
        return None if value is None else type(self)(value, self.name_of(name))

    def json_object(self, name: str) -> dict[str, Any] | None:
        """Return an object whose content is passed on, for example a schema, or None if the field is left out.

        Raises:
            CallError: the field is something else, or contains a number or a text that JSON cannot represent.
        """
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object")
        if not is_json(value):
            raise self.wrong(name, "an object without NaN, Infinity and unpaired surrogates")
        return dict(value)

    def refuse(self, unsupported: Mapping[str, Sequence[Any]]) -> None:
        """Refuse fields that would change the answer and are not supported.

        Args:
            unsupported: values of each field that have no effect, by the field's name.

        Raises:
            CallError: a field has another value.
        """
        for name, without_effect in unsupported.items():
            if self.has(name) and self.values[name] not in without_effect:
                allowed = " or ".join(json.dumps(each) for each in without_effect)
                advice = "Leave it out" + (f", or set it to {allowed}." if allowed else ".")
                raise self.unsupported(name, advice)

    def unsupported(self, name: str, advice: str) -> CallError:
        """Return an error that says that the endpoint does not support the value of a field.

        Args:
            name: name of the field.
            advice: what to do instead.
        """
        place = self.name_of(name)
        message = f"{place}={_shown(self.values.get(name))} is not supported by this endpoint. {advice}"
        return CallError(400, message, "unsupported_parameter", place)


def is_json(value: Any) -> bool:
    """Return whether a value can be written as JSON in UTF-8, which excludes NaN and unpaired surrogates."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise _wrong(place, value, "a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        # JSON can represent such a surrogate as an escape, but no tokenizer accepts it.
        raise _wrong(place, value, "a text without unpaired surrogates") from None
    return value


def _wrong(place: str, value: Any, allowed: str) -> CallError:
    given = "null or missing" if value is None else f"{_shown(value)} ({_TYPES.get(type(value), 'a value')})"
    return CallError(400, f"{place} is {given}; allowed is {allowed}.", "invalid_value", place)


def _shown(value: Any) -> str:
    """Return the beginning of a value as JSON in ASCII."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    try:
        text = json.dumps(_beginning(value))
    except (ValueError, TypeError, RecursionError):
        text = ascii(type(value).__name__)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _beginning(value: Any, depth: int = _SHOWN_DEPTH) -> Any:
    """Return a part of a value that is enough to show its beginning."""
    if isinstance(value, str):
        return value[: _SHOWN_CHARS + 1]
    if isinstance(value, list):
        return [_beginning(each, depth - 1) for each in value[:_SHOWN_ITEMS]] if depth else []
    if isinstance(value, Mapping):
        pairs = islice(value.items(), _SHOWN_ITEMS) if depth else ()
        return {str(name)[:_SHOWN_CHARS]: _beginning(each, depth - 1) for name, each in pairs}
    return value


SEPARATOR = "\n"
"""Separator between the text parts of a message, as in vLLM."""


def parts_of(message: Fields, text_type: str, name: str = "content") -> Iterator[Fields]:
    """Yield the parts of a content. A text has one part, and a content that is left out has none.

    Args:
        message: the object with the content.
        text_type: type of the part that replaces a plain text.
        name: name of the field with the content.

    Raises:
        CallError: the content is neither a text nor a list of objects.
    """
    content = message.values.get(name)
    if isinstance(content, str):
        yield Fields({"type": text_type, "text": message.text(name)}, message.name_of(name))
    elif content is None or isinstance(content, list):
        yield from message.objects(name)
    else:
        raise message.wrong(name, "a text or a list of text parts")


def text_of(message: Fields, text_types: Collection[str], name: str = "content") -> str:
    """Return the joined texts of a content.

    Args:
        message: the object with the content.
        text_types: types of parts that are texts. The first type is also used for a content that is a text itself.
        name: name of the field with the content.

    Raises:
        CallError: the content has other parts.
    """
    parts = parts_of(message, next(iter(text_types)), name)
    return SEPARATOR.join(part_text(part, text_types) for part in parts)


def required_text_of(message: Fields, text_types: Collection[str], name: str = "content") -> str:
    """Return the joined texts of a content that has to be given.

    Raises:
        CallError: the content is missing, or has other parts.
    """
    if not message.has(name):
        raise message.wrong(name, "a text or a list of text parts")
    return text_of(message, text_types, name)


def part_text(part: Fields, text_types: Collection[str]) -> str:
    """Return the text of a part.

    Raises:
        CallError: the part is not a text.
    """
    kind = part.required_text("type")
    if kind not in text_types:
        raise not_a_text(part, text_types)
    # A refusal, which OpenAI's models return in place of a text, is a separate type of part.
    return part.required_text("refusal" if kind == "refusal" else "text", may_be_empty=True)


def not_a_text(part: Fields, text_types: Collection[str], image_types: Collection[str] = ()) -> CallError:
    """Return an error that says that a part cannot be read.

    Args:
        text_types: types of parts that can be given.
        image_types: types of parts with images that can be given, or none if only texts are read here.
    """
    allowed = " or ".join((*text_types, *image_types))
    what = "Only texts and images are read here" if image_types else "Only texts are read here"
    return part.unsupported("type", f"{what}: give parts of type {allowed}.")


def tool_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a tool call in the form of `CallAnswer.message`."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
