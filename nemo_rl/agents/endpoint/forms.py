"""The form of an answer in the sampling of its request, and what cannot be sampled in a form."""

import json
from dataclasses import replace

from nemo_rl.agents.endpoint.calls import CallError, CallRequest
from nemo_rl.agents.endpoint.forced_calls import form_of_calls
from nemo_rl.models.generation.interfaces import Grammar, SamplingParams

MOST_CHARACTERS = {"json": 65_536, "choice": 65_536, "grammar": 32_768, "regex": 4_096}
"""Largest definition of a form, by its kind."""
_MOST_REPETITIONS = 256
"""Quantifiers of a regular expression or a grammar. The engine's time grows with their third power."""
_MOST_PROPERTIES = 256
"""Properties of an object of a JSON schema, for the same reason."""
_QUANTIFIERS = "*+?{"


def with_form(sampling: SamplingParams, request: CallRequest, *, trains: bool, forwards: bool) -> SamplingParams:
    """Return sampling parameters with the form of the answer to a request.

    Args:
        sampling: of the request.
        request: may demand a form, or calls.
        trains: whether the answer is trained.
        forwards: whether another server answers, which makes the calls that are forced itself.

    Raises:
        CallError: the form excludes calls that the request allows, or its log-probabilities would be wrong.
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
    """Refuse a form that would take an engine long to translate.

    Raises:
        CallError: it is too large.
    """
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
    """Return the largest number of properties of an object in a JSON schema; 0 if it is no JSON."""
    most = 0
    try:
        pending = [json.loads(schema)]
    except (ValueError, RecursionError):  # the engine says what is wrong with it
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
