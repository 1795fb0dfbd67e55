"""Define the routes of training and sampling, as the official library calls them.

Invariant: a handler checks the user before anything else. What is wrong with the content of a training or sampling
request becomes the result of its promise, because clients read no other errors of these requests at once.
"""

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nemo_rl.host.guarded_http import ConnectionGuard
from nemo_rl.serving.http.requests import (
    canonical_json,
    error_response,
    outcome_response,
    read_raw,
    user_of,
)
from nemo_rl.serving.interfaces import RequestError
from nemo_rl.serving.limits import RefusedError
from nemo_rl.serving.promises import Promise
from nemo_rl.serving.service import Service
from nemo_rl.serving.store.keys import KeyBook
from nemo_rl.serving.store.storage import StorageError
from nemo_rl.serving.wire.bodies import (
    CreateModelBody,
    CreateSamplerBody,
    CreateSessionBody,
    FinishBody,
    FutureBody,
    LoadWeightsBody,
    ModelBody,
    SessionBody,
    read_body,
    read_json,
)
from nemo_rl.serving.wire.messages import ForwardBackwardRequest, parsed

type Handler = Callable[[Request, str], Awaitable[Response]]

_CLIENT_GONE = 499
_LARGEST_INLINE = 2**20
"""Size in bytes of a result above which a client may first reserve memory for it."""
_LARGEST_CHUNK = 50_000_000
_COMMANDS = ("optim_step", "save_weights", "save_weights_for_sampler", "save_weights_external")
_REFUSED = {
    "copy_weights": "copies between accounts",
    "auth/token": "accounts",
    "audit": "accounts",
    "create_custom_loss": "losses that run in the service (forward_backward_custom with a function is served)",
    "retrieve_futures": "results of several requests at once",
    "join_sampling_session": "joint sampling sessions",
}


