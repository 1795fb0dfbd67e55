"""A local server with OpenAI's completions and chat completions, whose answers a test decides."""

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nemo_rl.config.schema.model.endpoint import ModelEndpointConfig

KEY = "sk-very-secret-4711"

type Answer = Callable[[dict[str, Any]], Awaitable[Response | dict[str, Any]]]


class ChatServer:
    """Answers with the next response of `script`, and after these with `answer`.

    Attributes:
        url: base URL.
        models: names that it lists; None: it has no list.
        bodies: bodies of all requests, in order.
        headers: their headers.
        times: when they came.
        most_at_once: largest number of requests at the same time.
    """

    def __init__(self, answer: Answer, script: list[Response] | None = None) -> None:
        self.models: list[str] | None = ["tiny"]
        self.list_status = 200
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.script = list(script or ())
        self.most_at_once = self._open = 0
        self._answer = answer
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._chat, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
        ]
        config = uvicorn.Config(Starlette(routes=routes), log_level="error", lifespan="off", ws="none")
        self._server = uvicorn.Server(config)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],), daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)

    def __enter__(self) -> "ChatServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.force_exit = self._server.should_exit = True
        self._thread.join(10)

    async def _models(self, request: Request) -> Response:
        if self.models is None or self.list_status != 200:
            return JSONResponse({"detail": f"not for {request.headers.get('authorization')}"}, self.list_status)
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]})

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.times.append(time.monotonic())
        self._open += 1
        self.most_at_once = max(self.most_at_once, self._open)
        try:
            answer = self.script.pop(0) if self.script else await self._answer(body)
        finally:
            self._open -= 1
        return answer if isinstance(answer, Response) else JSONResponse(answer)


class Stall(Response):
    """A response that comes too late."""

    async def __call__(self, *arguments: Any) -> None:
        await asyncio.sleep(1.0)
        await super().__call__(*arguments)


class CutOff(Response):
    """A response whose connection is lost in the middle."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1000")]})
        await send({"type": "http.response.body", "body": b'{"choices": [', "more_body": True})
        raise ConnectionResetError


def completion(text: str | None, finish_reason: str | None = "stop", tokens: int | None = 3, **choice: Any) -> Any:
    """A chat completion; `message` and other fields of the choice can be given."""
    message = {"role": "assistant", "content": text, **choice.pop("message", {})}
    usage = {} if tokens is None else {"usage": {"prompt_tokens": 5, "completion_tokens": tokens}}
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish_reason, **choice}], **usage}


def endpoint_config(server: ChatServer, **keys: Any) -> ModelEndpointConfig:
    """A section with short pauses."""
    keys = {"base_url": server.url, "model": "tiny", "backoff_s": 0.01, "timeout_s": 5.0, **keys}
    return ModelEndpointConfig.build(**keys)


async def echo(body: dict[str, Any]) -> dict[str, Any]:
    """Answer with the last message."""
    return completion(f"you said {body['messages'][-1]['content']}")
