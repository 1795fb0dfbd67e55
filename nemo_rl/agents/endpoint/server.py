"""Serve the HTTP endpoint, which finds the session for a request's key, and translates with the dialect of its path.

    request ─► key ─► session ─► dialect.read ─► session.answers ─► dialect.response or events ─► response

The key is in a header. If one server with a key of its own sends the requests of many samples, the key is in the body.
Invariants: a request without the key of an open session is answered with status 401 before its body is parsed, whatever
it asks for. Keys appear in no log and in no message. Bodies are parsed and chats are rendered on threads, for one
request of a sample at a time, so that no program delays other programs.
"""

import asyncio
import contextlib
import hashlib
import json
import re
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nemo_rl.agents.dialects.chat_completions import ChatCompletions
from nemo_rl.agents.dialects.completions import Completions
from nemo_rl.agents.dialects.interface import Dialect, Event
from nemo_rl.agents.dialects.messages import Messages
from nemo_rl.agents.dialects.responses import Responses
from nemo_rl.agents.endpoint.calls import CallError, CallRequest
from nemo_rl.agents.endpoint.exchanges import ClientGoneError
from nemo_rl.agents.endpoint.session import AgentSession
from nemo_rl.agents.programs.interfaces import KEY_FIELD, START_SIGN, is_start
from nemo_rl.config.schema.agents import AgentEndpointConfig
from nemo_rl.host.guarded_http import MOST_OF_ONE, ConnectionGuard, serve_until_cancelled
from nemo_rl.utils.addresses import http_address, listener_of

_KEY_BYTES = 32
_KEY = re.compile(rb"sk-[A-Za-z0-9_-]{43}")


def new_key() -> str:
    """Return a new key."""
    return f"sk-{secrets.token_urlsafe(_KEY_BYTES)}"


def parsed_body(raw: bytes) -> dict[str, Any]:
    """Return the body of a request, with the fields of its `metadata.extra_body`.

    Raises:
        CallError: the body is not a JSON object.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CallError(400, f"The body is no valid JSON: {error}.", "invalid_json") from error
    if not isinstance(body, dict):
        raise CallError(400, f"The body is a {type(body).__name__}; it must be a JSON object.", "invalid_json")
    return {**_extra_body(body), **body}


def names_a_key(raw: bytes | bytearray, keys: Container[str]) -> bool:
    """Return whether a body contains one of the keys. The body is searched without parsing it."""
    return any(found.decode() in keys for found in _KEY.findall(raw))


def key_in(body: Mapping[str, Any]) -> str:
    """Return the key in a body, or an empty text if the body has no key."""
    key = body.get(KEY_FIELD)
    return key if isinstance(key, str) else ""


def _extra_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `metadata.extra_body`, or none if it is no object, as programs may use metadata freely."""
    metadata = body.get("metadata")
    text = metadata.get("extra_body") if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        return {}
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), Completions(), Responses(), Messages())

DIALECT_BY_PATH: Mapping[str, Dialect] = {dialect.path: dialect for dialect in DIALECTS}
"""Dialect for each path below the endpoint's address, for example `/v1/messages`."""

MODEL = "policy"
"""Name of the model. Requests may use any other name."""
_MINUTE_S = 60.0
_MOST_DIGITS = 12
_ENDS_CONNECTION = (401, 408, 413)
_TOO_MANY_CONNECTIONS = "too_many_connections"
_START_S = 30.0
_BODY_S = 20.0
"""Time limit in seconds for receiving the body of a request."""
_UNKNOWN_BYTES = 65536
"""Number of bytes of a body that may be read before a key is found in the headers or in these bytes."""
_LARGE_UNKNOWN = 8
"""Largest number of larger bodies without a known key that are read at the same time. Other bodies wait."""
_CLIENT_GONE = 499
"""Status that is logged in place of an answer if the client has closed the connection."""


