"""Calls of programs that another server answers: what can be passed on, and how answers come back.

Programs keep the run's endpoint and the key of their sample, so they need no change and see neither the server's
address nor its key.
"""

import logging

from nemo_rl.agents.endpoint.answers import ReadAnswer, before_stop
from nemo_rl.agents.endpoint.calls import AnsweredToolCall, CallError, CallRequest
from nemo_rl.models.generation.remote.chats import ChatAnswer, ChatInput
from nemo_rl.utils.errors import NoAnswerError

logger = logging.getLogger(__name__)


def forwarded(request: CallRequest) -> ChatInput:
    """Return a request as a conversation for the server.

    Raises:
        CallError: it needs the tokens of the model, which only the server has.
    """
    asked = (
        ("prompt", request.prompt is not None, "Send messages to /v1/chat/completions."),
        ("continue_final_message", request.continues_last, "Let the last message be one of another role."),
        ("logprobs", request.reads_token_texts, "Leave it out."),
    )
    for parameter, is_asked, advice in asked:
        if is_asked:
            raise CallError(
                400,
                f"{parameter} needs the tokens of the model, but this run evaluates a model of another server "
                f"(generation.endpoint), which is asked with messages. {advice}",
                "unsupported_parameter",
                parameter,
            )
    return ChatInput(
        [{**message, "content": message.get("content") or ""} for message in request.messages],
        request.tools,
        request.template_kwargs,
        may_call=request.reads_tool_calls,
        forced_tool=request.forced_tool,
        calls_once=request.calls_once,
    )


def read_forwarded(answer: ChatAnswer, request: CallRequest) -> ReadAnswer:
    """Return the parts of an answer of the server."""
    content, stop = before_stop(answer.content + (answer.stop_string or ""), request.stop)
    calls = [AnsweredToolCall(call.id, call.name, call.arguments) for call in answer.tool_calls]
    return ReadAnswer(content, answer.reasoning, calls, stop)


def refusal(error: NoAnswerError) -> CallError:
    """Return what a program gets in place of an answer, without the words of the error, which hold the address."""
    logger.info("A call of a program has no answer: %s", error)
    if error.is_too_long:
        message = "The messages do not fit into the context length of the model."
        return CallError(400, message, "context_length_exceeded", "messages")
    if error.is_refused:
        return CallError(400, "The server of the model refuses this request; it would again.", "invalid_request")
    return CallError(502, "The server of the model gave no answer, after all attempts.", "no_answer")
