"""Answers that a `tool_choice` forces to be calls: their form, and how they are read."""

import json
from typing import Any

import pytest
from dialect_parts import WEATHER

from nemo_rl.agents.endpoint.calls import ANY_TOOL, CallError, CallRequest
from nemo_rl.agents.endpoint.forms import form_of_calls, read_calls, with_form
from nemo_rl.models.generation.interfaces import Grammar, SamplingParams
from nemo_rl.models.generation.registry import ENGINES, grammar_refusal

pytestmark = pytest.mark.fast

UNIT = {"$ref": "#/$defs/unit"}


def tool(name: str, parameters: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, **({} if parameters is None else {"parameters": parameters})},
    }


def measure(name: str, *units: str) -> dict[str, Any]:
    return tool(name, {"type": "object", "properties": {"unit": UNIT}, "$defs": {"unit": {"enum": list(units)}}})


WEATHER_TOOL = {"type": "function", "function": WEATHER}
CLOCK = tool("clock", None)


def form(*tools: dict[str, Any], forced: str = ANY_TOOL, once: bool = False) -> Any:
    grammar = form_of_calls(CallRequest(tools=tools, forced_tool=forced, calls_once=once))
    assert grammar.kind == "json"
    return json.loads(grammar.definition)


def test_a_named_tool_is_answered_with_its_arguments() -> None:
    assert form(CLOCK, WEATHER_TOOL, forced="weather") == WEATHER["parameters"]
    assert form(CLOCK, WEATHER_TOOL, forced="clock") == {"type": "object", "properties": {}}


def test_any_tools_are_answered_with_a_list_of_calls() -> None:
    schema = form(CLOCK, WEATHER_TOOL)
    clock, weather = schema["items"]["anyOf"]
    assert (schema["type"], schema["minItems"], "maxItems" in schema) == ("array", 1, False)
    assert weather["properties"] == {"name": {"const": "weather"}, "parameters": WEATHER["parameters"]}
    assert clock["required"] == ["name", "parameters"] and clock["additionalProperties"] is False
    assert form(CLOCK, WEATHER_TOOL, once=True)["maxItems"] == 1
    assert form(CLOCK)["items"]["properties"]["name"] == {"const": "clock"}


def test_definitions_stand_where_their_references_look_for_them() -> None:
    schema = form(measure("a", "m", "km"), measure("b", "m", "km"))
    assert schema["$defs"] == {"unit": {"enum": ["m", "km"]}}
    assert all("$defs" not in each["properties"]["parameters"] for each in schema["items"]["anyOf"])
    with pytest.raises(CallError, match=r"\$defs.unit in different ways") as refused:
        form(measure("a", "m"), measure("b", "km"))
    assert (refused.value.status, refused.value.parameter) == (400, "tools")


def test_references_that_would_mean_something_else_are_refused() -> None:
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}}}
    tool_of_tree = {"type": "function", "function": {"name": "tree", "parameters": tree}}
    with pytest.raises(CallError, match="'tree' has the reference '#'") as refused:
        form(CLOCK, tool_of_tree)
    assert (refused.value.status, refused.value.parameter) == (400, "tools")
    assert form(CLOCK, tool_of_tree, forced="tree") == tree


def test_a_complete_answer_is_read_as_its_calls_and_a_cut_one_as_none() -> None:
    any_call = CallRequest(forced_tool=ANY_TOOL)
    text = '[{"name": "weather", "parameters": {"city": "Köln"}}, {"name": "clock", "parameters": {}}]'
    assert read_calls(text, any_call) == [("weather", '{"city": "Köln"}'), ("clock", "{}")]
    named = CallRequest(forced_tool="weather")
    assert read_calls(' {"city":  "Köln"}\n', named) == [("weather", '{"city":  "Köln"}')]
    assert read_calls(text[:-1], any_call) is None and read_calls('{"city": "K', named) is None


FORM = Grammar("regex", "a+")


def test_a_form_is_for_answers_that_call_no_tool() -> None:
    sampling = SamplingParams()

    def formed(**request: Any) -> Grammar | None:
        return with_form(sampling, CallRequest(**request), trains=True, forwards=False).grammar

    assert formed() is None and formed(tools=[CLOCK]) is None
    assert formed(grammar=FORM) == formed(grammar=FORM, tools=[CLOCK], reads_tool_calls=False) == FORM
    forced = formed(grammar=FORM, tools=[CLOCK], forced_tool="clock")
    assert forced is not None and forced.kind == "json"
    with pytest.raises(CallError, match="cannot call a tool"):
        formed(grammar=FORM, tools=[CLOCK])


def test_only_training_scores_and_so_needs_the_policys_distribution() -> None:
    hot = SamplingParams(temperature=0.5)
    request = CallRequest(grammar=FORM)
    assert with_form(SamplingParams(), request, trains=True, forwards=False).scores_policy
    assert with_form(hot, CallRequest(), trains=True, forwards=False) is hot
    with pytest.raises(CallError, match="temperature=0.5") as refused:
        with_form(hot, request, trains=True, forwards=False)
    assert refused.value.status == 400
    assert not with_form(hot, request, trains=False, forwards=False).scores_policy


def test_another_server_forces_calls_itself() -> None:
    request = CallRequest(tools=[CLOCK], forced_tool=ANY_TOOL, grammar=FORM)
    assert with_form(SamplingParams(), request, trains=False, forwards=True).grammar is None
    request = CallRequest(tools=[CLOCK], grammar=FORM)
    assert with_form(SamplingParams(), request, trains=False, forwards=True).grammar == FORM


def test_only_an_engine_that_keeps_to_forms_gets_them() -> None:
    assert [name for name in ENGINES if grammar_refusal(name) is None] == ["vllm"]
    refusal = grammar_refusal("megatron")
    assert refusal is not None and "policy.generation.backend=megatron" in refusal and "backend=vllm" in refusal
