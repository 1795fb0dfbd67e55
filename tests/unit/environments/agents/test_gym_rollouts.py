"""Rollouts of the calculator servers, which have the interfaces of NeMo Gym, and servers that fail."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_steps import processes_with
from fake_endpoint import FakeEndpoint
from gym_parts import EXAMPLE, KEY, metadata, played, row, section

from nemo_rl.agents.nemo_gym import NemoGym
from nemo_rl.agents.nemo_gym.environment import extract_reward_components, read_rollout
from nemo_rl.agents.nemo_gym.servers import GymServers, added_config, find_program, overrides
from nemo_rl.agents.programs.interfaces import AgentError
from nemo_rl.config.schema.agents import NemoGymConfig
from nemo_rl.utils.errors import ConfigError


@pytest.fixture(autouse=True)
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `processes_with` find all processes of a test by its folder."""
    monkeypatch.setenv("FOLDER_OF_THE_TEST", str(tmp_path))


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    with FakeEndpoint() as endpoint:
        yield endpoint


def test_rollouts_are_rewarded_and_fail_alone(tmp_path: Path, endpoint: FakeEndpoint) -> None:
    rows = [row(), row(expected="5"), row(expected=None), row(agent="other"), row(responses_note=1.5)]
    rows.append(row())
    rows[-1]["responses_create_params"]["metadata"] = {"extra_body": "["}
    right, wrong, broken, unknown, noted, unreadable = played(
        endpoint.url, section(tmp_path, should_log_nemo_gym_responses=True), rows
    )
    assert (right.reward, wrong.reward, right.answer) == (1.0, 0.0, "4")
    assert right.metadata["played"]["metrics"] == noted.metadata["played"]["metrics"] == {"calculator_calls": 0.0}
    assert broken.error is not None and "answered with status 500" in broken.error
    assert unknown.error is not None and "there are: calculator_agent" in unknown.error
    assert unreadable.error is not None and "extra_body" in unreadable.error
    assert endpoint.calls == {KEY: 4}
    assert processes_with(str(tmp_path)) == []
    texts = "".join(path.read_text() for path in (tmp_path / "logs").iterdir())
    assert len((tmp_path / "logs/results.jsonl").read_text().splitlines()) == 3
    assert KEY not in texts and '"reward": 1.0' in texts


