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
    """A request of a program.

    Attributes:
        messages: conversation in OpenAI's form: `role` ("system", "user", "assistant", "tool"), `content` (a text), and
            where they apply `tool_calls` (with `arguments` as JSON text), `tool_call_id`, `name` and
            `reasoning_content`. Empty for a plain completion.
        prompt: text or token ids of a plain completion; None for a conversation.
        tools: function schemas in OpenAI's form: `{"type": "function", "function": {"name": ..., ...}}`.
        reads_tool_calls: whether calls in the answer are parsed; False for `tool_choice: "none"`.
        forced_tool: name of the tool that the answer has to call, or `ANY_TOOL`; None: the policy decides.
        calls_once: whether a forced answer has one call only.
        grammar: form of an answer that is not forced to be a call; None: any.
        max_tokens: tokens of the answer; None: as many as the run allows.
        stop: texts that end the answer, and are not part of its content.
        num_answers: answers to sample.
        seed: the program's own seed; None without one.
        temperature: softmax temperature that the program asks for; None: the run's.
        top_p: as `SamplingParams.top_p`; None: the run's.
        top_k: as `SamplingParams.top_k`, and -1 for all tokens; None: the run's.
        template_kwargs: variables for the chat template.
        continues_last: the last message is the beginning of the answer.
        reads_token_texts: whether the dialect writes the texts of single tokens.
    """

    messages: Sequence[Message] = ()
    prompt: str | Sequence[int] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    reads_tool_calls: bool = True
    forced_tool: str | None = None
    calls_once: bool = False
    grammar: Grammar | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    num_answers: int = 1
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continues_last: bool = False
    reads_token_texts: bool = False


@dataclass(frozen=True)
class AnsweredToolCall:
    """A tool call of an answer.

    Attributes:
        id: identifies it within the session.
        name: the tool.
        arguments: JSON text, as the model wrote it where it is no valid JSON.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class CallAnswer:
    """One sampled answer.

    Attributes:
        id: identifies the call within the session.
        content: text without reasoning, tool calls and the stop string.
        reasoning: text that the reasoning parser has found; None without one.
        tool_calls: parsed calls.
        finish_reason: why the answer ended.
        stop_string: the text of `CallRequest.stop` that ended it; None if another cause did.
        prompt_token_ids: tokens that the model continued.
        token_ids: sampled tokens.
        logprobs: of the sampled tokens, under the distribution that they were drawn from.
        num_cached_tokens: tokens of the prompt that belong to the session's earlier calls.
        token_texts: text of each sampled token; empty unless `CallRequest.reads_token_texts`.
        counted: tokens of the prompt and of the answer as the server of the model counts them; the lists are empty
            then. None: the lists are known.
    """

    id: str
    content: str
    reasoning: str | None
    tool_calls: Sequence[AnsweredToolCall]
    finish_reason: CallEnd
    stop_string: str | None
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    num_cached_tokens: int = 0
    token_texts: Sequence[str] = ()
    counted: tuple[int, int] | None = None

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
