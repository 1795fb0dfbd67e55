"""Samples of a model that reads messages, not tokens, because another server has it."""

from nemo_rl.data.interfaces import Message
from nemo_rl.data.messages.observations import messages_of
from nemo_rl.experience.trajectory import Ending, Outcome, Trajectory
from nemo_rl.models.generation.remote.chats import ChatInput
from nemo_rl.utils.errors import DataError, NoAnswerError


def chat_of(sample: Trajectory) -> ChatInput:
    """Return the conversation of a sample as messages, the next answer still missing.

    Raises:
        DataError: the data does not give the messages of the prompt.
    """
    if sample.chat is None:
        raise DataError(
            "generation.endpoint sends prompts as messages, but the data processor does not say what the prompt was "
            "rendered from: give the datum `chat`, a dict with `messages` and `tools`."
        )
    log = sample.message_log
    first = next((number for number, message in enumerate(log) if "generation_logprobs" in message), len(log))
    messages = list(sample.chat["messages"])
    for message in log[first:]:
        messages += [_said(message)] if "generation_logprobs" in message else messages_of(message)
    return ChatInput(messages, sample.chat["tools"] or (), sample.chat.get("template_kwargs") or {})


def _said(message: Message) -> Message:
    """Return an answer as its server gave it: calls of tools as such, and not in the text too."""
    return {"role": "assistant", "content": message.get("spoken", message["content"])} | (
        {"tool_calls": message["tool_calls"]} if "tool_calls" in message else {}
    )


def end_without_answer(sample: Trajectory, error: NoAnswerError) -> None:
    """End a sample whose next answer cannot be got: full, like one of own engines, or with an error."""
    if not error.is_too_long:
        sample.fail(str(error))
        return
    sample.outcome = Outcome.TRUNCATED if sample.num_turns else Outcome.PROMPT_TOO_LONG
    sample.ended_by = Ending.SEQUENCE_LENGTH
