"""Interfaces of tools: their descriptions, classes with state, the tools of one configuration entry, and open tools.

Invariant: each call of a tool returns a `ToolOutput`, whatever the tool does.
"""

import abc
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from nemo_rl.utils.errors import ConfigError

_ARGUMENT = re.compile(r"^\s*\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


@dataclass(frozen=True)
class ToolSpec:
    """Description of one tool for a model."""

    name: str
    """Name that calls use."""
    description: str
    """Description for the model."""
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, which describes an object."""
    arguments: type[BaseModel] | None = None
    """Pydantic model that checks the arguments, or None if the tool checks its arguments itself."""

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI's form, as chat templates read it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments by parameter name, converted to their types.

        Raises:
            ValueError: arguments are missing, unknown or of a wrong type; the message is for the model.
        """
        if self.arguments is None:
            return dict(arguments)
        try:
            made = self.arguments.model_validate(dict(arguments))
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
            raise ValueError("; ".join(wrong)) from None
        fields = self.arguments.model_fields
        return {
            str(field.alias): getattr(made, name) for name, field in fields.items() if name in made.model_fields_set
        }


def spec_of(function: Callable[..., Any], what: str) -> ToolSpec:
    """Describe a function or a bound method.

    Args:
        function: function with a docstring, and a type hint for each parameter. The first paragraph of the docstring
            describes the tool, and the lines below `Args:` describe its arguments.
        what: name of the function in messages.

    Raises:
        ConfigError: a docstring or a type hint is missing, or a parameter cannot be passed by name.
    """
    text = inspect.getdoc(function)
    if not text:
        raise ConfigError(f"{what} has no docstring. Write one: it tells the model what the tool does.")
    described = _argument_texts(text)
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"{what}: parameter {parameter.name!r} cannot be passed by name. Write named parameters.")
        if parameter.name not in hints:
            raise ConfigError(f"{what}: parameter {parameter.name!r} has no type hint, from which its schema is made.")
        default = ... if parameter.default is parameter.empty else parameter.default
        field = Field(default, alias=parameter.name, description=described.get(parameter.name))
        fields[f"argument_{number}"] = (hints[parameter.name], field)
    try:
        model = create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)
        parameters = _without_titles(model.model_json_schema())
    except PydanticUserError as error:
        raise ConfigError(f"{what}: a type hint has no JSON schema ({error}). Use plain types.") from error
    return ToolSpec(function.__name__, _first_paragraph(text), parameters, model)


def _first_paragraph(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())


def _argument_texts(text: str) -> dict[str, str]:
    """Return the text of each argument below `Args:`."""
    found: dict[str, str] = {}
    last = ""
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)+)", text, re.MULTILINE)
    lines = section.group(1).splitlines() if section else []
    indent = len(lines[0]) - len(lines[0].lstrip()) if lines else 0
    for line in lines:
        begins = _ARGUMENT.match(line) if len(line) - len(line.lstrip()) == indent else None
        if begins:
            last = begins.group(1)
            found[last] = begins.group(2)
        elif last:
            found[last] = f"{found[last]} {line.strip()}".strip()
    return found


def _without_titles(schema: Any) -> Any:
    """Remove the titles that pydantic adds, which repeat the names. A property called title is kept."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: _without_titles(value) for key, value in schema.items() if not (key == "title" and isinstance(value, str))
    }


type Fault = Literal["error", "timeout"]


class EpisodeTools:
    """Base class of tools with state. Each public method with type hints and a docstring is a tool.

    An object is constructed with the entry's `kwargs` when an episode begins, and closed when the episode ends. With
    `shared: true` all episodes use one object, whose methods must then be thread-safe.
    """

    def open(self, metadata: Any) -> None:
        """Begin an episode.

        Args:
            metadata: `extra_env_info` of the prompt, or None for an object that all episodes share.
        """

    def close(self) -> None:
        """Release the resources of the object."""


@dataclass(frozen=True)
class ToolOutput:
    """Result of one call."""

    text: str
    """Text that the model reads."""
    fault: Fault | None = None
    """None if the tool succeeded, "error" if it failed, or "timeout" if it gave no answer in time."""
    parts: Sequence[Mapping[str, Any]] = ()
    """Text and image parts that the model reads in place of `text`, or none without an image. An image part has the
    address of its image."""


class OpenTools(abc.ABC):
    """Tools of one entry that are open for one episode."""

    @abc.abstractmethod
    async def call(self, name: str, arguments: dict[str, Any]) -> ToolOutput:
        """Make a call. Errors of the tool are returned as output, not raised.

        Args:
            name: name of the tool, which is one of the entry's `specs`.
            arguments: checked arguments.
        """

    async def close(self) -> None:  # noqa: B027  (optional hook)
        """Release the resources of the episode."""


class ToolSource(abc.ABC):
    """Interface of the tools of one entry of `env.tools.tools`."""

    specs: Mapping[str, ToolSpec]
    """Tools by name."""

    @abc.abstractmethod
    async def open(self, metadata: Any) -> OpenTools:
        """Begin an episode.

        Args:
            metadata: `extra_env_info` of the prompt.

        Raises:
            Exception: any error of the tool's own code. The episode then fails.
        """

    async def shutdown(self) -> None:  # noqa: B027  (optional hook)
        """Release the resources that all episodes share."""


_MAX_ERROR_CHARS = 1000


def text_of_output(value: Any, max_bytes: int) -> str:
    """Return a string unchanged, and any other value as JSON or, if that is impossible, as `str` of the value."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return cut_to_bytes(text, max_bytes)


def cut_to_bytes(text: str, max_bytes: int) -> str:
    """Cut a text after `max_bytes` bytes of UTF-8, and append a mark that it was cut."""
    if len(text) <= max_bytes // 4:
        return text.encode("utf-8", "replace").decode("utf-8")
    encoded = text[: max_bytes + 1].encode("utf-8", "replace")
    if len(text) <= max_bytes and len(encoded) <= max_bytes:
        return encoded.decode("utf-8")
    kept = encoded[:max_bytes].decode("utf-8", "ignore")
    return f"{kept}\n[cut: {len(text) - len(kept)} more characters]"


def cut_middle(text: str, max_bytes: int) -> str:
    """Replace the middle of a text of more than `max_bytes` bytes of UTF-8 by a mark, because both ends may matter."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= max_bytes:
        return encoded.decode("utf-8")
    half = max_bytes // 2
    head, tail = encoded[:half].decode("utf-8", "ignore"), encoded[len(encoded) - half :].decode("utf-8", "ignore")
    return f"{head}\n[cut: {len(text) - len(head) - len(tail)} characters]\n{tail}"


def text_of_error(error: BaseException) -> str:
    """Describe an error of a tool for the model."""
    return f"Error: {type(error).__name__}: {error}"[:_MAX_ERROR_CHARS].encode("utf-8", "replace").decode("utf-8")
