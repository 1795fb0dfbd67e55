"""Read HTTP requests: the key, the size, the time and the compression of bodies.

Invariants: a request without a known key is refused before its body is read. A body is never larger in memory than
`service.max_request_mb`, even if it was compressed.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pyarrow
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nemo_rl.host.guarded_http import ConnectionGuard
from nemo_rl.serving.interfaces import RequestError
from nemo_rl.serving.limits import RefusedError
from nemo_rl.serving.promises import RequestOutcome
from nemo_rl.serving.store.keys import KeyBook

PROTO = "application/x-protobuf"
_BODY_S = 60.0
"""Time limit in seconds for receiving the body of a request."""
_MOST_CONNECTIONS = 4096
"""Largest number of connections of one user. A client may wait for thousands of samples at the same time."""
_MOST_DIGITS = 12


def key_of(request: Request) -> str:
    """Return the key in the headers of a request, or an empty text."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return request.headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else "")


def user_of(request: Request, keys: KeyBook, guard: ConnectionGuard) -> str:
    """Return the name of the user who sends a request.

    Raises:
        RefusedError: the key is missing or unknown, or the user has too many connections.
    """
    user = keys.user_of(key_of(request))
    if user is None:
        raise RefusedError(401, "The API key is missing or unknown. Send a key of this service as X-API-Key.")
    if not guard.recognise(request.scope, user, _MOST_CONNECTIONS):
        raise RefusedError(429, "This key has too many open connections; close some.")
    return user


async def read_raw(request: Request, most: int) -> bytes:
    """Return the body of a request, decompressed.

    Args:
        most: largest number of bytes.

    Raises:
        RefusedError: the body is too large, too slow, or compressed in an unknown way.
        RequestError: the compressed body is damaged.
    """
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and (len(length) > _MOST_DIGITS or int(length) > most):
        raise _too_large(most)
    raw = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in request.stream():
                raw += part
                if len(raw) > most:
                    raise _too_large(most)
    except TimeoutError as error:
        raise RefusedError(408, f"The body did not arrive within {_BODY_S:g} s.") from error
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding == "identity":
        return bytes(raw)
    if encoding != "zstd":
        raise RefusedError(415, f"The content encoding {encoding!r} is unknown; send zstd or none.")
    return await asyncio.to_thread(_decompressed, bytes(raw), most)


def _decompressed(raw: bytes, most: int) -> bytes:
    try:
        with pyarrow.input_stream(pyarrow.BufferReader(raw), compression="zstd") as stream:
            content = bytes(stream.read(most + 1))
    except (OSError, ValueError) as error:
        raise RequestError(f"The body is no valid zstd stream: {error}.") from error
    if len(content) > most:
        raise _too_large(most)
    return content


def _too_large(most: int) -> RefusedError:
    return RefusedError(413, f"The body is larger than {most} bytes (service.max_request_mb). Send less at a time.")


def canonical_json(body: Mapping[str, Any]) -> bytes:
    """Return bytes that are equal for equal objects."""
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def error_response(status: int, message: str) -> Response:
    """Return an error. Its headers tell clients whether a repetition helps."""
    headers = {"retry-after": "1"} if status == 429 else {"x-should-retry": "false"}
    if status in (401, 408, 413, 415):
        headers["connection"] = "close"  # the rest of such a request's body is not read
    category = "user" if status < 500 else "server"
    return JSONResponse({"error": message, "message": message, "category": category}, status, headers)


def outcome_response(outcome: RequestOutcome) -> Response:
    """Return the result of a request, or its error, which has the status 200 too."""
    return Response(outcome.content, media_type=PROTO if outcome.is_proto else "application/json")
