"""A small OpenAI-compatible endpoint on a thread, which counts the calls of each key."""

import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from nemo_rl.agents.programs.interfaces import START_SIGN


class FakeEndpoint:
    """Answers each chat with its last message, and each other path with 404.

    Attributes:
        url: base URL.
        calls: number of calls of each sample's key.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(endpoint: FakeEndpoint) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: Any) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            key = body.get("nemo_rl_key") or self.headers.get("Authorization", "").removeprefix("Bearer ")
            key = key.partition(START_SIGN)[0]
            endpoint.calls[key] += 1
            if self.path != "/v1/chat/completions":
                self.send(404, {"error": {"message": "no such path"}})
                return
            message = {"role": "assistant", "content": body["messages"][-1]["content"]}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            number = endpoint.calls[key]
            self.send(
                200,
                {
                    "id": f"call-{number}",
                    "object": "chat.completion",
                    "created": int(time.time()),
                    "model": body["model"],
                    "choices": [choice],
                },
            )

        def send(self, status: int, value: Any) -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return Handler
