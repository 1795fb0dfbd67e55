"""Wrong and unsupported fields of requests: each is refused with status 400 and named."""

import json

import pytest
from dialect_parts import WEATHER, WEATHER_SCHEMA

from nemo_rl.agents.endpoint.calls import ANY_TOOL, CallError
from nemo_rl.agents.endpoint.server import DIALECT_BY_PATH, DIALECTS
from nemo_rl.models.generation.interfaces import Grammar

pytestmark = pytest.mark.fast

USER = {"role": "user", "content": "Hi"}
BODIES = {
    "/v1/chat/completions": {"model": "policy", "messages": [USER]},
    "/v1/completions": {"model": "policy", "prompt": "Hi"},
    "/v1/responses": {"model": "policy", "input": "Hi"},
    "/v1/messages": {"model": "policy", "messages": [USER], "max_tokens": 5},
}
PATHS = list(BODIES)
OPENAI_PATHS = PATHS[:3]
CHAT, COMPLETIONS, RESPONSES, MESSAGES = PATHS


def read(path, **changes):
    return DIALECT_BY_PATH[path].read(BODIES[path] | changes, {})


def refused(path, parameter, **changes):
    with pytest.raises(CallError) as raised:
        read(path, **changes)
    assert raised.value.status == 400
    assert raised.value.parameter == parameter, raised.value.message
    assert parameter in raised.value.message
    return raised.value


def test_each_path_has_one_dialect():
    assert [dialect.path for dialect in DIALECTS] == list(DIALECT_BY_PATH) == PATHS


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -0.1),
        ("temperature", 2.5),
        ("temperature", True),
        ("temperature", float("nan")),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 0.5),
        ("top_k", -2),
        ("seed", "7"),
        ("seed", 2**63),
        ("stream", "yes"),
        ("return_token_ids", 1),
        ("model", 5),
        ("n", 0),
        ("chat_template_kwargs", []),
        ("chat_template_kwargs", {"a": float("inf")}),
        ("min_p", 0.1),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"50256": -100}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("response_format", "json"),
        ("guided_whitespace_pattern", " "),
        ("top_logprobs", 3),
        ("audio", {"voice": "alloy"}),
        ("best_of", 4),
        ("echo", True),
        ("suffix", "end"),
        ("structured_outputs", ["a"]),
        ("stop_token_ids", [5]),
    ],
)
def test_a_wrong_or_unsupported_field_is_refused_in_all_dialects(path, name, value):
    refused(path, name, **{name: value})


@pytest.mark.parametrize("path", PATHS)
def test_variables_that_are_arguments_of_the_template_are_refused(path):
    refused(path, "chat_template_kwargs.tools", chat_template_kwargs={"tools": []})


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        *((CHAT, name, value) for name in ("max_tokens", "max_completion_tokens") for value in (0, 1.5, "5", True)),
        (COMPLETIONS, "max_tokens", 0),
        (RESPONSES, "max_output_tokens", 0),
        (MESSAGES, "max_tokens", None),
        (MESSAGES, "max_tokens", 0),
        *((path, "stop", value) for path in OPENAI_PATHS for value in ("", 5, [""], [5], {"a": 1}, "\ud800")),
        (MESSAGES, "stop_sequences", [""]),
        (CHAT, "n", 129),
        (RESPONSES, "n", 2),
        (MESSAGES, "n", 2),
        (CHAT, "logprobs", 1),
        (CHAT, "stream_options", []),
        (CHAT, "functions", [{"name": "weather"}]),
        (CHAT, "function_call", "auto"),
        (CHAT, "modalities", ["text", "audio"]),
        (CHAT, "continue_final_message", True),
        (CHAT, "add_generation_prompt", False),
        (COMPLETIONS, "logprobs", 2),
        (COMPLETIONS, "logprobs", True),
        (COMPLETIONS, "prompt", None),
        (COMPLETIONS, "prompt", []),
        (COMPLETIONS, "prompt", [[]]),
        (COMPLETIONS, "prompt", ["a", "b"]),
        (COMPLETIONS, "prompt", [[1], [2]]),
        (COMPLETIONS, "prompt", [1, -1]),
        (COMPLETIONS, "prompt", [1, True]),
        (COMPLETIONS, "prompt", [1, "a"]),
        (COMPLETIONS, "prompt", "\udc00"),
        (RESPONSES, "background", True),
        (RESPONSES, "conversation", "conv_1"),
        (RESPONSES, "truncation", "auto"),
        (RESPONSES, "include", ["message.output_text.logprobs"]),
        (RESPONSES, "store", "no"),
        (RESPONSES, "instructions", ["a"]),
        (MESSAGES, "mcp_servers", [{"url": "http://a"}]),
        (MESSAGES, "system", 5),
    ],
)
def test_a_wrong_or_unsupported_field_is_refused(path, name, value):
    refused(path, name, **{name: value})


