"""The JSON body of a request, and the key of a sample in it.

Some servers between a program and the endpoint have one API key for all samples. They pass on the body of a request, so
the key of its sample is in the field `nemo_rl_key`, or in the JSON text `metadata.extra_body`, whose fields belong to
the body. Invariant: `extra_body` never replaces a field that the body has itself.
"""

import json
import re
import secrets
from collections.abc import Container, Mapping
from typing import Any

from nemo_rl.agents.endpoint.calls import CallError
from nemo_rl.agents.programs.interfaces import KEY_FIELD

_KEY_BYTES = 32
_KEY = re.compile(rb"sk-[A-Za-z0-9_-]{43}")


def new_key() -> str:
    """Return a new key."""
    return f"sk-{secrets.token_urlsafe(_KEY_BYTES)}"


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


def names_a_key(raw: bytes | bytearray, keys: Container[str]) -> bool:
    """Return whether one of some keys is written in a body, which is not parsed for that."""
    return any(found.decode() in keys for found in _KEY.findall(raw))


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
