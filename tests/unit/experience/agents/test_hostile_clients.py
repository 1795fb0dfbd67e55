"""Hostile clients neither keep others waiting for a second, nor hold the connections and files of the endpoint.

Each attack runs next to a client with a key that asks all the time. The figures are printed: `pytest -s`.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

MOST_FILES = 1024
SIDE = Path(__file__).parent / "endpoint_for_attacks.py"
CHAT = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}]}
LONGEST_DELAY_S = 1.0
"""Besides twice the longest delay without an attack, because other work of the machine delays answers as well."""


class Served(NamedTuple):
    """An endpoint in another process, with the keys of an attacker and of a victim."""

    process: subprocess.Popen[str]
    host: str
    port: int
    attacker: str
    victim: str

    def files(self) -> dict[str, Any]:
        """Ask for the number of open files."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("files\n")
        self.process.stdin.flush()
        return dict(json.loads(self.process.stdout.readline()))

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port)

    def request(self, path: str, body: bytes, key: str | None, length: int | None = None) -> bytes:
        """Return the bytes of a request."""
        lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body) if length is None else length}"]
        lines += [] if key is None else [f"Authorization: Bearer {key}"]
        return "\r\n".join([*lines, "", ""]).encode() + body

    async def status(self, path: str, body: bytes, key: str | None) -> int:
        """Send a request, and return the status of its answer; 0 if the connection is closed without one."""
        with contextlib.suppress(ConnectionError):
            reader, writer = await self.connect()
            try:
                writer.write(self.request(path, body, key))
                return int(((await reader.readline()).split() or [b"", b"0"])[1])
            finally:
                writer.close()
        return 0


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    command = [sys.executable, str(SIDE), str(MOST_FILES)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        told = json.loads(process.stdout.readline())
        address = urlsplit(told["address"])
        yield Served(process, str(address.hostname), int(address.port or 0), *told["keys"])
        process.stdin.close()


@pytest.fixture(scope="module")
def allowed_s(served: Served) -> float:
    """Longest delay that passes."""
    idle_s = asyncio.run(longest_delay(served, lambda: asyncio.sleep(0), 2.0))
    sys.stdout.write(f"without an attack: longest delay {idle_s:.3f} s\n")
    return LONGEST_DELAY_S + 2 * idle_s


async def longest_delay(served: Served, attack: Callable[[], Awaitable[Any]], at_least_s: float) -> float:
    """Return the longest time that an answer of a new connection takes while an attack runs."""
    delays: list[float] = []
    attacking = asyncio.ensure_future(attack())
    started = time.monotonic()
    number = 0
    while not attacking.done() or time.monotonic() - started < at_least_s:
        number += 1
        asked = time.monotonic()
        is_call = number % 2
        body = json.dumps({**CHAT, "messages": [{"role": "user", "content": f"Hi {number}"}]}).encode()
        path = "/v1/chat/completions" if is_call else "/tokenize"
        status = await asyncio.wait_for(served.status(path, body, served.victim), 60)
        assert status == 200
        delays.append(time.monotonic() - asked)
        await asyncio.sleep(0.02)
    await attacking
    return max(delays)


async def hold(served: Served, count: int, first_bytes: bytes, seconds: float) -> int:
    """Open connections that send only these bytes; return how many are open after some seconds."""
    opened = []
    for _ in range(count):
        with contextlib.suppress(ConnectionError):
            reader, writer = await served.connect()
            writer.write(first_bytes)
            opened.append((reader, writer))
    await asyncio.sleep(seconds)
    alive = 0
    for reader, writer in opened:
        with contextlib.suppress(ConnectionError, TimeoutError):
            while await asyncio.wait_for(reader.read(65536), 0.001):
                pass
            continue
        alive += not reader.at_eof() and not writer.is_closing() and reader.exception() is None
    for _, writer in opened:
        writer.close()
    return alive


def chat_of(messages: list[Any], **others: Any) -> bytes:
    return json.dumps({"model": "policy", "messages": messages, **others}).encode()


def tools(count: int) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": {"x": {"type": "string"}}}
    return [{"type": "function", "function": {"name": f"tool{n}", "parameters": schema}} for n in range(count)]


HELLO = [{"role": "user", "content": "Hi"}]
LARGE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "15 MB of JSON": ("/v1/chat/completions", lambda: chat_of([{"role": "user", "content": "x " * 7_500_000}])),
    "15 MB of brackets": ("/v1/chat/completions", lambda: b"[" + b"[]," * 5_000_000 + b"[]]"),
    "100,000 messages": ("/v1/chat/completions", lambda: chat_of(HELLO * 100_000)),
    "10,000 tools": ("/v1/chat/completions", lambda: chat_of(HELLO, tools=tools(10_000))),
    "2 million token ids": ("/v1/completions", lambda: json.dumps({"prompt": [5] * 2_000_000}).encode()),
    "14 MB of guided_choice": (
        "/v1/chat/completions",
        lambda: chat_of(HELLO, guided_choice=[f"choice {n}" * 10 for n in range(110_000)]),
    ),
}
"""Requests that are too large."""
JUST_ALLOWED: dict[str, tuple[str, Callable[[], bytes]]] = {
    "1 MB of text": ("/v1/chat/completions", lambda: chat_of([{"role": "user", "content": "a b" * 340_000}])),
    "1 MB of letters": ("/v1/chat/completions", lambda: chat_of([{"role": "user", "content": "x" * 1_040_000}])),
    "1 MB of brackets": ("/v1/chat/completions", lambda: b'{"messages": [' + b"[]," * 340_000 + b"[]]}"),
    "4,000 messages": ("/v1/chat/completions", lambda: chat_of(HELLO * 4_000)),
    "12,000 messages": ("/v1/chat/completions", lambda: chat_of(HELLO * 12_000)),
    "4,000 parts": ("/v1/chat/completions", lambda: chat_of([{"role": "user", "content": [PART] * 4_000}])),
    "500 tools": ("/v1/chat/completions", lambda: chat_of(HELLO, tools=tools(500))),
    "300,000 token ids": ("/v1/completions", lambda: json.dumps({"prompt": [5] * 300_000}).encode()),
    "300,000 token ids to count": ("/tokenize", lambda: json.dumps({"prompt": [5] * 300_000}).encode()),
    "24 KB of guided_choice": ("/v1/chat/completions", lambda: chat_of(HELLO, guided_choice=["no"] * 4_000)),
    "1 MB of guided_choice": ("/v1/chat/completions", lambda: chat_of(HELLO, guided_choice=["c" * 230] * 4_000)),
    "1 MB of a grammar": ("/v1/chat/completions", lambda: chat_of(HELLO, guided_grammar="root ::= " + "x " * 500_000)),
    "1 MB of variables": (
        "/v1/chat/completions",
        lambda: chat_of(HELLO, chat_template_kwargs={f"name{n}": [n] * 10 for n in range(15_000)}),
    ),
}
"""Requests that may be read, with about as much work as a request can make."""
PART = {"type": "text", "text": "x"}


