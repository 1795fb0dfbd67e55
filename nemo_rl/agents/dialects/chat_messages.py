"""Read the messages of Chat Completions.

Invariant: a message that a program made of an answer equals `CallAnswer.message`.
"""

from nemo_rl.agents.dialects.contents import required_text_of, text_of, tool_call
from nemo_rl.agents.dialects.fields import Fields
from nemo_rl.data.interfaces import Message

_TEXTS = ("text",)
_ANSWER_TEXTS = ("text", "refusal")
_ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(fields: Fields) -> list[Message]:
    """Read the field `messages`.

    Raises:
        CallError: it is missing or empty, or a message is wrong.
    """
    messages = [_read_message(each) for each in fields.objects("messages")]
    if not messages:
        raise fields.wrong("messages", "a list of at least one message")
    return messages


def _read_message(fields: Fields) -> Message:
    if fields.values.get("role") == "function":
        raise fields.unsupported("role", 'Give results of tools in messages of role "tool" with a tool_call_id.')
    role = fields.one_of("role", _ROLES)
    if role == "assistant":
        message = _read_answer(fields)
    else:
        message = {"role": role, "content": required_text_of(fields, _TEXTS)}
    if role == "tool":
        message["tool_call_id"] = fields.required_text("tool_call_id")
    name = fields.text("name")
    if name is not None:
        message["name"] = name
    return message


def _read_answer(fields: Fields) -> Message:
    """Read a message of the model. Its content may be null: then it has calls, a refusal or only reasoning."""
    fields.refuse({"function_call": (), "audio": ()})
    content = text_of(fields, _ANSWER_TEXTS) if fields.has("content") else fields.text("refusal", "")
    message: Message = {"role": "assistant", "content": content}
    # Some servers and clients call it `reasoning`.
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
