"""Read the tools of a request, in the forms of three APIs, into OpenAI's form for chat templates.

Invariant: the same tool gives the same schema in all dialects. Only its name, description and parameters are kept:
other fields, such as `strict`, are for the server, and a chat template would show them to the model.
"""

from collections.abc import Mapping
from typing import Any

from nemo_rl.experience.agents.dialects.fields import Fields

type Tool = dict[str, Any]

_SHOWN_TOOLS = 20


def nested_tools(fields: Fields) -> list[Tool]:
    """Read the tools of Chat Completions: `{"type": "function", "function": {...}}`.

    Raises:
        CallError: a tool is wrong, or no function.
    """
    tools = []
    for tool in fields.objects("tools"):
        _check_type(tool, "function")
        function = tool.object("function")
        if function is None:
            raise tool.wrong("function", "an object with name, description and parameters")
        tools.append(_tool(function, "parameters"))
    return tools


def flat_tools(fields: Fields) -> list[Tool]:
    """Read the tools of the Responses API: `{"type": "function", "name": ..., "parameters": ...}`.

    Raises:
        CallError: a tool is wrong, or no function.
    """
    tools = []
    for tool in fields.objects("tools"):
        _check_type(tool, "function")
        tools.append(_tool(tool, "parameters"))
    return tools


def schema_tools(fields: Fields) -> list[Tool]:
    """Read the tools of the Messages API: `{"name": ..., "input_schema": ...}`.

    Raises:
        CallError: a tool is wrong, or one that Anthropic's servers run.
    """
    tools = []
    for tool in fields.objects("tools"):
        if tool.has("type"):
            _check_type(tool, "custom")
        if not tool.has("input_schema"):
            raise tool.wrong("input_schema", "an object, a JSON schema")
        tools.append(_tool(tool, "input_schema"))
    return tools


def reads_tool_calls(fields: Fields, tools: list[Tool]) -> bool:
    """Return whether calls in the answer are parsed, from `tool_choice`.

    "none" turns it off. "auto", "required" (Anthropic: "any") and a named tool turn it on: nothing forces the model to
    call a tool, because its tokens are sampled from the policy without constraints. If the answer shall have a call,
    the program has to check for it.

    Raises:
        CallError: the field is wrong, or names a tool that the request does not have.
    """
    value = fields.values.get("tool_choice")
    if value is None:
        return True
    if isinstance(value, str):
        return fields.one_of("tool_choice", ("none", "auto", "required")) != "none"
    choice = fields.object("tool_choice")
    if choice is None:
        return True
    if choice.values.get("type") == "allowed_tools":
        raise choice.unsupported("type", "Give only the tools that are allowed in the field tools.")
    if choice.one_of("type", ("none", "auto", "any", "tool", "function")) in ("tool", "function"):
        _check_named(choice, tools)
    return choice.values["type"] != "none"


def _check_named(choice: Fields, tools: list[Tool]) -> None:
    named = choice.object("function") or choice
    name = named.required_text("name")
    known = [tool["function"]["name"] for tool in tools]
    if name not in known:
        raise named.wrong(
            "name", f"the name of a tool of the request: {', '.join(known[:_SHOWN_TOOLS]) or 'it has none'}"
        )


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
