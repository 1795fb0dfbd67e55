"""The JSON of SGLang's `/generate`.

Facts of SGLang on which this file relies: log-probabilities are those after the temperature and before top-k and top-p;
`ignore_eos` ignores the stop tokens of the request as well; a seed counts only with deterministic inference, where the
random number of a token depends on the seed and on its position alone.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from nemo_rl.models.generation.interfaces import FinishReason, GenerationRequest, GenerationResult, VersionSpan
from nemo_rl.utils.errors import GenerationError, NonFiniteError

_ALL_TOKENS = -1
_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class Answer(NamedTuple):
    """An answer of the server."""

    result: GenerationResult
    """Its tokens; spans as the server reports them, or one of version -1 if it reports none."""
    reports_versions: bool
    """Whether it reports spans."""
    message: str
    """The server's words about the end."""


def generate_body(request_id: str, request: GenerationRequest, room: int) -> dict[str, Any]:
    """Return the fields of a request.

    Args:
        request_id: its id at the server.
        request: the request.
        room: tokens left in the context.
    """
    sampling = request.sampling
    return {
        "rid": request_id,
        "input_ids": request.prompt_token_ids,
        "return_logprob": True,
        "stream": False,
        "sampling_params": {
            "max_new_tokens": min(sampling.max_new_tokens, room),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or _ALL_TOKENS,
            "min_p": 0.0,
            "stop": list(sampling.stop_strings),
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": not sampling.stop_token_ids,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "sampling_seed": request.seed,
        },
    }


def read_answer(answer: Any) -> Answer:
    """Read the JSON of an answer.

    Raises:
        GenerationError: the server refused the request after it had accepted it.
        NonFiniteError: a log-probability is not finite.
        ValueError: it is no answer.
    """
    try:
        meta = answer["meta_info"]
        reason = meta["finish_reason"]
        kind = _REASONS[reason["type"]]
        drawn = [(value, int(token)) for value, token, *_ in meta.get("output_token_logprobs") or ()]
        logprobs = [math.nan if value is None else float(value) for value, _ in drawn]
        versions = meta.get("weight_versions") or ()
        spans = [VersionSpan(int(span["start"]), version_of(span["version"])) for span in versions]
    except (TypeError, LookupError, ValueError) as error:
        raise ValueError(f"SGLang's answer is not as documented ({error!r}): {str(answer)[:300]}") from error
    if kind == "abort" and reason.get("status_code") in (400, 413, 422):
        raise GenerationError(f"SGLang refused a request: {reason.get('message')}")
    if not np.isfinite(logprobs).all():
        raise NonFiniteError("SGLang's log-probabilities are not finite, so weights or activations are not.")
    tokens = np.array([token for _, token in drawn], np.int32)
    result = GenerationResult(tokens, np.array(logprobs, np.float32), kind, spans or [VersionSpan(0, -1)])
    return Answer(result, bool(spans), str(reason.get("message") or "no reason is given"))


def version_of(label: Any) -> int:
    """Return the number of a version label; a server that has never got weights has the label "default": version 0."""
    text = str(label)
    return int(text) if text.isdigit() else 0
