"""Describe a Python function to a model: name, description and arguments as a JSON schema.

Invariant: a function is called only with arguments that pydantic has checked against its type hints.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from nemo_rl.utils.errors import ConfigError

_ARGUMENT = re.compile(r"^\s*\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


@dataclass(frozen=True)
class ToolSpec:
    """One tool as a model sees it."""

    name: str
    """Name in calls."""
    description: str
    """Text for the model."""
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, an object."""
    arguments: type[BaseModel] | None = None
    """Model that checks the arguments; None where the tool checks them itself."""

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
        function: has a docstring, and a type hint for each parameter. The first paragraph of the docstring describes
            the tool, the lines below `Args:` its arguments.
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
    """Leave out pydantic's titles, which repeat the names; a property that is called title stays."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: _without_titles(value) for key, value in schema.items() if not (key == "title" and isinstance(value, str))
    }