@dataclass(eq=False)
class _Client:
    """A program with an open session."""

    session: AgentSession
    arrivals: deque[float] = field(default_factory=deque)
    """Times of the requests of the last minute."""
    secret: str = field(default_factory=secrets.token_hex)
    """Secret with which the starts of the program are signed."""
    start: str = ""
    earlier_starts: set[str] = field(default_factory=set)

    def admits(self, start: str) -> bool:
        """Return whether a request is from the newest start of the program. A new start resets the session.

        A program is started again when the process of its environment has died.
        """
        if start in self.earlier_starts or (start and not is_start(start, self.secret)):
            return False
        if start != self.start:
            self.earlier_starts.add(self.start)
            self.start = start
            self.session.begin_again()
        return True


class _Admitted(NamedTuple):
    """A request with the key of an open session."""

    client: _Client
    raw: bytes
    """Body of the request."""
    parsed: dict[str, Any] | None = None
    """Parsed body, if it was parsed to find the key in it."""

    def body(self) -> dict[str, Any]:
        """Return the parsed body. Parsing takes long for a large body."""
        return parsed_body(self.raw) if self.parsed is None else self.parsed


class AgentEndpoint:
    """Serve the sessions of one event loop."""

    def __init__(self, config: AgentEndpointConfig) -> None:
        self._config = config
        self._clients: dict[str, _Client] = {}
        self._serving: asyncio.Task[None] | None = None
        self._guard = ConnectionGuard()
        self._large_unknown = asyncio.Semaphore(_LARGE_UNKNOWN)
        self._port = 0

    @property
    def address(self) -> str:
        """The endpoint's URL, without a path."""
        host = (self._config.public_host or self._config.host).strip("[]")
        if host in ("0.0.0.0", "::"):  # noqa: S104  (this asks whether it is)
            import ray  # deferred: evaluations and tests may run without Ray

            host = ray.util.get_node_ip_address()
        return http_address(host, self._port)

    async def start(self) -> None:
        """Start the server in a task of the running event loop, unless it is running already.

        Raises:
            ConfigError: the address cannot be used.
        """
        if self._serving is not None and not self._serving.done():
            return
        listener = listener_of("cluster.agent_endpoint", self._config.host, self._config.port)
        self._port = listener.getsockname()[1]
        server = self._guard.server(self.application(), lifespan="off")
        self._serving = asyncio.create_task(serve_until_cancelled(server, listener))
        async with asyncio.timeout(_START_S):
            while not server.started:
                await asyncio.sleep(0.01)

    def open(self, session: AgentSession) -> str:
        """Accept requests for a session, and return the session's key."""
        key = new_key()
        self._clients[key] = _Client(session)
        return key

    def secret_of(self, key: str) -> str:
        """Return the secret with which starts of the program of an open session are signed."""
        return self._clients[key].secret

    def close(self, key: str) -> None:
        """Refuse further requests that have this key."""
        client = self._clients.pop(key, None)
        if client is not None:
            self._guard.close(client)

    def application(self) -> Starlette:
        """Return the application that answers requests."""
        routes = [
            *(Route(dialect.path, self._handler(dialect), methods=["POST"]) for dialect in DIALECTS),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{name}", self._model, methods=["GET"]),
            *(Route(path, self._tokenize, methods=["POST"]) for path in ("/tokenize", "/v1/tokenize")),
        ]
        handlers: dict[Any, Any] = {HTTPException: _other_path, CallError: _refused}
        return Starlette(routes=routes, exception_handlers=handlers)

    def _handler(self, dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            try:
                return await self._answer(dialect, request)
            except ClientDisconnect:
                return Response(status_code=_CLIENT_GONE)
            except CallError as error:
                return JSONResponse(dialect.error(error), error.status, _headers(error))

        return handle

    async def _answer(self, dialect: Dialect, request: Request) -> Response:
        admitted = await self._admitted(request)
        session = admitted.client.session
        identity = hashlib.blake2b(dialect.path.encode() + b"\n" + admitted.raw, digest_size=16).hexdigest()
        self._note_arrival(admitted.client, identity)
        body, call = await session.on_thread(lambda: _read(dialect, admitted.body(), session))
        exchange = session.exchange(call, identity, is_retry=_is_retry(request))
        try:
            answers = await exchange.answers(_disconnected(request))
        except ClientGoneError:
            session.counts["undelivered"] += 1
            return Response(status_code=_CLIENT_GONE)
        if not body.get("stream"):
            return await session.on_thread(lambda: JSONResponse(dialect.response(body, call, answers, session.memory)))
        lines = await session.on_thread(
            lambda: [_line(event) for event in dialect.events(body, call, answers, session.memory)]
        )

        async def each_line() -> AsyncIterator[bytes]:
            for line in lines:
                yield line

        return StreamingResponse(each_line(), media_type="text/event-stream")

    async def _models(self, request: Request) -> Response:
        self._known(request)
        page = {"has_more": False, "first_id": MODEL, "last_id": MODEL}
        return JSONResponse({"object": "list", "data": [_described(MODEL)]} | page)

    async def _model(self, request: Request) -> Response:
        """Return the description of the model under the requested name, because calls may use any name."""
        self._known(request)
        return JSONResponse(_described(request.path_params["name"]))

    async def _tokenize(self, request: Request) -> Response:
        """Return the tokens that a prompt or the messages of a conversation would have."""
        admitted = await self._admitted(request)
        session = admitted.client.session
        self._note_arrival(admitted.client, "")
        most = session.parts.limits.max_sequence_length

        def answer() -> Response:
            body = admitted.body()
            dialect = DIALECT_BY_PATH["/v1/chat/completions" if "messages" in body else "/v1/completions"]
            images = session.images.of_request()
            tokens = session.token_ids(dialect.read({"model": MODEL, **body}, session.memory, images))
            return JSONResponse({"count": len(tokens), "max_model_len": most, "tokens": tokens})

        return await session.on_thread(answer)

    def _known(self, request: Request) -> _Client:
        """Return the program with the key in the headers of a request."""
        client = self._found(_header_key(request))
        if client is None:
            raise _unknown_key()
        return self._recognised(request, client)

    def _recognised(self, request: Request, client: _Client) -> _Client:
        """Note the session of a request's connection, and raise an error if the session has too many connections."""
        most = max(MOST_OF_ONE, 2 * self._config.max_concurrent_calls)
        if not self._guard.recognise(request.scope, client, most):
            client.session.counts["refused"] += 1
            raise CallError(429, "This key has too many open connections; close some.", _TOO_MANY_CONNECTIONS)
        return client

    def _found(self, key: str) -> _Client | None:
        """Return the program with a key, or None if the key is unknown or of an earlier start of the program."""
        name, _, start = key.partition(START_SIGN)
        client = self._clients.get(name)
        return client if client is not None and client.admits(start) else None

    async def _admitted(self, request: Request) -> _Admitted:
        """Return the program with a request's key, and the body of the request."""
        client = self._found(_header_key(request))
        if client is not None:
            self._recognised(request, client)
            return _Admitted(client, await self._body(request))
        try:
            raw = await self._unknown_body(request)
            parsed = await asyncio.to_thread(self._parsed_with_key, raw)
        except CallError:
            raise _unknown_key() from None
        client = self._found(key_in(parsed))
        if client is None:
            raise _unknown_key()
        return _Admitted(self._recognised(request, client), raw, parsed)

    def _parsed_with_key(self, raw: bytes) -> dict[str, Any]:
        """Return the parsed body, or an empty object if the body contains no key."""
        return parsed_body(raw) if names_a_key(raw, self._clients) else {}

    def _note_arrival(self, client: _Client, identity: str) -> None:
        """Count a request against the limit per minute, and raise an error beyond the limit."""
        most, now = self._config.max_requests_per_minute, time.monotonic()
        if most is None:
            return
        while client.arrivals and client.arrivals[0] <= now - _MINUTE_S:
            client.arrivals.popleft()
        if len(client.arrivals) >= most:
            client.session.counts["refused"] += 1
            client.session.exchanges.note_refused(identity)
            message = f"This key may send {most} requests in a minute (cluster.agent_endpoint.max_requests_per_minute)."
            raise CallError(429, message, "rate_limit_exceeded")
        client.arrivals.append(now)

    async def _body(self, request: Request) -> bytes:
        """Read the body of a request, up to the allowed size."""
        raw = bytearray()
        most = self._checked_length(request)
        async with _in_time():
            async for part in request.stream():
                raw += part
                if len(raw) > most:
                    raise _too_large(most)
        return bytes(raw)

    async def _unknown_body(self, request: Request) -> bytes:
        """Read the body of a request without a key in its headers. Few large bodies are read at the same time."""
        raw = bytearray()
        most = self._checked_length(request)
        async with _in_time(), contextlib.AsyncExitStack() as held:
            async for part in request.stream():
                raw += part
                if len(raw) > most:
                    raise _too_large(most)
                if len(raw) > _UNKNOWN_BYTES >= len(raw) - len(part) and not names_a_key(raw, self._clients):
                    await held.enter_async_context(self._large_unknown)
        return bytes(raw)

    def _checked_length(self, request: Request) -> int:
        """Return the largest allowed size of a body, and refuse a request whose header announces more."""
        most = int(self._config.max_request_mb * 2**20)
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and (len(length) > _MOST_DIGITS or int(length) > most):
            raise _too_large(most)
        return most


def _read(dialect: Dialect, body: dict[str, Any], session: AgentSession) -> tuple[dict[str, Any], CallRequest]:
    """Return the body of a request and its call. The function raises the errors of `Dialect.read`."""
    return body, dialect.read(body, session.memory, session.images.of_request())


def _line(event: Event) -> bytes:
    """Return the lines of an event in ASCII, because some clients break lines at other characters too."""
    data = event.data if isinstance(event.data, str) else json.dumps(event.data)
    return (f"event: {event.name}\n" if event.name else "").encode() + f"data: {data}\n\n".encode()


@contextlib.asynccontextmanager
async def _in_time() -> AsyncIterator[None]:
    """Limit the time in which a body has to arrive."""
    try:
        async with asyncio.timeout(_BODY_S):
            yield
    except TimeoutError as error:
        raise CallError(408, f"The body did not arrive within {_BODY_S:g} s.", "request_timeout") from error


def _too_large(most: int) -> CallError:
    message = f"The body is larger than {most} bytes (cluster.agent_endpoint.max_request_mb)."
    return CallError(413, message, "request_too_large")


async def _disconnected(request: Request) -> None:
    """Wait until the client closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _header_key(request: Request) -> str:
    """Return the key in the headers of a request, or an empty text if they have no key."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def _unknown_key() -> CallError:
    return CallError(
        401,
        "The API key is missing or unknown, or its sample has ended. Send the key that the program was given, "
        "as `Authorization: Bearer KEY` or `x-api-key: KEY`.",
        "invalid_api_key",
    )


def _is_retry(request: Request) -> bool:
    """Return whether a header marks the request as repeated, as the packages openai and anthropic do."""
    with contextlib.suppress(ValueError):
        return int(request.headers.get("x-stainless-retry-count", "0")) > 0
    return False


def _headers(error: CallError) -> dict[str, str]:
    """Return the headers of an error. They let clients repeat a request only after status 429."""
    if error.status == 429:
        return {"retry-after": "1", **({"connection": "close"} if error.code == _TOO_MANY_CONNECTIONS else {})}
    # The rest of such a request's body is not read.
    ends = {"connection": "close"} if error.status in _ENDS_CONNECTION else {}
    return {"x-should-retry": "false", **ends}


def _described(name: str) -> dict[str, Any]:
    """Return the description of a model with the fields of both OpenAI and Anthropic."""
    of_openai = {"id": name, "object": "model", "created": 0, "owned_by": "nemo_rl"}
    return of_openai | {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _as_json(error: CallError) -> Response:
    kind = "authentication_error" if error.status == 401 else "invalid_request_error"
    about = {"message": error.message, "type": kind, "param": error.parameter, "code": error.code}
    return JSONResponse({"error": about}, error.status, _headers(error))


async def _refused(_: Request, error: CallError) -> Response:
    return _as_json(error)


async def _other_path(request: Request, error: HTTPException) -> Response:
    known = ", ".join(dialect.path for dialect in DIALECTS)
    message = f"{request.method} {request.url.path}: {error.detail}. The endpoint has POST {known}, GET /v1/models."
    return _as_json(CallError(error.status_code, message, "not_found"))
