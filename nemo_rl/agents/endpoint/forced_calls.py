"""Answers that are tool calls by force: `tool_choice` demands one, so the answer is JSON, and no parser is needed.

The answer to a named tool is its arguments; otherwise it is a list of calls, `[{"name": ..., "parameters": ...}]`, as
in vLLM. Invariant: a complete answer is read as exactly the calls that it has.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl.agents.endpoint.calls import ANY_TOOL, CallError, CallRequest
from nemo_rl.models.generation.interfaces import Grammar

_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
_DEFINITIONS = ("$defs", "definitions")


def form_of_calls(request: CallRequest) -> Grammar:
    """Return the form of an answer that calls a tool.

    Args:
        request: has `forced_tool`.

    Raises:
        CallError: two tools define the same name in different ways, or a schema refers to a part of itself outside of
            its definitions, which has another place in the form.
    """
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or _NO_PARAMETERS for tool in request.tools}
    if request.forced_tool != ANY_TOOL:
        return Grammar("json", json.dumps(schemas[str(request.forced_tool)]))
    for name, schema in schemas.items():
        _check_references(name, schema)
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": _without_definitions(schema)},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, schema in schemas.items()
    ]
    most = {"maxItems": 1} if request.calls_once else {}
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    form = {"type": "array", "minItems": 1, **most, "items": items, **_definitions(list(schemas.values()))}
    return Grammar("json", json.dumps(form))


def read_calls(text: str, request: CallRequest) -> list[tuple[str, str]] | None:
    """Return names and arguments of the calls of an answer; None if it was cut off in the middle.

    Args:
        text: the answer.
        request: has `forced_tool`.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if request.forced_tool != ANY_TOOL:
        return [(str(request.forced_tool), text.strip())]
    return [(call["name"], json.dumps(call["parameters"], ensure_ascii=False)) for call in value]


def _check_references(tool: str, part: Any) -> None:
    """Refuse references that mean something else, or nothing, where the form has the schema."""
    if isinstance(part, list):
        for each in part:
            _check_references(tool, each)
    if not isinstance(part, Mapping):
        return
    target = part.get("$ref")
    if isinstance(target, str) and not target.startswith(tuple(f"#/{place}/" for place in _DEFINITIONS)):
        raise CallError(
            400,
            f"The tool {tool!r} has the reference {target!r}, which no form of several tools has; references to $defs "
            'and definitions are possible. Name the tool in tool_choice, or set it to "auto".',
            "invalid_tools",
            "tools",
        )
    for each in part.values():
        _check_references(tool, each)


def _without_definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name not in _DEFINITIONS}


def _definitions(schemas: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the definitions of all schemas for the root of one schema, where their references look for them."""
    found: dict[str, dict[str, Any]] = {}
    for schema in schemas:
        for place in _DEFINITIONS:
            for name, definition in (schema.get(place) or {}).items():
                if found.setdefault(place, {}).setdefault(name, definition) != definition:
                    raise CallError(
                        400,
                        f"Two tools define {place}.{name} in different ways, so no form has both. Rename one of them, "
                        'or name one tool in tool_choice, or set it to "auto".',
                        "invalid_tools",
                        "tools",
                    )
    return found