class TrainingRoutes:
    """Handlers of the routes that train and sample.

    Args:
        service: what runs the requests.
        keys: users.
        guard: connections.
    """

    def __init__(self, service: Service, keys: KeyBook, guard: ConnectionGuard) -> None:
        self._service = service
        self._keys = keys
        self._guard = guard

    def routes(self) -> list[Route]:
        """Return the routes."""
        posts: dict[str, Handler] = {
            "client/config": self._config,
            "client/dynamic_config": self._dynamic_config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session_id}/finish": self._finish,
            "telemetry": self._telemetry,
            "create_model": self._create_model,
            "get_info": self._info,
            "forward_backward": self._forward_backward,
            "load_weights": self._load_weights,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            "cancel_future": self._cancel,
            **{name: functools.partial(self._command, name) for name in _COMMANDS},
            **{name: functools.partial(self._refuse, what) for name, what in _REFUSED.items()},
        }
        return [
            *(self.route(path, handler, "POST") for path, handler in posts.items()),
            Route("/api/v1/healthz", self._health, methods=["GET"]),
        ]

    def route(self, path: str, handler: Handler, *methods: str) -> Route:
        """Return a route whose handler gets the name of the user.

        Args:
            path: below `/api/v1/`.
            handler: function that gets the request and the name of the user.
            methods: HTTP methods.
        """

        async def handle(request: Request) -> Response:
            try:
                return await handler(request, user_of(request, self._keys, self._guard))
            except ClientDisconnect:
                return Response(status_code=_CLIENT_GONE)
            except RefusedError as error:
                return error_response(error.status, error.message)
            except RequestError as error:
                return error_response(400, str(error))
            except StorageError as error:
                self._service.trainer.storage.tell(error)
                return error_response(507, str(error))

        return Route(f"/api/v1/{path}", handle, methods=list(methods))

    async def raw(self, request: Request) -> bytes:
        """Return the body of a request."""
        return await read_raw(request, int(self._service.config.max_request_mb * 2**20))

    async def json(self, request: Request) -> dict[str, Any]:
        """Return the object in the body of a request."""
        return read_json(await self.raw(request))

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _config(self, request: Request, user: str) -> Response:
        await self.json(request)
        # One call of a client is one request, up to a size at which its memory counts.
        most = min(_LARGEST_CHUNK, int(self._service.config.max_request_mb * 2**19))
        flags = {"pjwt_auth_enabled": False, "parallel_fwdbwd_chunks": True, "fwdbwd_max_chunk_bytes_count": most}
        return JSONResponse(flags)

    async def _dynamic_config(self, request: Request, user: str) -> Response:
        await self.json(request)
        return JSONResponse({"refresh_interval_sec": 300, "sample_cancel_enabled": True})

    async def _create_session(self, request: Request, user: str) -> Response:
        given = read_body(CreateSessionBody, await self.json(request))
        retry_key = request.headers.get("x-idempotency-key", "")[:256]
        session = self._service.state.sessions.create(user, given.model_dump(), retry_key)
        return JSONResponse({"type": "create_session", "session_id": session.id})

    async def _heartbeat(self, request: Request, user: str) -> Response:
        given = read_body(SessionBody, await self.json(request))
        session = self._service.state.session(user, given.session_id)
        if session.finished is not None:
            raise RefusedError(410, f"The session {session.id} has ended.")
        return JSONResponse({"type": "session_heartbeat"})

    async def _finish(self, request: Request, user: str) -> Response:
        given = read_body(FinishBody, await self.json(request))
        session = self._service.state.session(user, request.path_params["session_id"])
        self._service.finish_session(session, {"reason": given.reason, "detail": given.detail})
        return JSONResponse({})

    async def _telemetry(self, request: Request, user: str) -> Response:
        await self.raw(request)
        return JSONResponse({"status": "accepted"})

    async def _create_model(self, request: Request, user: str) -> Response:
        body = await self.json(request)
        given = read_body(CreateModelBody, body)
        return self._promised(lambda: self._service.create_model(user, given, canonical_json(body)))

    async def _load_weights(self, request: Request, user: str) -> Response:
        body = await self.json(request)
        given = read_body(LoadWeightsBody, body)
        return self._promised(lambda: self._service.load_model(user, given, canonical_json(body)))

    async def _command(self, kind: str, request: Request, user: str) -> Response:
        body = await self.json(request)
        tenant = self._service.state.tenant(user, _text(body, "model_id"))
        seq_id = _seq_id(body.get("seq_id"))
        return self._promised(lambda: self._service.submit(tenant, seq_id, kind, canonical_json(body)))

    async def _forward_backward(self, request: Request, user: str) -> Response:
        raw = await self.raw(request)
        message = parsed(ForwardBackwardRequest, raw)
        tenant = self._service.state.tenant(user, message.model_id)
        seq_id, kind = _seq_id(message.seq_id), "forward" if message.forward_only else "forward_backward"
        # Maps have no order in protobuf, so equal messages may have other bytes.
        canonical = message.SerializeToString(deterministic=True)
        return self._promised(lambda: self._service.submit(tenant, seq_id, kind, raw, canonical))

    async def _info(self, request: Request, user: str) -> Response:
        given = read_body(ModelBody, await self.json(request))
        tenant = self._service.state.tenant(user, given.model_id)
        name = tenant.details.base_model
        data = {"arch": "lora", "model_name": name, "tokenizer_id": self._service.config.tokenizer_id or name}
        answer = {"type": "get_info", "model_data": data, "model_id": tenant.id, "is_lora": True}
        optimizer = {"optimizer_config": {"type": "adamw"}}
        return JSONResponse({**answer, **optimizer, "lora_rank": tenant.spec.rank, "model_name": name})

    async def _create_sampler(self, request: Request, user: str) -> Response:
        given = read_body(CreateSamplerBody, await self.json(request))
        sampler = self._service.create_sampler(user, given)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler.id})

    async def _sample(self, request: Request, user: str) -> Response:
        body = await self.json(request)
        if not body.get("sampling_session_id"):
            raise RequestError("sampling_session_id is missing. Make one with create_sampling_session.")
        sampler = self._service.state.sampler(user, _text(body, "sampling_session_id"))
        seq_id = _seq_id(body.get("seq_id"), first=0)
        self._service.state.session(user, sampler.session_id).require_open()
        number = body.get("num_samples", 1)
        count = number if type(number) is int and 0 < number <= 2**16 else 1
        submit = self._service.sampling.submit
        return self._promised(lambda: submit(user, sampler, seq_id, canonical_json(body)), count)

    async def _retrieve(self, request: Request, user: str) -> Response:
        given = read_body(FutureBody, await self.json(request))
        promise = self._service.find_promise(user, given.request_id)
        outcome = await promise.wait(self._service.config.poll_hold_s)
        if outcome is None:
            why = self._service.why_waiting(given.request_id)
            state = "paused_capacity" if self._service.waits_for_space(given.request_id) else "active"
            waits = {"type": "try_again", "request_id": given.request_id, "queue_state": state}
            return JSONResponse({**waits, "queue_state_reason": why}, 408)
        if given.allow_metadata_only and len(outcome.content) > _LARGEST_INLINE:
            return JSONResponse({"status": "complete_metadata", "response_payload_size": len(outcome.content)})
        promise.note_delivery()
        return outcome_response(outcome)

    async def _cancel(self, request: Request, user: str) -> Response:
        given = read_body(FutureBody, await self.json(request))
        self._service.find_promise(user, given.request_id)
        self._service.sampling.cancel(given.request_id)
        return JSONResponse({})

    async def _refuse(self, what: str, request: Request, user: str) -> Response:
        raise RefusedError(403, f"This service does not serve {what}.")

    def _promised(self, submit: Callable[[], Promise], num_samples: int = 0) -> Response:
        """Return the answer to a request whose result comes later.

        Args:
            submit: function that accepts the request.
            num_samples: number of sequences of a request to sample.
        """
        try:
            promise = submit()
        except RequestError as error:
            promise = self._service.failed(error)
        answer: dict[str, Any] = {"request_id": promise.id}
        if num_samples:
            answer["sample_sequence_ids"] = [f"{promise.id}:{number}" for number in range(num_samples)]
        elif ":train:" in promise.id:
            answer["model_id"] = promise.id.rpartition(":")[0]
        return JSONResponse(answer)


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{name} is missing or no text.")
    return value


def _seq_id(value: Any, first: int = 1) -> int:
    if type(value) is not int or not first <= value < 2**62:
        raise RequestError(f"seq_id is {value!r}; it must be a whole number from {first} on.")
    return value
