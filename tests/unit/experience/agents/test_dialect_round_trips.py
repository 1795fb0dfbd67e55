"""A program that sends an answer back continues the conversation with a message equal to `CallAnswer.message`."""

import json
import random

import pytest
from dialect_parts import CALL, SECOND_CALL, WEATHER, answer, answer_with_calls, answers, comparable
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.agents.dialects.interface import Dialect
from nemo_rl.agents.endpoint.server import DIALECT_BY_PATH

pytestmark = pytest.mark.fast

CHAT, RESPONSES, MESSAGES = (
    DIALECT_BY_PATH[path] for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages")
)
USER = {"role": "user", "content": "Hi"}
NEXT = {"role": "user", "content": "And now?"}


def sent(dialect: Dialect, body, found, memory=None):
    """Return the response as a program reads it."""
    memory = {} if memory is None else memory
    response = dialect.response(body, dialect.read(body, memory), [found], memory)
    return json.loads(json.dumps(response, ensure_ascii=False, allow_nan=False).encode())


def chat_history(found, keeps_reasoning=True):
    body = {"messages": [USER]}
    message = sent(CHAT, body, found)["choices"][0]["message"]
    if not keeps_reasoning:
        del message["reasoning_content"]
    return CHAT.read({"messages": [USER, message, NEXT]}, {}).messages


def responses_history(found, keeps_reasoning=True):
    output = sent(RESPONSES, {"input": "Hi"}, found)["output"]
    kept = [item for item in output if keeps_reasoning or item["type"] != "reasoning"]
    return RESPONSES.read({"input": [USER, *kept, NEXT]}, {}).messages


def stored_history(found, keeps_reasoning=True):
    memory = {}
    response_id = sent(RESPONSES, {"input": "Hi", "instructions": "Be brief."}, found, memory)["id"]
    return RESPONSES.read({"input": "And now?", "previous_response_id": response_id}, memory).messages


def messages_history(found, keeps_reasoning=True):
    content = sent(MESSAGES, {"messages": [USER], "max_tokens": 5}, found)["content"]
    kept = [block for block in content if keeps_reasoning or block["type"] != "thinking"]
    body = {"messages": [USER, {"role": "assistant", "content": kept}, NEXT], "max_tokens": 5}
    return MESSAGES.read(body, {}).messages


HISTORIES = [chat_history, responses_history, stored_history, messages_history]


@pytest.mark.parametrize("history", HISTORIES)
@settings(max_examples=60, deadline=None)
@given(found=answers())
def test_an_answer_that_is_sent_back_is_the_same_message(history, found):
    before, message, after = history(found)
    assert (before, after) == (USER, NEXT)
    assert comparable(message) == comparable(found.message)


@pytest.mark.parametrize("history", [chat_history, responses_history, messages_history])
@settings(max_examples=20, deadline=None)
@given(found=answers())
def test_without_its_reasoning_all_else_is_the_same(history, found):
    _, message, _ = history(found, keeps_reasoning=False)
    expected = {name: value for name, value in found.message.items() if name != "reasoning_content"}
    assert comparable(message) == comparable(expected)


@pytest.mark.parametrize("history", HISTORIES[:3])
@pytest.mark.parametrize("arguments", ["{", "", '{"a":  1}', "[1]"])
def test_openais_apis_keep_the_text_of_arguments(history, arguments):
    found = answer_with_calls(tool_calls=[type(CALL)("a", "f", arguments)])
    assert history(found)[1] == found.message


