"""Convert the tools of a request from the forms of three APIs to OpenAI's form for chat templates.

Invariant: the same tool has the same schema in all dialects. Only its name, description and parameters are kept. Other
fields, such as `strict`, are for the server, but a chat template would show them to the model.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_rl.agents.dialects.fields import Fields
from nemo_rl.agents.endpoint.calls import ANY_TOOL, CallError

type Tool = dict[str, Any]

_SHOWN_TOOLS = 20
_MOST_TOOLS = 512


def nested_tools(fields: Fields) -> list[Tool]:
    """Read the tools of Chat Completions: `{"type": "function", "function": {...}}`.

    Raises:
        CallError: a tool is wrong, or is not a function.
    """
    tools = []
    for tool in _tool_fields(fields):
        _check_type(tool, "function")
        function = tool.object("function")
        if function is None:
            raise tool.wrong("function", "an object with name, description and parameters")
        tools.append(_tool(function, "parameters"))
    return tools


def flat_tools(fields: Fields) -> list[Tool]:
    """Read the tools of the Responses API: `{"type": "function", "name": ..., "parameters": ...}`.

    Raises:
        CallError: a tool is wrong, or is not a function.
    """
    tools = []
    for tool in _tool_fields(fields):
        _check_type(tool, "function")
        tools.append(_tool(tool, "parameters"))
    return tools


def schema_tools(fields: Fields) -> list[Tool]:
    """Read the tools of the Messages API: `{"name": ..., "input_schema": ...}`.

    Raises:
        CallError: a tool is wrong, or is a tool that Anthropic's servers run.
    """
    tools = []
    for tool in _tool_fields(fields):
        if tool.has("type"):
            _check_type(tool, "custom")
        if not tool.has("input_schema"):
            raise tool.wrong("input_schema", "an object, a JSON schema")
        tools.append(_tool(tool, "input_schema"))
    return tools


def tool_choice(fields: Fields, tools: list[Tool]) -> dict[str, Any]:
    """Read `tool_choice`, and return the attributes of a `CallRequest` that say whether the answer calls tools.

    Raises:
        CallError: the field is wrong, or names a tool that the request does not have.
    """
    choice, name = _choice(fields, tools)
    forced = {"any": ANY_TOOL, "required": ANY_TOOL, "named": name}.get(choice)
    if forced == ANY_TOOL and not tools:
        raise fields.wrong("tools", f'a list of at least one tool with tool_choice "{choice}"')
    details = fields.values.get("tool_choice")
    is_single = isinstance(details, Mapping) and details.get("disable_parallel_tool_use") is True
    is_single = is_single or not fields.flag("parallel_tool_calls", default=True)
    return {
        "reads_tool_calls": choice != "none",
        "forced_tool": forced,
        "calls_once": forced == ANY_TOOL and is_single,
    }


def _choice(fields: Fields, tools: list[Tool]) -> tuple[str, str | None]:
    """Return "none", "auto", "required" (Anthropic's "any") or "named", and for "named" also the name of the tool."""
    value = fields.values.get("tool_choice")
    if value is None:
        return "auto", None
    if isinstance(value, str):
        return fields.one_of("tool_choice", ("none", "auto", "required")), None
    choice = Fields(value, "tool_choice")
    if choice.values.get("type") == "allowed_tools":
        raise choice.unsupported("type", "Give only the tools that are allowed in the field tools.")
    kind = choice.one_of("type", ("none", "auto", "any", "tool", "function"))
    return ("named", _named(choice, tools)) if kind in ("tool", "function") else (kind, None)


def _named(choice: Fields, tools: list[Tool]) -> str:
    named = choice.object("function") or choice
    name = named.required_text("name")
    known = [tool["function"]["name"] for tool in tools]
    if name not in known:
        raise named.wrong(
            "name", f"the name of a tool of the request: {', '.join(known[:_SHOWN_TOOLS]) or 'it has none'}"
        )
    return name


def _tool_fields(fields: Fields) -> Iterator[Fields]:
    """Yield the tools of a request."""
    given = fields.items("tools")
    if len(given) > _MOST_TOOLS:
        message = f"tools has {len(given)} items; allowed are {_MOST_TOOLS}."
        raise CallError(400, message, "invalid_tools", "tools")
    return fields.objects("tools")


def _check_type(tool: Fields, allowed: str) -> None:
    kind = tool.required_text("type")
    if kind != allowed:
        raise tool.unsupported("type", f'Only tools of type "{allowed}", which the program runs itself, can be given.')


def _tool(function: Fields, schema_field: str) -> Tool:
    made: dict[str, Any] = {"name": function.required_text("name")}
    description = function.text("description")
    if description is not None:
        made["description"] = description
    parameters: Mapping[str, Any] | None = function.json_object(schema_field)
    if parameters is not None:
        made["parameters"] = parameters
    return {"type": "function", "function": made}
