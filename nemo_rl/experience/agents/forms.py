"""The form of an answer in the sampling of its request, and what cannot be sampled in a form."""

from dataclasses import replace

from nemo_rl.experience.agents.calls import CallError, CallRequest
from nemo_rl.experience.agents.forced_calls import form_of_calls
from nemo_rl.models.generation.interfaces import SamplingParams

MOST_CHARACTERS = {"json": 65_536, "choice": 65_536, "grammar": 32_768, "regex": 4_096}
"""Largest definition of a form, by its kind."""


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
    most = MOST_CHARACTERS[grammar.kind]
    if len(grammar.definition) > most:
        raise CallError(
            400,
            f"The form of the answer ({grammar.kind}) has {len(grammar.definition)} characters; allowed are {most}, "
            "because the engine translates it before it answers anybody else.",
            "invalid_structured_output",
        )
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