@pytest.mark.parametrize("keeps_ids", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_items_of_many_answers_are_read_as_their_messages(seed, keeps_ids):
    random_numbers = random.Random(seed)
    items, expected = [USER], [USER]
    for number in range(8):
        reasoning = random_numbers.choice([None, f"thought {number}", ""])
        make = random_numbers.choice([answer, answer_with_calls])
        found = make(random_numbers.choice(["", f"text {number}"]), id=str(number), reasoning=reasoning)
        output = sent(RESPONSES, {"input": "Hi"}, found)["output"]
        items += [{name: value for name, value in item.items() if keeps_ids or name != "id"} for item in output]
        expected.append(found.message)
        for call in found.tool_calls:
            items.append({"type": "function_call_output", "call_id": call.id, "output": "5"})
            expected.append({"role": "tool", "content": "5", "tool_call_id": call.id})
        # Without ids, an answer with calls that follows a text directly cannot be told from the rest of that answer.
        if not found.tool_calls and (random_numbers.random() < 0.5 or not keeps_ids):
            items.append(NEXT)
            expected.append(NEXT)
    assert RESPONSES.read({"input": items}, {}).messages == expected


def test_results_between_the_calls_of_one_answer_come_after_it():
    items, expected = [USER], [USER]
    for number in range(2):
        found = answer_with_calls("text" * number, id=f"a_{number}")
        results = [{"type": "function_call_output", "call_id": call.id, "output": "5"} for call in found.tool_calls]
        *others, first, second = sent(RESPONSES, {"input": "Hi"}, found)["output"]
        items += [*others, first, results[0], second, results[1]]
        tools = [{"role": "tool", "content": "5", "tool_call_id": call.id} for call in found.tool_calls]
        expected += [found.message, *tools]
    assert RESPONSES.read({"input": items}, {}).messages == expected


def test_a_long_stored_conversation_is_continued_without_earlier_instructions():
    memory = {}
    expected = []
    body = {}
    for number in range(4):
        body = {"input": f"question {number}", "instructions": f"rule {number}"} | body
        body |= {"input": f"question {number}", "instructions": f"rule {number}"}
        found = answer_with_calls(f"text {number}", id=str(number))
        request = RESPONSES.read(body, memory)
        expected.append({"role": "user", "content": f"question {number}"})
        assert request.messages == [{"role": "system", "content": f"rule {number}"}, *expected]
        expected.append(found.message)
        body = {"previous_response_id": RESPONSES.response(body, request, [found], memory)["id"]}


def test_several_results_become_several_messages_and_the_rest_one_of_the_user():
    found = answer_with_calls("Let me look.", reasoning="two cities")
    content = sent(MESSAGES, {"messages": [USER], "max_tokens": 5}, found)["content"]
    results = [
        {"type": "text", "text": "Both:"},
        {"type": "tool_result", "tool_use_id": CALL.id, "content": "sun"},
        {"type": "tool_result", "tool_use_id": SECOND_CALL.id, "content": [{"type": "text", "text": "rain"}] * 2},
        {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
    ]
    turns = [USER, {"role": "assistant", "content": content}, {"role": "user", "content": results}]
    _, message, *rest = MESSAGES.read({"messages": turns, "max_tokens": 5}, {}).messages
    assert comparable(message) == comparable(found.message)
    assert rest == [
        {"role": "tool", "content": "sun", "tool_call_id": CALL.id},
        {"role": "tool", "content": "rain\nrain", "tool_call_id": SECOND_CALL.id},
        {"role": "user", "content": "Both:\nGo on."},
    ]


@given(st.sampled_from(["[1]", "3", "", "{", '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', "[" * 5000]))
def test_arguments_that_are_no_object_of_json_stay_an_object_for_anthropics_clients(arguments):
    found = answer_with_calls(tool_calls=[type(CALL)("a", "f", arguments)])
    (block,) = sent(MESSAGES, {"messages": [USER], "max_tokens": 5}, found)["content"]
    assert block["input"] == {"unparsed_arguments": arguments}
    assert messages_history(found)[1] == found.message


def test_the_forms_of_a_content():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": parts},
        {"role": "user", "content": "c", "name": "Ann"},
        {"role": "assistant", "content": None, "refusal": "no", "reasoning": "because"},
    ]
    assert CHAT.read({"messages": messages}, {}).messages == [
        {"role": "developer", "content": "a\nb"},
        {"role": "user", "content": "c", "name": "Ann"},
        {"role": "assistant", "content": "no", "reasoning_content": "because"},
    ]
    items = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    body = {"input": [{"type": "message", "role": "developer", "content": items}, USER], "instructions": "Be brief."}
    assert RESPONSES.read(body, {}).messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "a\nb"},
        USER,
    ]
    body = {"messages": [{"role": "user", "content": parts}], "system": parts, "max_tokens": 5}
    assert MESSAGES.read(body, {}).messages == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "a\nb"},
    ]


def test_reasoning_of_other_models_is_read_from_its_summary_or_left_out():
    summary = {"type": "reasoning", "id": "a", "summary": [{"type": "summary_text", "text": "short"}]}
    encrypted = {"type": "reasoning", "id": "b", "summary": [], "encrypted_content": "x"}
    text = {"role": "assistant", "content": "Hi"}
    assert RESPONSES.read({"input": [USER, summary, text, encrypted, text]}, {}).messages == [
        USER,
        text | {"reasoning_content": "short"},
        text,
    ]


def test_the_beginning_of_an_answer_is_continued():
    started = [USER, {"role": "assistant", "content": "The best"}]
    assert MESSAGES.read({"messages": started, "max_tokens": 5}, {}).continues_last
    assert not MESSAGES.read({"messages": [USER], "max_tokens": 5}, {}).continues_last
    assert not CHAT.read({"messages": started}, {}).continues_last
    continued = {"messages": started, "continue_final_message": True, "add_generation_prompt": False}
    assert CHAT.read(continued, {}).continues_last


@pytest.mark.parametrize("prompt", ["Hi", "", [1, 2], ["Hi"], [[1, 2]]])
def test_a_prompt_is_one_text_or_tokens(prompt):
    expected = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
    request = DIALECT_BY_PATH["/v1/completions"].read({"prompt": prompt, "tools": [WEATHER]}, {})
    assert (request.prompt, request.messages, request.tools) == (expected, (), ())
