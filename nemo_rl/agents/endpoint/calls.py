"""A call of a model and its answer, in the form that all dialects share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nemo_rl.data.interfaces import Message
from nemo_rl.models.generation.interfaces import Grammar

type CallEnd = Literal["stop", "length", "tool_calls"]

ANY_TOOL = ""
"""Value of `CallRequest.forced_tool`: one or more calls of any tools of the request."""


@dataclass(frozen=True)
class CallRequest:
    """A request of a program."""

    messages: Sequence[Message] = ()
    """Conversation in OpenAI's form: `role` ("system", "user", "assistant", "tool"), `content` (a text), and where they
    apply `tool_calls` (with `arguments` as JSON text), `tool_call_id`, `name` and `reasoning_content`. Empty for a
    plain completion."""
    prompt: str | Sequence[int] | None = None
    """Text or token ids of a plain completion; None for a conversation."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Function schemas in OpenAI's form: `{"type": "function", "function": {"name": ..., ...}}`."""
    reads_tool_calls: bool = True
    """Whether calls in the answer are parsed; False for `tool_choice: "none"`."""
    forced_tool: str | None = None
    """Name of the tool that the answer has to call, or `ANY_TOOL`; None: the policy decides."""
    calls_once: bool = False
    """Whether a forced answer has one call only."""
    grammar: Grammar | None = None
    """Form of an answer that is not forced to be a call; None: any."""
    max_tokens: int | None = None
    """Tokens of the answer; None: as many as the run allows."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer, and are not part of its content."""
    num_answers: int = 1
    """Answers to sample."""
    seed: int | None = None
    """The program's own seed; None without one."""
    temperature: float | None = None
    """Softmax temperature that the program asks for; None: the run's."""
    top_p: float | None = None
    """As `SamplingParams.top_p`; None: the run's."""
    top_k: int | None = None
    """As `SamplingParams.top_k`, and -1 for all tokens; None: the run's."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the chat template."""
    continues_last: bool = False
    """The last message is the beginning of the answer."""
    reads_token_texts: bool = False
    """Whether the dialect writes the texts of single tokens."""


@dataclass(frozen=True)
class AnsweredToolCall:
    """A tool call of an answer."""

    id: str
    """Identifies it within the session."""
    name: str
    arguments: str
    """JSON text, as the model wrote it where it is no valid JSON."""


@dataclass(frozen=True)
class CallAnswer:
    """One sampled answer."""

    id: str
    """Identifies the call within the session."""
    content: str
    """Text without reasoning, tool calls and the stop string."""
    reasoning: str | None
    """Text that the reasoning parser has found; None without one."""
    tool_calls: Sequence[AnsweredToolCall]
    """Parsed calls."""
    finish_reason: CallEnd
    """Why the answer ended."""
    stop_string: str | None
    """The text of `CallRequest.stop` that ended it; None if another cause did."""
    prompt_token_ids: Sequence[int]
    """Tokens that the model continued."""
    token_ids: Sequence[int]
    """Sampled tokens."""
    logprobs: Sequence[float]
    """Log-probabilities of the sampled tokens, under the distribution that they were drawn from."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that belong to the session's earlier calls."""
    token_texts: Sequence[str] = ()
    """Text of each sampled token; empty unless `CallRequest.reads_token_texts`."""
    counted: tuple[int, int] | None = None
    """Tokens of the prompt and of the answer as the server of the model counts them; the lists are empty then. None:
    the lists are known."""

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
    """A request is refused.

    Args:
        status: HTTP status.
        message: what was given, what is allowed and what to do.
        code: short name of the cause, for programs: "context_length_exceeded", "invalid_api_key" ...
        parameter: field of the request that is at fault; None if no single one is.
    """

    def __init__(self, status: int, message: str, code: str | None = None, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.parameter = parameter