@pytest.mark.parametrize("has_key", [False, True], ids=["without a key", "with a key"])
@pytest.mark.parametrize("name", list(LARGE | JUST_ALLOWED))
def test_a_large_request_delays_nobody(served: Served, allowed_s: float, name: str, has_key: bool) -> None:
    path, made = (LARGE | JUST_ALLOWED)[name]
    body = made()
    statuses: list[int] = []

    async def attack() -> None:
        key = served.attacker if has_key else None
        statuses.extend(await asyncio.gather(*(served.status(path, body, key) for _ in range(4))))

    delay = asyncio.run(longest_delay(served, attack, 1.0))
    sys.stdout.write(f"{name}, {'with' if has_key else 'without'} a key: {statuses}, longest delay {delay:.3f} s\n")
    assert delay < allowed_s
    expected = {400, 413, 429, 0, 200} if has_key else {401, 0}
    assert set(statuses) <= expected
    if name in LARGE:
        assert 200 not in statuses


HALF: dict[str, Callable[[Served], bytes]] = {
    "nothing": lambda served: b"",
    "half a header": lambda served: b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-",
    "half a body": lambda served: served.request("/v1/chat/completions", b"{", None, length=900_000),
    "half a large body": lambda served: served.request("/v1/chat/completions", b"{", None, length=16_000_000),
    "half a body with a key": lambda served: served.request("/v1/chat/completions", b"{", served.attacker, 900_000),
}


@pytest.mark.parametrize(
    ("count", "seconds"), [(400, 1.0), pytest.param(2000, 25.0, marks=pytest.mark.long)], ids=["short", "full"]
)
@pytest.mark.parametrize("name", list(HALF))
def test_connections_that_send_a_half_keep_nobody_out(
    served: Served, allowed_s: float, name: str, count: int, seconds: float
) -> None:
    alive: list[int] = []
    files: list[dict[str, Any]] = []

    async def watch() -> None:
        while not alive:
            files.append(await asyncio.to_thread(served.files))
            await asyncio.sleep(0.1)

    async def attack() -> None:
        watching = asyncio.ensure_future(watch())
        alive.append(await hold(served, count, HALF[name](served), seconds))
        await watching

    delay = asyncio.run(longest_delay(served, attack, 1.0))
    most = max(one["files"] for one in files)
    sys.stdout.write(
        f"{count} connections with {name}: longest delay {delay:.3f} s, at most {most} of {MOST_FILES} files open, "
        f"{alive[0]} connections open after {seconds:g} s\n"
    )
    assert delay < allowed_s
    assert all(one["can_open"] for one in files) and most < MOST_FILES - 64
    if seconds > 20:
        assert alive == [0]
    elif name != "half a body with a key":
        assert alive[0] <= 300


def test_headers_without_end_are_not_kept(served: Served) -> None:
    async def attack() -> int:
        reader, writer = await served.connect()
        writer.write(b"POST /v1/models HTTP/1.1\r\n")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 8 * 2**20:
                writer.write(b"X-Header: " + b"x" * 8000 + b"\r\n")
                await writer.drain()
                sent += 8000
        return sent

    assert asyncio.run(attack()) < 8 * 2**20


def test_a_proxy_header_names_no_other_client(served: Served) -> None:
    """Otherwise a stranger's connection would count as another one."""

    async def ask() -> int:
        reader, writer = await served.connect()
        head = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 8.8.8.8\r\nX-Api-Key: {served.victim}\r\n\r\n"
        writer.write(head.encode())
        status = int((await reader.readline()).split()[1])
        writer.close()
        return status

    assert asyncio.run(ask()) == 200