CHAT_MESSAGES = [
    ([], "messages"),
    ("Hi", "messages"),
    (None, "messages"),
    (["Hi"], "messages[0]"),
    ([{"content": "Hi"}], "messages[0].role"),
    ([{"role": "robot", "content": "Hi"}], "messages[0].role"),
    ([{"role": ["user"], "content": "Hi"}], "messages[0].role"),
    ([{"role": "function", "name": "a", "content": "Hi"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": "\ud83d"}], "messages[0].content"),
    ([{"role": "user", "content": ["Hi"]}], "messages[0].content[0]"),
    ([USER, {"role": "user", "content": [{"type": "text"}]}], "messages[1].content[0].text"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], "messages[0].content[0].type"),
    ([{"role": "tool", "content": "5"}], "messages[0].tool_call_id"),
    ([{"role": "assistant", "content": None, "function_call": {"name": "a"}}], "messages[0].function_call"),
    ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
    ([{"role": "assistant", "tool_calls": [{"id": "a"}]}], "messages[0].tool_calls[0].function"),
    ([{"role": "assistant", "tool_calls": [{"type": "custom"}]}], "messages[0].tool_calls[0].type"),
    (
        [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {}}}]}],
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
        "messages[0].tool_calls[0].id",
    ),
]


@pytest.mark.parametrize(("messages", "parameter"), CHAT_MESSAGES)
def test_wrong_messages_of_chat_completions_are_refused(messages, parameter):
    refused(CHAT, parameter, messages=messages)


@pytest.mark.parametrize(
    ("items", "parameter"),
    [
        (None, "input"),
        (5, "input"),
        ([], "input"),
        (["Hi"], "input[0]"),
        ([{"type": "item_reference", "id": "msg_1"}], "input[0].type"),
        ([{"type": "custom_tool_call"}], "input[0].type"),
        ([{"role": "tool", "content": "Hi"}], "input[0].role"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}], "input[0].content[0].type"),
        ([{"type": "function_call", "name": "a", "arguments": "{}"}], "input[0].call_id"),
        ([{"type": "function_call", "name": "a", "arguments": {}, "call_id": "b"}], "input[0].arguments"),
        ([{"type": "function_call_output", "call_id": "a"}], "input[0].output"),
        ([{"type": "function_call_output", "output": "a"}], "input[0].call_id"),
        ([{"type": "reasoning", "content": "a"}], "input[0].content"),
    ],
)
def test_wrong_items_of_responses_are_refused(items, parameter):
    refused(RESPONSES, parameter, input=items)


@pytest.mark.parametrize(
    ("content", "parameter"),
    [
        (None, "messages[0].content"),
        ([{"type": "image", "source": {}}], "messages[0].content[0].type"),
        ([{"type": "document", "source": {}}], "messages[0].content[0].type"),
        ([{"type": "tool_result", "content": "5"}], "messages[0].content[0].tool_use_id"),
        (
            [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}],
            "messages[0].content[0].content[0].type",
        ),
        ([{"type": "tool_use", "id": "a", "name": "b", "input": {}}], "messages[0].content[0].type"),
    ],
)
def test_wrong_content_of_the_user_is_refused_by_messages(content, parameter):
    refused(MESSAGES, parameter, messages=[{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("content", "parameter"),
    [
        ([{"type": "tool_use", "id": "a", "name": "b"}], "messages[1].content[0].input"),
        ([{"type": "tool_use", "id": "a", "name": "b", "input": "{}"}], "messages[1].content[0].input"),
        ([{"type": "redacted_thinking", "data": "a"}], "messages[1].content[0].type"),
        ([{"type": "tool_use", "id": "a", "name": "b", "input": {}}], "messages"),
    ],
)
def test_wrong_content_of_the_assistant_is_refused_by_messages(content, parameter):
    refused(MESSAGES, parameter, messages=[USER, {"role": "assistant", "content": content}])


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON = Grammar("json", json.dumps(SCHEMA))
ANY_OBJECT = Grammar("json", '{"type": "object"}')
NESTED = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
FLAT = {"type": "json_schema", "name": "a", "schema": SCHEMA}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("changes", "form"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
        ({"response_format": NESTED}, JSON),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False, "whitespace_pattern": None}}, JSON),
        ({"structured_outputs": {"json": JSON.definition}}, JSON),
        ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, Grammar("choice", '["yes", "no"]')),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Grammar("grammar", 'root ::= "a"')),
        ({"guided_json": SCHEMA}, JSON),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_choice": ["yes"]}, Grammar("choice", '["yes"]')),
        ({"guided_grammar": 'root ::= "a"'}, Grammar("grammar", 'root ::= "a"')),
    ],
)
def test_a_form_of_the_answer_is_read_in_all_dialects(path, changes, form):
    assert read(path, **changes).grammar == form


