"""Constrain the answer to a request to a form, such as a JSON schema, and refuse forms that cannot be sampled."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nemo_rl.agents.endpoint.calls import ANY_TOOL, CallError, CallRequest
from nemo_rl.models.generation.interfaces import Grammar, SamplingParams

_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
_DEFINITIONS = ("$defs", "definitions")


def form_of_calls(request: CallRequest) -> Grammar:
    """Return the form of an answer that calls a tool, for a request with a `forced_tool`.

    Raises:
        CallError: two tools define the same name in different ways, or a schema refers to a part of itself outside of
            its definitions, which is at another path in the form.
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
    """Return names and arguments of the calls in the answer to a `forced_tool`, or None if the answer was cut off."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if request.forced_tool != ANY_TOOL:
        return [(str(request.forced_tool), text.strip())]
    return [(call["name"], json.dumps(call["parameters"], ensure_ascii=False)) for call in value]


def _check_references(tool: str, part: Any) -> None:
    """Refuse references that would not work after a tool's schema is moved into the form."""
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
    """Collect the definitions of all schemas for the root of the form, where references expect them."""
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


MOST_CHARACTERS = {"json": 65_536, "choice": 65_536, "grammar": 32_768, "regex": 4_096}
"""Largest number of characters in the definition of a form, by its kind."""
_MOST_REPETITIONS = 256
"""Largest number of quantifiers in a regular expression or grammar. The engine's time grows with its third power."""
_MOST_PROPERTIES = 256
"""Largest number of properties of an object in a JSON schema, which also determines the engine's time."""
_QUANTIFIERS = "*+?{"


def with_form(sampling: SamplingParams, request: CallRequest, *, trains: bool, forwards: bool) -> SamplingParams:
    """Return sampling parameters with the grammar that a request demands (a response format or a forced tool call).

    Args:
        trains: whether the policy is trained on the answer.
        forwards: whether requests are forwarded to another server, which then enforces tool calls itself.

    Raises:
        CallError: the format rules out tool calls that the request allows, the format is too large, the schemas of the
            tools do not fit into one form (as in `form_of_calls`), or the answer is used for training and is not
            sampled from the unmodified policy (temperature 1, no top_p, top_k or bad_words).
    """
    grammar = request.grammar
    if request.forced_tool is not None:
        grammar = None if forwards else form_of_calls(request)
    elif grammar is not None and request.tools and request.reads_tool_calls and not forwards:
        raise CallError(
            400,
            "An answer that keeps to a form cannot call a tool, and the request has tools and leaves the choice to the "
            'policy. Set tool_choice to "none" (the form holds), or to "required" or a tool (a call), or send either '
            "tools or the form.",
            "unsupported_parameter",
            "tool_choice",
        )
    if grammar is None:
        return sampling
    _check_size(grammar)
    if trains and not sampling.draws_from_policy:
        raise CallError(
            400,
            "An answer of a demanded form (response_format, structured_outputs, or a tool_choice that demands a call) "
            "is trained by the policy's log-probabilities without the form, which are known at temperature 1 without "
            f"top_p, top_k and bad_words; this one would be drawn with temperature={sampling.temperature:g}, "
            f"top_p={sampling.top_p:g}, top_k={sampling.top_k} and {len(sampling.bad_words)} bad_words. Leave the form "
            'out (for tool_choice: "auto"), or change policy.generation of the run.',
            "unsupported_parameter",
        )
    return replace(sampling, grammar=grammar, scores_policy=trains)


def _check_size(grammar: Grammar) -> None:
    """Refuse a form that an engine would need long to translate."""
    kind, definition = grammar
    found = {"characters": (len(definition), MOST_CHARACTERS[kind])}
    if found["characters"][0] <= MOST_CHARACTERS[kind]:
        if kind in ("regex", "grammar"):
            found["repetitions"] = (sum(map(definition.count, _QUANTIFIERS)), _MOST_REPETITIONS)
        if kind == "json":
            found["properties in one object"] = (_most_properties(definition), _MOST_PROPERTIES)
    for what, (given, most) in found.items():
        if given > most:
            raise CallError(
                400,
                f"The form of the answer ({kind}) has {given} {what}; allowed are {most}, because a larger one would "
                "keep the engine busy before it draws a token.",
                "invalid_structured_output",
            )


def _most_properties(schema: str) -> int:
    """Return the largest number of properties of an object in a JSON schema, or 0 if the text is not JSON."""
    most = 0
    try:
        pending = [json.loads(schema)]
    except (ValueError, RecursionError):  # the engine reports what is wrong with the schema
        return 0
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            for place in ("properties", "patternProperties"):
                most = max(most, len(part[place]) if isinstance(part.get(place), dict) else 0)
            pending += part.values()
        elif isinstance(part, list):
            pending += part
    return most
