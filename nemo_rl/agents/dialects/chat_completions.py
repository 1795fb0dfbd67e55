"""Translate OpenAI's Chat Completions API, `/v1/chat/completions`.

The fields that vLLM adds to the API are read too: `top_k`, `chat_template_kwargs`, `return_token_ids`,
`return_tokens_as_token_ids` and `continue_final_message`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_rl.agents.dialects.fields import Fields, required_text_of, text_of, tool_call
from nemo_rl.agents.dialects.images import Contents, ImageReader, check_detail
from nemo_rl.agents.dialects.interface import Body, Event, SessionMemory
from nemo_rl.agents.dialects.openai_form import (
    error_body,
    exact_tokens,
    header,
    last_events,
    prompt_token_ids,
    scored_tokens,
    stream_header,
    token_ids,
    usage,
)
from nemo_rl.agents.dialects.sampling import sampling_fields
from nemo_rl.agents.dialects.tools import nested_tools, tool_choice
from nemo_rl.agents.endpoint.calls import CallAnswer, CallError, CallRequest
from nemo_rl.data.interfaces import Message
from nemo_rl.data.messages.content import ImagePart

_TEXTS = ("text",)
_ANSWER_TEXTS = ("text", "refusal")
_ROLES = ("system", "developer", "user", "assistant", "tool")
_MAY_HAVE_IMAGES = ("user", "tool")


def _read_image(part: Fields, images: ImageReader) -> ImagePart:
    """Read a part `{"type": "image_url", "image_url": {"url": ...}}`. Some clients give the address itself."""
    if isinstance(part.values.get("image_url"), str):
        return images.read(part.required_text("image_url"), part, "image_url")
    image = part.object("image_url")
    if image is None:
        raise part.wrong("image_url", "an object with the address of an image as url")
    check_detail(image)
    return images.read(image.required_text("url"), image, "url")


_CONTENTS = Contents(_TEXTS, {"image_url": _read_image})


def read_messages(fields: Fields, images: ImageReader | None = None) -> list[Message]:
    """Read the field `messages`.

    Args:
        images: reads the images of the messages. None for a policy that reads text only.

    Raises:
        CallError: the field is missing or empty, or a message is wrong.
    """
    reader = images or ImageReader()
    messages = [_read_message(each, reader) for each in fields.objects("messages")]
    if not messages:
        raise fields.wrong("messages", "a list of at least one message")
    return messages


def _read_message(fields: Fields, images: ImageReader) -> Message:
    if fields.values.get("role") == "function":
        raise fields.unsupported("role", 'Give results of tools in messages of role "tool" with a tool_call_id.')
    role = fields.one_of("role", _ROLES)
    if role == "assistant":
        message = _read_answer(fields)
    elif role in _MAY_HAVE_IMAGES:
        message = {"role": role, "content": _CONTENTS.required(fields, images)}
    else:
        message = {"role": role, "content": required_text_of(fields, _TEXTS)}
    if role == "tool":
        message["tool_call_id"] = fields.required_text("tool_call_id")
    name = fields.text("name")
    if name is not None:
        message["name"] = name
    return message


def _read_answer(fields: Fields) -> Message:
    """Read a message of the model. Its content is null if it has only calls, a refusal or reasoning."""
    fields.refuse({"function_call": (), "audio": ()})
    content = text_of(fields, _ANSWER_TEXTS) if fields.has("content") else fields.text("refusal", "")
    message: Message = {"role": "assistant", "content": content}
    # Some servers and clients name this field `reasoning`.
    reasoning = fields.text("reasoning_content", fields.text("reasoning"))
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    calls = [_read_call(each) for each in fields.objects("tool_calls")]
    if calls:
        message["tool_calls"] = calls
    return message


def _read_call(fields: Fields) -> Message:
    if fields.has("type") and fields.values["type"] != "function":
        raise fields.unsupported("type", 'Only tool calls of type "function" can be given.')
    function = fields.object("function")
    if function is None:
        raise fields.wrong("function", "an object with name and arguments")
    arguments = function.required_text("arguments", may_be_empty=True)
    return tool_call(fields.required_text("id"), function.required_text("name", may_be_empty=True), arguments)


_ID_PREFIX = "chatcmpl-"


class ChatCompletions:
    """Dialect of OpenAI's Chat Completions."""

    path = "/v1/chat/completions"

    def read(self, body: Body, memory: SessionMemory, images: ImageReader | None = None) -> CallRequest:
        """Read a request in this form (`Dialect.read`)."""
        fields = Fields(body)
        _refuse_functions(fields)
        reads_texts = fields.flag("logprobs") and not fields.flag("return_tokens_as_token_ids")
        options = fields.object("stream_options")
        if options is not None:
            options.flag("include_usage")
        messages = read_messages(fields, images)
        tools = nested_tools(fields)
        return CallRequest(
            messages=messages,
            tools=tools,
            **tool_choice(fields, tools),
            continues_last=_continues_last(fields, messages),
            reads_token_texts=reads_texts,
            **sampling_fields(fields, ("max_completion_tokens", "max_tokens")),
        )

    def response(
        self, body: Body, request: CallRequest, answers: Sequence[CallAnswer], memory: SessionMemory
    ) -> Mapping[str, Any]:
        """Return the response to a request (`Dialect.response`)."""
        return {
            **header(body, answers, "chat.completion", _ID_PREFIX),
            "choices": [_choice(body, index, answer) for index, answer in enumerate(answers)],
            "usage": usage(answers),
            **prompt_token_ids(body, answers),
        }

    def events(
        self, body: Body, request: CallRequest, answers: Sequence[CallAnswer], memory: SessionMemory
    ) -> Iterator[Event]:
        """Yield the chunks of each answer, one answer after another (`Dialect.events`)."""
        head = stream_header(body, answers, "chat.completion.chunk", _ID_PREFIX)
        first = prompt_token_ids(body, answers)
        for index, answer in enumerate(answers):
            for choice in _chunk_choices(body, index, answer):
                yield Event({**head, "choices": [choice], **first})
                first = {}
        yield from last_events(body, head, answers)

    def error(self, error: CallError) -> Mapping[str, Any]:
        """Return the body of an error (`Dialect.error`)."""
        return error_body(error)


