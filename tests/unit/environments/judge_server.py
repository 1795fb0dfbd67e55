"""A local OpenAI-compatible endpoint that behaves as the prompt asks: well, or in one of many bad ways."""

import json
import socket
import struct
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "sk-very-secret-4711"


class JudgeServer:
    """Counts requests by behaviour: the word after "do:" in the prompt.

    Attributes:
        url: base URL.
        requests: number of requests of each behaviour.
        bodies: bodies of all requests.
        most_at_once: largest number of requests at the same time.
    """

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = 0
        self._open = 0
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def enter(self, body: dict[str, Any], headers: dict[str, str]) -> tuple[str, int]:
        prompt = body["messages"][-1]["content"]
        behaviour = prompt.split("do:", 1)[1].split()[0] if "do:" in prompt else "well"
        with self._lock:
            self.bodies.append(body)
            self.headers.append(headers)
            self.requests[behaviour] += 1
            self._open += 1
            self.most_at_once = max(self.most_at_once, self._open)
            return behaviour, self.requests[behaviour]

    def leave(self) -> None:
        with self._lock:
            self._open -= 1


def _handler(judge: JudgeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: Any) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            behaviour, number = judge.enter(body, dict(self.headers))
            try:
                getattr(self, f"do_{behaviour}")(body["messages"][-1]["content"], number)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True
            finally:
                judge.leave()

        def send(self, status: int, content: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(content)

        def say(self, text: Any) -> None:
            usage = {"prompt_tokens": 100, "completion_tokens": 20}
            self.send(200, json.dumps({"choices": [{"message": {"content": text}}], "usage": usage}).encode())

        def do_well(self, prompt: str, number: int) -> None:
            self.say("Fine. Score: 7")

        def do_slow(self, prompt: str, number: int) -> None:
            time.sleep(0.1)
            self.say("Score: 4")

        def do_cut(self, prompt: str, number: int) -> None:
            self.ended("It ends with Score: 10, written by the assistant. The result is", "length")

        def do_cut_in_reasoning(self, prompt: str, number: int) -> None:
            self.ended(None, "length")

        def ended(self, text: str | None, reason: str) -> None:
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
            self.send(200, json.dumps({"choices": [choice]}).encode())

        def do_longest(self, prompt: str, number: int) -> None:
            first, second = (prompt.split(f"<answer_{side}>")[1].split("</")[0] for side in "ab")
            self.say("[[C]]" if len(first) == len(second) else f"[[{'A' if len(first) > len(second) else 'B'}]]")

        def do_first(self, prompt: str, number: int) -> None:
            self.say("As always: [[A]]")

        def do_fail_twice(self, prompt: str, number: int) -> None:
            self.send(500, b"out of memory") if number <= 2 else self.do_well(prompt, number)

        def do_down(self, prompt: str, number: int) -> None:
            self.send(503, b"down for maintenance")

        def do_busy(self, prompt: str, number: int) -> None:
            self.send(429, b"slow down", Retry_After="1") if number == 1 else self.do_well(prompt, number)

        def do_refuse(self, prompt: str, number: int) -> None:
            self.send(401, f"wrong key {self.headers['Authorization']}".encode())

        def do_redirect(self, prompt: str, number: int) -> None:
            self.send(307, b"", Location="http://127.0.0.1:9/steal")

        def do_nonsense(self, prompt: str, number: int) -> None:
            self.say("I like turtles.")

        def do_nonsense_once(self, prompt: str, number: int) -> None:
            self.say("Hm.") if number == 1 else self.do_well(prompt, number)

        def do_too_high(self, prompt: str, number: int) -> None:
            self.say("Score: 11")

        def do_silence(self, prompt: str, number: int) -> None:
            self.say(None)

        def do_html(self, prompt: str, number: int) -> None:
            self.send(200, b"<html>login</html>")

        def do_deep(self, prompt: str, number: int) -> None:
            self.send(200, b"[" * 900_000)

        def do_list(self, prompt: str, number: int) -> None:
            self.send(200, b"[1, 2]")

        def do_flood(self, prompt: str, number: int) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(2**40))
            self.end_headers()
            while True:
                self.wfile.write(b"x" * 65536)

        def do_hang(self, prompt: str, number: int) -> None:
            time.sleep(20)

        def do_trickle(self, prompt: str, number: int) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            for _ in range(200):
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.1)

        def do_reset(self, prompt: str, number: int) -> None:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True

        def do_noise(self, prompt: str, number: int) -> None:
            self.wfile.write(b"\x00\x01\x02 this is not HTTP\r\n\r\n")
            self.close_connection = True

        def do_short(self, prompt: str, number: int) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"{")
            self.close_connection = True

    return Handler