def test_a_form_is_read_where_an_api_has_a_field_of_its_own():
    assert read(RESPONSES, text={"format": FLAT, "verbosity": "low"}).grammar == JSON
    assert read(RESPONSES, text={"format": {"type": "json_object"}}).grammar == ANY_OBJECT
    assert read(RESPONSES, text={"format": {"type": "text"}, "verbosity": "low"}).grammar is None
    assert read(MESSAGES, output_config={"format": FLAT, "effort": "low"}).grammar == JSON
    assert read(MESSAGES, output_config={"effort": "low"}).grammar is None
    assert read(MESSAGES, output_format=FLAT).grammar == JSON
    assert read(MESSAGES, output_format=None, output_config={"format": FLAT}).grammar == JSON
    assert read(RESPONSES, output_format=FLAT).grammar is None, "a field of Anthropic's API only"


@pytest.mark.parametrize(
    ("path", "changes", "parameter"),
    [
        (CHAT, {"response_format": {"type": "xml"}}, "response_format.type"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.schema"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        (CHAT, {"response_format": NESTED, "guided_regex": "a"}, "response_format"),
        (CHAT, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.regex"),
        (CHAT, {"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        (CHAT, {"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        (CHAT, {"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        (CHAT, {"structured_outputs": {"choice": [5]}}, "structured_outputs.choice"),
        (CHAT, {"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        (CHAT, {"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        (RESPONSES, {"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        (MESSAGES, {"output_format": {"type": "json_schema"}}, "output_format.schema"),
        (MESSAGES, {"output_format": FLAT, "output_config": {"format": FLAT}}, "output_config.format"),
    ],
)
def test_a_wrong_form_is_refused(path, changes, parameter):
    refused(path, parameter, **changes)


def test_edits_of_the_context_are_refused_unless_they_change_nothing():
    edit = {"type": "clear_thinking_20251015", "keep": "all"}
    assert read(MESSAGES, context_management={"edits": [edit]})
    refused(MESSAGES, "context_management.edits", context_management={"edits": [{"type": "clear_tool_uses_20250919"}]})


TOOLS = {
    CHAT: {"type": "function", "function": WEATHER | {"strict": True}},
    RESPONSES: {"type": "function", "strict": True, **WEATHER},
    MESSAGES: {"name": "weather", "description": WEATHER["description"], "input_schema": WEATHER_SCHEMA},
}


@pytest.mark.parametrize("path", TOOLS)
def test_a_tool_has_one_schema_in_all_dialects(path):
    assert read(path, tools=[TOOLS[path]]).tools == [{"type": "function", "function": WEATHER}]


@pytest.mark.parametrize(
    ("path", "tools", "parameter"),
    [
        *((path, {}, "tools") for path in TOOLS),
        *((path, [5], "tools[0]") for path in TOOLS),
        (CHAT, [{"type": "function"}], "tools[0].function"),
        (CHAT, [{"type": "function", "function": {}}], "tools[0].function.name"),
        (CHAT, [{"type": "function", "function": {"name": "a", "parameters": 5}}], "tools[0].function.parameters"),
        (CHAT, [{"type": "custom", "custom": {}}], "tools[0].type"),
        (CHAT, [{"function": {"name": "a"}}], "tools[0].type"),
        (RESPONSES, [{"type": "web_search"}], "tools[0].type"),
        (RESPONSES, [{"type": "function", "name": ""}], "tools[0].name"),
        (MESSAGES, [{"name": "a"}], "tools[0].input_schema"),
        (MESSAGES, [{"type": "web_search_20250305", "name": "web_search"}], "tools[0].type"),
    ],
)
def test_wrong_tools_are_refused(path, tools, parameter):
    refused(path, parameter, tools=tools)


NAMED = {
    CHAT: {"type": "function", "function": {"name": "weather"}},
    RESPONSES: {"type": "function", "name": "weather"},
    MESSAGES: {"type": "tool", "name": "weather"},
}


@pytest.mark.parametrize("path", TOOLS)
def test_only_the_choice_none_turns_off_the_parsing_of_calls(path):
    choices = [None, NAMED[path], {"type": "auto"} if path == MESSAGES else "auto"]
    choices.append({"type": "any"} if path == MESSAGES else "required")
    for choice in choices:
        assert read(path, tools=[TOOLS[path]], tool_choice=choice).reads_tool_calls
    none = {"type": "none"} if path == MESSAGES else "none"
    request = read(path, tools=[TOOLS[path]], tool_choice=none)
    assert request.tools and not request.reads_tool_calls
    assert request.forced_tool is None


@pytest.mark.parametrize("path", TOOLS)
def test_a_choice_of_tools_may_force_a_call(path):
    is_messages = path == MESSAGES
    auto, required = ({"type": "auto"}, {"type": "any"}) if is_messages else ("auto", "required")
    single = (
        {"tool_choice": {**required, "disable_parallel_tool_use": True}}
        if is_messages
        else {"tool_choice": required, "parallel_tool_calls": False}
    )
    tools = [TOOLS[path]]
    assert read(path, tools=tools, tool_choice=auto).forced_tool is None
    assert read(path, tools=tools, tool_choice=NAMED[path]).forced_tool == "weather"
    request = read(path, tools=tools, tool_choice=required)
    assert (request.forced_tool, request.calls_once) == (ANY_TOOL, False)
    assert read(path, tools=tools, **single).calls_once
    refused(path, "tools", tool_choice=required)


@pytest.mark.parametrize(
    ("path", "choice", "parameter"),
    [
        (CHAT, "always", "tool_choice"),
        (CHAT, 5, "tool_choice"),
        (CHAT, {"type": "function", "function": {"name": "weathr"}}, "tool_choice.function.name"),
        (CHAT, {"type": "allowed_tools", "allowed_tools": {}}, "tool_choice.type"),
        (RESPONSES, {"type": "web_search"}, "tool_choice.type"),
        (MESSAGES, {"type": "tool", "name": "other"}, "tool_choice.name"),
    ],
)
def test_a_wrong_choice_of_tools_is_refused(path, choice, parameter):
    refused(path, parameter, tools=[TOOLS[path]], tool_choice=choice)


def test_the_error_about_an_unknown_tool_names_the_known_ones():
    choice = {"type": "function", "function": {"name": "weathr"}}
    error = refused(CHAT, "tool_choice.function.name", tools=[TOOLS[CHAT]], tool_choice=choice)
    assert "of the request: weather." in error.message


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", [[], "Hi", 5, None])
def test_a_body_that_is_no_object_is_refused(path, body):
    with pytest.raises(CallError, match="body") as raised:
        DIALECT_BY_PATH[path].read(body, {})
    assert raised.value.status == 400


@pytest.mark.parametrize("path", PATHS)
def test_fields_without_effect_are_ignored(path):
    plain = read(path)
    given = read(
        path,
        user="u",
        metadata={"a": "b"},
        service_tier="auto",
        parallel_tool_calls=False,
        reasoning_effort="high",
        cache_control={"type": "ephemeral"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        logit_bias={},
        presence_penalty=0,
        frequency_penalty=0.0,
        top_logprobs=0,
        response_format={"type": "text"},
        best_of=1,
        echo=False,
        suffix=None,
        temperature=None,
        unheard_of={"a": 1},
    )
    assert given == plain


@pytest.mark.parametrize("path", PATHS)
def test_fields_of_sampling_are_read(path):
    length = {RESPONSES: "max_output_tokens"}.get(path, "max_tokens")
    stop = {MESSAGES: "stop_sequences"}.get(path, "stop")
    request = read(
        path,
        temperature=0,
        top_p=0.5,
        top_k=20,
        seed=-3,
        chat_template_kwargs={"enable_thinking": False},
        **{length: 9, stop: ["a", "b"]},
    )
    assert (request.temperature, request.top_p, request.top_k, request.seed) == (0.0, 0.5, 20, -3)
    assert (request.max_tokens, request.stop) == (9, ("a", "b"))
    assert request.template_kwargs == {"enable_thinking": False}
    assert read(path, top_k=0).top_k == read(path, top_k=-1).top_k == -1


def test_one_stop_text_and_no_limit():
    request = read(CHAT, stop="a", n=128)
    assert (request.stop, request.max_tokens, request.num_answers) == (("a",), None, 128)
    assert read(CHAT, max_completion_tokens=5, max_tokens=9).max_tokens == 5
    assert read(COMPLETIONS, n=4, best_of=4).num_answers == 4


@pytest.mark.parametrize("value", ["x" * 10_000, {"a": float("nan")}, [1] * 10_000])
def test_an_error_shows_only_the_beginning_of_a_value(value):
    error = refused(CHAT, "temperature", temperature=value)
    assert len(error.message) < 250
    json.dumps(DIALECT_BY_PATH[CHAT].error(error), allow_nan=False)