def _refuse_functions(fields: Fields) -> None:
    """Refuse the deprecated fields for functions, which tools have replaced."""
    for name, instead in (("functions", "tools"), ("function_call", "tool_choice")):
        if fields.values.get(name):
            raise fields.unsupported(name, f"Use {instead}, which has replaced it.")


def _continues_last(fields: Fields, messages: Sequence[Message]) -> bool:
    continues = fields.flag("continue_final_message")
    if fields.flag("add_generation_prompt", default=not continues) is continues:
        raise fields.wrong("add_generation_prompt", f"{not continues} with this continue_final_message".lower())
    if continues and (messages[-1]["role"] != "assistant" or "tool_calls" in messages[-1]):
        raise fields.wrong("continue_final_message", "true only if the last message is an assistant's without calls")
    return continues


def _choice(body: Body, index: int, answer: CallAnswer) -> Mapping[str, Any]:
    # Next to tool calls, OpenAI writes null and not an empty text.
    content = None if answer.tool_calls and not answer.content else answer.content
    message: Message = {"role": "assistant", "content": content, "refusal": None, "reasoning_content": answer.reasoning}
    if answer.tool_calls:
        message["tool_calls"] = [tool_call(call.id, call.name, call.arguments) for call in answer.tool_calls]
    message |= exact_tokens(body, answer)
    return {
        "index": index,
        "message": message,
        "logprobs": _logprobs(answer) if body.get("logprobs") else None,
        "finish_reason": answer.finish_reason,
        **token_ids(body, answer),
    }


def _chunk_choices(body: Body, index: int, answer: CallAnswer) -> Iterator[Mapping[str, Any]]:
    """Yield the choices of an answer's chunks. The second one has the log probabilities and tokens of all chunks."""
    deltas = [*_deltas(answer), {}]
    for position, delta in enumerate(deltas):
        is_last = position == len(deltas) - 1
        yield {
            "index": index,
            "delta": delta,
            "logprobs": _logprobs(answer) if position == 1 and body.get("logprobs") else None,
            "finish_reason": answer.finish_reason if is_last else None,
            **(token_ids(body, answer) if position == 1 else {}),
        }


def _deltas(answer: CallAnswer) -> Iterator[Mapping[str, Any]]:
    starts_empty = not answer.tool_calls or bool(answer.content)
    yield {"role": "assistant", "content": "" if starts_empty else None, "refusal": None}
    if answer.reasoning is not None:
        yield {"reasoning_content": answer.reasoning}
    if answer.content:
        yield {"content": answer.content}
    for index, call in enumerate(answer.tool_calls):
        yield {"tool_calls": [{"index": index, **tool_call(call.id, call.name, "")}]}
        yield {"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]}


def _logprobs(answer: CallAnswer) -> Mapping[str, Any]:
    return {
        "content": [
            {"token": text, "bytes": list(text.encode()), "logprob": logprob, "top_logprobs": []}
            for text, logprob in scored_tokens(answer)
        ],
        "refusal": None,
    }
