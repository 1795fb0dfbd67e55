"""Agent programs of an HTTP service that works, fails, is slow and answers nonsense."""

import asyncio
import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import programs_for_tests
import pytest
from agent_steps import KEY, agent, played
from fake_endpoint import FakeEndpoint

from nemo_rl.agents.programs.environment import AgentEnvironment
from nemo_rl.agents.programs.interfaces import AgentTask


class Service:
    """Does what the field `do` of a row says.

    Attributes:
        url: its address.
        requests: number of requests of each behaviour.
        aborted: set when a client went away.
    """

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.tasks: list[dict[str, Any]] = []
        self.aborted = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/run"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(service: Service) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None:
            pass

        def do_POST(self) -> None:
            task = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            behaviour = task["row"]["do"]
            service.requests[behaviour] += 1
            service.tasks.append(task)
            getattr(self, f"do_{behaviour}")(task)

        def send(self, status: int, content: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(content.encode())

        def do_well(self, task: dict[str, Any]) -> None:
            text = programs_for_tests.call(AgentTask(**task))["choices"][0]["message"]["content"]
            self.send(200, json.dumps({"reward": text == "4", "answer": text}))

        def do_fail_twice(self, task: dict[str, Any]) -> None:
            broken = service.requests["fail_twice"] <= 2
            self.send(503 if broken else 200, "busy" if broken else '{"reward": 1}')

        def do_drop(self, task: dict[str, Any]) -> None:
            self.connection.close()

        def do_break(self, task: dict[str, Any]) -> None:
            self.send(500, "broken")

        def do_refuse(self, task: dict[str, Any]) -> None:
            self.send(401, f"not you, {task['api_key']}")

        def do_nonsense(self, task: dict[str, Any]) -> None:
            self.send(200, "<html>")

        def do_nan(self, task: dict[str, Any]) -> None:
            self.send(200, '{"reward": NaN}')

        def do_nothing(self, task: dict[str, Any]) -> None:
            self.send(200, "null")

        def do_flood(self, task: dict[str, Any]) -> None:
            with contextlib.suppress(OSError):
                self.send(200, "1" * 2**24)

        def do_hang(self, task: dict[str, Any]) -> None:
            self.connection.settimeout(10)
            if self.connection.recv(1) == b"":
                service.aborted.set()

    return Handler


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    with FakeEndpoint() as endpoint:
        yield endpoint


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.close()


def test_a_service_gets_the_task_and_returns_the_reward(service: Service, endpoint: FakeEndpoint) -> None:
    (result,) = played(endpoint.url, {"service": service.url}, [{"do": "well"}], tools=[{"type": "function"}])
    assert result.reward == 1.0 and result.answer == "4" and endpoint.calls == {KEY: 1}
    given = {"messages": [{"role": "user", "content": "4"}], "tools": [{"type": "function"}], "row": {"do": "well"}}
    more = {"base_url": endpoint.url, "model": "policy", "seed": 7, "timeout_s": 300.0}
    (task,) = service.tasks
    assert task.pop("api_key").startswith(f"{KEY}.") and task == given | more


@pytest.mark.parametrize(
    ("behaviour", "reason", "requests"),
    [
        ("fail_twice", None, 3),
        ("drop", "failed: ", 1),
        ("break", "answered with status 500: ", 1),
        ("refuse", "answered with status 401: not you, ***", 1),
        ("nonsense", "sent no result: ", 1),
        ("nan", "reward=nan, which is not finite", 1),
        ("nothing", "returned no reward", 1),
        ("flood", "sent more than 1048576 bytes", 1),
    ],
)
def test_a_failing_service(behaviour: str, reason: str | None, requests: int, service: Service) -> None:
    (result,) = played("http://127.0.0.1:9/v1", {"service": service.url}, [{"do": behaviour}])
    assert service.requests[behaviour] == requests
    assert reason is None and result.reward == 1.0 or reason in result.error


def test_a_service_that_does_not_exist() -> None:
    (result,) = played("http://127.0.0.1:9/v1", {"service": "http://127.0.0.1:9/run"})
    assert "failed: " in result.error and "4 times" in result.error


def test_a_task_that_json_cannot_hold() -> None:
    (result,) = played("", {"service": "http://127.0.0.1:9/run"}, [{"value": SimpleNamespace()}])
    assert "cannot be written as JSON" in result.error


def test_a_request_ends_at_the_deadline_and_with_its_step(service: Service) -> None:
    started = time.monotonic()
    (result,) = played("", {"service": service.url, "timeout_s": 0.5}, [{"do": "hang"}])
    assert "gave no result in 0.5 s" in result.error and time.monotonic() - started < 5
    assert service.aborted.wait(5)
    service.aborted.clear()

    async def cancel() -> None:
        environment = AgentEnvironment({"service": service.url})
        step = asyncio.ensure_future(environment.step([[]], [{"do": "hang", "agent": agent("")}]))
        await asyncio.sleep(0.5)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert await asyncio.to_thread(service.aborted.wait, 5)

    asyncio.run(cancel())