def test_no_process_is_left_if_the_environment_is_killed(tmp_path: Path, endpoint: FakeEndpoint) -> None:
    code = (
        "import asyncio, sys, gym_parts as g\n"
        "from pathlib import Path\n"
        "async def main():\n"
        f"    environment = g.NemoGym(g.section(Path({str(tmp_path)!r})))\n"
        f"    await environment.step([[]], [g.metadata({endpoint.url!r}, g.row())])\n"
        "    print('played', flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parent, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"played\n"
    assert len(processes_with(str(tmp_path))) >= 5
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while processes_with(str(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_with(str(tmp_path)) == []


def test_servers_that_do_not_start_are_told_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('no such server'); sys.exit(3)"]
    results = played("http://127.0.0.1:9/v1", section(tmp_path, command=command), [row(), row()])
    for result in results:
        assert result.error is not None and "exited with status 3" in result.error and "no such server" in result.error
    assert (tmp_path / "logs/servers.log").read_text().count("no such server") == 1
    slow = section(tmp_path, command=[sys.executable, "-c", "import time; time.sleep(60)"], start_timeout_s=1.0)
    (result,) = played("http://127.0.0.1:9/v1", slow, [row()])
    assert result.error is not None and "start_timeout_s has passed" in result.error
    assert processes_with(str(tmp_path)) == []


def test_servers_that_have_ended_are_started_again(tmp_path: Path, endpoint: FakeEndpoint) -> None:
    async def play() -> list[Any]:
        environment = NemoGym(section(tmp_path))
        found = [await environment.step([[]], [metadata(endpoint.url, row())])]
        head = min(set(processes_with("+policy_base_url")) & set(processes_with(f"[{tmp_path}")))
        os.kill(head, signal.SIGKILL)
        await asyncio.sleep(2)
        found.append(await environment.step([[]], [metadata(endpoint.url, row())]))
        await environment.shutdown()
        return found

    assert [result.errors for result in asyncio.run(play())] == [[None], [None]]


def test_servers_whose_guard_was_killed_are_ended_and_started_again(tmp_path: Path, endpoint: FakeEndpoint) -> None:
    async def play() -> tuple[list[Any], set[int], set[int]]:
        environment = NemoGym(section(tmp_path))
        found = [await environment.step([[]], [metadata(endpoint.url, row())])]
        servers = set(processes_with("calculator_servers.py")) & set(processes_with(str(tmp_path)))
        mine = f"\0{os.getpid()}\0".encode()  # a guard is told the process that started it
        guards = processes_with("programs/guard.py")
        (guard,) = (pid for pid in guards if Path(f"/proc/{pid}/cmdline").read_bytes().endswith(mine))
        os.kill(guard, signal.SIGKILL)
        await asyncio.sleep(1)
        found.append(await environment.step([[]], [metadata(endpoint.url, row())]))
        after = set(processes_with("calculator_servers.py")) & set(processes_with(str(tmp_path)))
        await environment.shutdown()
        return found, servers, after

    found, before, after = asyncio.run(play())
    assert [result.errors for result in found] == [[None], [None]]
    assert len(before) >= 4 and len(after) == len(before) and not before & after
    assert processes_with(str(tmp_path)) == []


def test_servers_that_end_too_often_are_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = GymServers(NemoGymConfig.of(section(tmp_path)))
    times = iter([0.0, 3000.0, 3500.0, 4000.0, 4100.0])
    monkeypatch.setattr("nemo_rl.agents.nemo_gym.servers.time.monotonic", lambda: next(times))
    for _ in range(4):  # the fourth is more than an hour after the first
        servers._count_restart()
    with pytest.raises(AgentError, match="ended 4 times in an hour"):
        servers._count_restart()


def test_the_log_of_servers_is_private_and_its_end_has_no_keys(tmp_path: Path) -> None:
    code = f"import sys; print('x' * 9000, 'Bearer {KEY}', 'y' * 1950); sys.exit(3)"
    (result,) = played("http://127.0.0.1:9/v1", section(tmp_path, command=[sys.executable, "-c", code]), [row()])
    log = tmp_path / "logs/servers.log"
    assert KEY in log.read_text() and log.stat().st_mode & 0o777 == 0o600
    assert result.error is not None and "secret" not in result.error and "yyy" in result.error
    assert len(result.error) < 2500


def test_servers_with_another_head_are_refused(tmp_path: Path, endpoint: FakeEndpoint) -> None:
    code = (
        "import json, sys, http.server as h\n"
        "class Head(h.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200); self.end_headers()\n"
        "        self.wfile.write(json.dumps('policy_base_url: http://old/v1').encode())\n"
        "h.HTTPServer(('127.0.0.1', int(sys.argv[1])), Head).serve_forever()\n"
    )
    port = _free_port()
    given = section(tmp_path, command=[sys.executable, "-c", code, str(port)], head_server={"port": port})
    (result,) = played(endpoint.url, given, [row()])
    assert result.error is not None and "call the model at 'http://old/v1'" in result.error


def test_servers_that_run_already_are_found(tmp_path: Path, endpoint: FakeEndpoint) -> None:
    cfg = NemoGymConfig.of(section(tmp_path))
    port = _free_port()
    (tmp_path / "head.yaml").write_text(f"head_server: {{host: 127.0.0.1, port: {port}}}")
    arguments = overrides([*cfg.config_paths, str(tmp_path / "head.yaml")], endpoint.url, "policy")
    command = [sys.executable, str(EXAMPLE / "calculator_servers.py"), *arguments]
    servers = subprocess.Popen(command, start_new_session=True)
    try:
        given = section(tmp_path, config_paths=[], head_server={"port": port})
        (result,) = played(endpoint.url, given, [row()])
        assert result.reward == 1.0
        (other,) = played("http://127.0.0.1:9/v1", given, [row()])
        assert other.error is not None and f"call the model at '{endpoint.url}'" in other.error
        assert servers.poll() is None
    finally:
        os.killpg(servers.pid, signal.SIGTERM)
        servers.wait(10)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_a_missing_program_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'no_such_run', which is not in .*/bin and PATH. Install NeMo Gym"):
        NemoGym(section(tmp_path, command=["no_such_run"], uv_venv_dir=str(tmp_path)))
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/ng_run"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    given = {"config_paths": ["a.yaml"], "uv_venv_dir": str(tmp_path)}
    assert find_program(NemoGymConfig.of(given)) == str(program)


def test_further_keys_are_passed_to_the_servers() -> None:
    given = NemoGymConfig.of(
        {"port_range_low": 5000, "uv_cache_dir": "/c", "judge": {"a": [1]}, "servers": {"other": 2}, "timeout_s": 5}
    )
    head = {"head_server": {"host": "h", "port": 1}}
    assert added_config(given, "h", 1) == {
        "judge": {"a": [1]},
        "other": 2,
        "port_range_low": 5000,
        "uv_cache_dir": "/c",
        **head,
    }
    assert overrides(["a b.yaml", "/x/c.yaml"], "http://h:1/v1", "policy") == [
        '+config_paths=["a b.yaml",/x/c.yaml]',
        "+policy_base_url=http://h:1/v1",
        "+policy_api_key=nemo_rl",
        "+policy_model_name=policy",
    ]


def test_a_result_is_read() -> None:
    output = [
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        {"type": "function_call", "name": "f"},
    ]
    result = {"reward": 0.5, "id": 7, "steps": 3, "ok": True, "nan": float("nan"), "response": {"output": output}}
    read = read_rollout({**result, "reward_components": {"a": 0.2, "b": 0.3}}, {"id": 7})
    components = {"reward_components/a": 0.2, "reward_components/b": 0.3}
    assert (read.reward, read.answer, read.metrics) == (0.5, "so", {"steps": 3.0, "ok": 1.0, **components})
    assert extract_reward_components({}) is None


@pytest.mark.parametrize(
    "value", [[], "x", {}, {"reward": None}, {"reward": "1"}, {"reward": float("nan")}, {"reward": float("inf")}]
)
def test_a_result_without_a_reward_is_an_error(value: Any) -> None:
    with pytest.raises(ValueError, match="it is a|no reward|reward="):
        read_rollout(value, {})
