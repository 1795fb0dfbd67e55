"""Represent a call of the model and its answer in a form that all dialects share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nemo_rl.data.interfaces import Message
from nemo_rl.models.generation.interfaces import Grammar

type CallEnd = Literal["stop", "length", "tool_calls"]

ANY_TOOL = ""
"""Value of `CallRequest.forced_tool` for one or more calls of any tools of the request."""


@dataclass(frozen=True)
class CallRequest:
    """A request of a program."""

    messages: Sequence[Message] = ()
    """Conversation in OpenAI's form. Messages have `role` ("system", "user", "assistant", "tool"), `content` (a text,
    or a list of texts and `images.image.Image`s as parts) and, where they apply, `tool_calls` (with `arguments` as JSON
    text), `tool_call_id`, `name` and `reasoning_content`. A plain completion has no messages."""
    prompt: str | Sequence[int] | None = None
    """Text or token ids of a plain completion, or None for a conversation."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Function schemas in OpenAI's form: `{"type": "function", "function": {"name": ..., ...}}`."""
    reads_tool_calls: bool = True
    """Whether calls in the answer are parsed; False for `tool_choice: "none"`."""
    forced_tool: str | None = None
    """Name of the tool that the answer has to call, `ANY_TOOL`, or None if the policy decides."""
    calls_once: bool = False
    """Whether an answer that is forced to call tools has exactly one call."""
    grammar: Grammar | None = None
    """Form of an answer that is not forced to be a call, or None for any form."""
    max_tokens: int | None = None
    """Largest number of tokens of an answer, or None for the run's limit."""
    stop: tuple[str, ...] = ()
    """Stop strings, which end the answer and are not part of its content."""
    num_answers: int = 1
    """Number of answers to sample."""
    seed: int | None = None
    """Seed that the program sets, or None if it sets none."""
    temperature: float | None = None
    """Softmax temperature of the request, or None for that of the run."""
    top_p: float | None = None
    """Value for `SamplingParams.top_p`, or None for that of the run."""
    top_k: int | None = None
    """Value for `SamplingParams.top_k`, -1 for all tokens, or None for the value of the run."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the chat template."""
    continues_last: bool = False
    """Whether the last message is the beginning of the answer."""
    reads_token_texts: bool = False
    """Whether the dialect returns the texts of single tokens."""


@dataclass(frozen=True)
class AnsweredToolCall:
    """A tool call of an answer."""

    id: str
    """Id of the call within the session."""
    name: str
    arguments: str
    """Arguments as JSON text, or the text of the model if it is not valid JSON."""


@dataclass(frozen=True)
class CallAnswer:
    """One sampled answer."""

    id: str
    """Id of the call within the session."""
    content: str
    """Text without the reasoning, the tool calls and the stop string."""
    reasoning: str | None
    """Text that the reasoning parser has found, or None if there is none."""
    tool_calls: Sequence[AnsweredToolCall]
    """Tool calls that were parsed."""
    finish_reason: CallEnd
    """Reason why the answer ended."""
    stop_string: str | None
    """Text of `CallRequest.stop` that ended the answer, or None if it ended for another reason."""
    prompt_token_ids: Sequence[int]
    """Tokens that the model continued."""
    token_ids: Sequence[int]
    """Sampled tokens."""
    logprobs: Sequence[float]
    """Log probabilities of the sampled tokens under the distribution from which they were drawn."""
    num_cached_tokens: int = 0
    """Number of tokens of the prompt that belong to earlier calls of the session."""
    token_texts: Sequence[str] = ()
    """Text of each sampled token, or empty unless `CallRequest.reads_token_texts` is set."""
    counted: tuple[int, int] | None = None
    """Numbers of tokens of the prompt and of the answer, as the model's server counts them. The lists of tokens are
    then empty. None if the lists are known."""

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens that the model continued."""
        return len(self.prompt_token_ids) if self.counted is None else self.counted[0]

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return len(self.token_ids) if self.counted is None else self.counted[1]

    @property
    def message(self) -> Message:
        """The answer as a message of a conversation."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


class CallError(Exception):
    """Raised if a request is refused.

    Args:
        status: HTTP status.
        message: text that says what was given, what is allowed and what to do.
        code: short name of the cause for programs, such as "context_length_exceeded" or "invalid_api_key".
        parameter: field of the request that is wrong, or None if no single field is wrong.
    """

    def __init__(self, status: int, message: str, code: str | None = None, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.parameter = parameter
