"""The JSON body of a request, and the key of a sample in it.

Some servers between a program and the endpoint have one API key for all samples. They pass on the body of a request, so
the key of its sample is in the field `nemo_rl_key`, or in the JSON text `metadata.extra_body`, whose fields belong to
the body. Invariant: `extra_body` never replaces a field that the body has itself.
"""

import json
from collections.abc import Mapping
from typing import Any

from nemo_rl.environments.agents.interfaces import KEY_FIELD
from nemo_rl.experience.agents.calls import CallError


def parsed_body(raw: bytes) -> dict[str, Any]:
    """Return the body of a request, with the fields of its `metadata.extra_body`.

    Raises:
        CallError: it is no JSON object.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CallError(400, f"The body is no valid JSON: {error}.", "invalid_json") from error
    if not isinstance(body, dict):
        raise CallError(400, f"The body is a {type(body).__name__}; it must be a JSON object.", "invalid_json")
    return {**_extra_body(body), **body}


def key_in(body: Mapping[str, Any]) -> str:
    """Return the key in a body; an empty text without one."""
    key = body.get(KEY_FIELD)
    return key if isinstance(key, str) else ""


def _extra_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `metadata.extra_body`; none where it is something else, because metadata is free."""
    metadata = body.get("metadata")
    text = metadata.get("extra_body") if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        return {}
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
