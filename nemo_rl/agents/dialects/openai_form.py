"""Build the parts of responses that OpenAI's APIs share: usage, log probabilities, frames of streams, and errors."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_rl.agents.dialects.interface import Body, Event
from nemo_rl.agents.endpoint.calls import CallAnswer, CallError

_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def header(body: Body, answers: Sequence[CallAnswer], kind: str, id_prefix: str) -> dict[str, Any]:
    """Return the fields at the beginning of each response.

    Args:
        id_prefix: beginning of the response's id, such as `chatcmpl-`.
    """
    return {
        "id": f"{id_prefix}{answers[0].id}",
        "object": kind,
        "created": int(time.time()),
        "model": body.get("model") or "",
    }


def usage(answers: Sequence[CallAnswer]) -> Mapping[str, Any]:
    """Return the numbers of tokens. The prompt counts once, even if there are several answers."""
    prompt = answers[0].num_prompt_tokens
    sampled = sum(answer.num_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": answers[0].num_cached_tokens},
    }


def stream_header(body: Body, answers: Sequence[CallAnswer], kind: str, id_prefix: str) -> dict[str, Any]:
    """Return the fields at the beginning of each chunk of a stream. The arguments are those of `header`."""
    return header(body, answers, kind, id_prefix) | ({"usage": None} if _wants_usage(body) else {})


def last_events(body: Body, head: Mapping[str, Any], answers: Sequence[CallAnswer]) -> Iterator[Event]:
    """Yield the last events of a stream: the numbers of tokens if the request asks for them, and the end mark.

    Args:
        head: the fields at the beginning of each chunk.
    """
    if _wants_usage(body):
        yield Event({**head, "choices": [], "usage": usage(answers)})
    yield Event("[DONE]")


def _wants_usage(body: Body) -> bool:
    """Return whether the request asks for the numbers of tokens at the end of the stream."""
    return bool((body.get("stream_options") or {}).get("include_usage"))


def scored_tokens(answer: CallAnswer) -> Iterator[tuple[str, float]]:
    """Yield text and log probability of each sampled token. As in vLLM, a token without a text is `token_id:5`."""
    texts = answer.token_texts
    if len(texts) != len(answer.token_ids):
        texts = [f"token_id:{token}" for token in answer.token_ids]
    yield from zip(texts, map(float, answer.logprobs), strict=True)


def token_ids(body: Body, answer: CallAnswer) -> dict[str, Any]:
    """Return the field with the sampled tokens if the request asks for it, as in vLLM."""
    return {"token_ids": list(answer.token_ids)} if body.get("return_token_ids") else {}


def prompt_token_ids(body: Body, answers: Sequence[CallAnswer]) -> dict[str, Any]:
    """Return the field with the tokens of the prompt if the request asks for it, as in vLLM."""
    return {"prompt_token_ids": list(answers[0].prompt_token_ids)} if body.get("return_token_ids") else {}


def exact_tokens(body: Body, answer: CallAnswer) -> dict[str, Any]:
    """Return the fields with all tokens of a call, as servers of NeMo Gym read them, if the request asks for them.

    The endpoint ignores these fields in messages of later requests.
    """
    if not body.get("return_tokens_as_token_ids"):
        return {}
    return {
        "prompt_token_ids": list(answer.prompt_token_ids),
        "generation_token_ids": list(answer.token_ids),
        "generation_log_probs": list(map(float, answer.logprobs)),
    }


def error_body(error: CallError) -> Mapping[str, Any]:
    """Return an error in OpenAI's form."""
    default = "server_error" if error.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": error.message,
            "type": _ERROR_TYPES.get(error.status, default),
            "param": error.parameter,
            "code": error.code,
        }
    }
