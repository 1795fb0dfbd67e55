"""Translate OpenAI's Completions API, `/v1/completions`, in which the policy continues a text or tokens directly.

If `max_tokens` is left out, an answer may be as long as the run allows. OpenAI's servers stop it after 16 tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from nemo_rl.agents.dialects.fields import Fields
from nemo_rl.agents.dialects.images import ImageReader
from nemo_rl.agents.dialects.interface import Body, Event, SessionMemory
from nemo_rl.agents.dialects.openai_form import (
    error_body,
    header,
    last_events,
    prompt_token_ids,
    scored_tokens,
    stream_header,
    token_ids,
    usage,
)
from nemo_rl.agents.dialects.sampling import sampling_fields
from nemo_rl.agents.endpoint.calls import CallAnswer, CallError, CallRequest

_ID_PREFIX = "cmpl-"
_PROMPTS = "one text, or one list of token ids; send several prompts in several requests"


class Completions:
    """Dialect of OpenAI's Completions."""

    path = "/v1/completions"

    def read(self, body: Body, memory: SessionMemory, images: ImageReader | None = None) -> CallRequest:
        """Read a request in this form (`Dialect.read`)."""
        fields = Fields(body)
        reads_logprobs = fields.integer("logprobs", 0, 1) is not None
        options = fields.object("stream_options")
        if options is not None:
            options.flag("include_usage")
        sampling = sampling_fields(fields, ("max_tokens",))
        return CallRequest(prompt=_prompt(fields), reads_token_texts=reads_logprobs, **sampling)

    def response(
        self, body: Body, request: CallRequest, answers: Sequence[CallAnswer], memory: SessionMemory
    ) -> Mapping[str, Any]:
        """Return the response to a request (`Dialect.response`)."""
        prompt = prompt_token_ids(body, answers)
        choices = [{**_choice(body, index, answer), **prompt} for index, answer in enumerate(answers)]
        return {
            **header(body, answers, "text_completion", _ID_PREFIX),
            "choices": choices,
            "usage": usage(answers),
        }

    def events(
        self, body: Body, request: CallRequest, answers: Sequence[CallAnswer], memory: SessionMemory
    ) -> Iterator[Event]:
        """Yield two chunks per answer: one with its text, one with the reason for its end (`Dialect.events`)."""
        head = stream_header(body, answers, "text_completion", _ID_PREFIX)
        prompt = prompt_token_ids(body, answers)
        for index, answer in enumerate(answers):
            choice = _choice(body, index, answer)
            yield Event({**head, "choices": [{**choice, "finish_reason": None, **prompt}]})
            end = {"index": index, "text": "", "logprobs": None, "finish_reason": choice["finish_reason"]}
            yield Event({**head, "choices": [end]})
        yield from last_events(body, head, answers)

    def error(self, error: CallError) -> Mapping[str, Any]:
        """Return the body of an error (`Dialect.error`)."""
        return error_body(error)


def _prompt(fields: Fields) -> str | Sequence[int]:
    """Read the prompt, which may be in a list of length 1."""
    prompt = fields.values.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    if isinstance(prompt, str):
        return Fields({"prompt": prompt}).required_text("prompt", may_be_empty=True)
    if not isinstance(prompt, list) or not prompt or not all(map(_is_token, prompt)):
        raise fields.wrong("prompt", _PROMPTS)
    return prompt


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _choice(body: Body, index: int, answer: CallAnswer) -> dict[str, Any]:
    wants_logprobs = body.get("logprobs") is not None
    return {
        "index": index,
        "text": answer.content,
        "logprobs": _logprobs(answer, with_top=body["logprobs"] > 0) if wants_logprobs else None,
        # The API has no tool calls.
        "finish_reason": "stop" if answer.finish_reason == "tool_calls" else answer.finish_reason,
        **token_ids(body, answer),
    }


def _logprobs(answer: CallAnswer, with_top: bool) -> Mapping[str, Any]:
    """Return the log probabilities. The sampled token is the only candidate that is known for each position."""
    scored = list(scored_tokens(answer))
    texts = [text for text, _ in scored]
    offsets = list(accumulate(map(len, texts), initial=0))[:-1]
    return {
        "tokens": texts,
        "token_logprobs": [logprob for _, logprob in scored],
        "text_offset": offsets,
        "top_logprobs": [{text: logprob} for text, logprob in scored] if with_top else None,
    }
