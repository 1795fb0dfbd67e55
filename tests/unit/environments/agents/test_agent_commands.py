"""Commands as agent programs, without a sandbox and in one: rewards, failures, and what they leave."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_steps import KEY, agent, played, processes_with
from fake_endpoint import FakeEndpoint

from nemo_rl.agents.programs import commands
from nemo_rl.agents.programs.environment import AgentEnvironment
from nemo_rl.sandbox import why_unavailable
from nemo_rl.sandbox.mechanisms import IN_ORDER

NO_NAMESPACES = all(why_unavailable(one) for one in IN_ORDER if one.has_own_files)
IN_A_SANDBOX = pytest.param("auto", marks=pytest.mark.skipif(NO_NAMESPACES, reason="no namespaces here"))
UNREADABLE = "reward.json of the program is no regular file"
NOWHERE = "http://127.0.0.1:65009/v1"
BEGIN = """
import json, os, signal, subprocess, sys, time, urllib.request
task = json.load(open(os.environ["NEMO_RL_TASK_FILE"]))
def call(url=task["base_url"]):
    body = json.dumps({"model": task["model"], "messages": task["messages"]}).encode()
    headers = {"Authorization": "Bearer " + task["api_key"]}
    request = urllib.request.Request(url + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
def result(value):
    with open(os.environ["NEMO_RL_REWARD_FILE"], "w") as file:
        file.write(value if isinstance(value, str) else json.dumps(value))
"""
FORKS = """
for _ in range(3):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)", MARK], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.close(1); os.close(2)
        time.sleep(100)
    os._exit(0)
"""


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    with FakeEndpoint() as endpoint:
        yield endpoint


@pytest.fixture(params=["none", IN_A_SANDBOX])
def sandbox(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Give each way to run a command, and check that it leaves no folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield request.param
    assert not list(tmp_path.iterdir())


@pytest.fixture
def other() -> Iterator[FakeEndpoint]:
    with FakeEndpoint() as endpoint:
        yield endpoint


def command(code: str, sandbox: str, **keys: Any) -> dict[str, Any]:
    return {"command": ["python", "-c", BEGIN + code], "sandbox": sandbox, **keys}


def test_a_command_calls_the_model_and_writes_the_reward(sandbox: str, endpoint: FakeEndpoint) -> None:
    code = "result({'reward': call() == '4', 'metrics': {'turns': 1}, 'call_rewards': {'a': 1}}); print('the end')"
    results = played(endpoint.url, command(code, sandbox), [{"ground_truth": "4"}] * 3)
    for result in results:
        assert (result.reward, result.answer, result.metadata["call_rewards"]) == (1.0, "the end", {"a": 1.0})
    assert endpoint.calls == {KEY: 3}


def test_the_client_of_openai_works_unchanged(sandbox: str, endpoint: FakeEndpoint) -> None:
    pytest.importorskip("openai")
    code = """
import openai
answer = openai.OpenAI().chat.completions.create(model=task["model"], messages=task["messages"])
result(float(answer.choices[0].message.content))
"""
    (result,) = played(endpoint.url, command(code, sandbox))
    assert result.reward == 4.0, result.error


def test_its_output_is_graded(sandbox: str, endpoint: FakeEndpoint) -> None:
    section = command(r"print('thinking'); print(f'\\boxed{{{call()}}}')", sandbox)
    section["grader"] = {"name": "math", "kwargs": {"num_workers": 1}}
    right, wrong = played(endpoint.url, section, [{"ground_truth": "4"}, {"ground_truth": "5"}])
    assert (right.reward, wrong.reward) == (1.0, 0.0)


@pytest.mark.parametrize(("fields", "seen"), [(None, ""), (["id"], "id")])
def test_it_sees_no_field_of_the_row_that_is_not_named(fields: Any, seen: str, sandbox: str) -> None:
    code = "result(1); print(','.join(task['row']), task['seed'], *task['messages'][0].values(), os.environ['OWN'])"
    section = command(code, sandbox, row_fields=fields, environment={"OWN": "mine"})
    (result,) = played(NOWHERE, section, [{"ground_truth": "4", "id": 1}])
    assert result.answer == f"{seen} 7 user 4 mine".strip()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            "raise LookupError('no luck with ' + task['api_key'])",
            "exited with status 1: ",
        ),
        ("sys.stderr.write('oh no'); sys.exit(3)", "exited with status 3: oh no"),
        ("sys.exit(3)", "exited with status 3: it wrote nothing"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by signal 9"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was ended by signal 11"),
        ("time.sleep(100)", "gave no result in 2 s"),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass", "gave no result in 2 s"),
        ("while True: print('x' * 1000000)", "wrote more than 100000 bytes"),
        ("while True: sys.stderr.write('x' * 1000000)", "wrote more than 100000 bytes"),
        ("pass", "returned no reward"),
        ("print('0.5')", "returned no reward"),
        ("result('{')", "no result into reward.json"),
        ("result('NaN')", "reward=nan, which is not finite"),
        ("result('[1]')", "reward=[1], which is no number"),
        ("result({'reward': None})", "returned no reward"),
        ("os.symlink('/etc/hostname', os.environ['NEMO_RL_REWARD_FILE']); print(1)", UNREADABLE),
        ("os.mkfifo(os.environ['NEMO_RL_REWARD_FILE']); print(1)", UNREADABLE),
        ("os.mkdir(os.environ['NEMO_RL_REWARD_FILE']); print(1)", UNREADABLE),
        ("result(' ' * 2000000 + '1'); print(1)", UNREADABLE),
    ],
)
def test_a_failure_is_the_error_of_its_sample(code: str, reason: str, sandbox: str) -> None:
    started, mark = time.monotonic(), f"mark-{uuid.uuid4()}"
    section = command(code, sandbox, timeout_s=2, output_bytes=100000, environment={"MARK": mark})
    (result,) = played(NOWHERE, section)
    assert reason in result.error
    assert time.monotonic() - started < 15 and not processes_with(mark)


def test_the_size_of_the_reward_file_is_not_that_of_the_output(sandbox: str) -> None:
    (result,) = played(NOWHERE, command("result(' ' * 1000000 + '1')", sandbox, output_bytes=100))
    assert result.reward == 1.0, result.error


def test_a_signal_to_the_process_group_ends_only_the_program() -> None:
    (result,) = played(NOWHERE, {"command": ["sh", "-c", "echo before; kill -9 0"], "sandbox": "none"})
    assert result.error == "the program was ended by signal 9: before"


@pytest.mark.parametrize("end", ["KILL", "STOP"])
def test_a_program_that_kills_its_guard_is_ended(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(commands, "_END_DEADLINE_S", 1.0)
    mark, slowest = f"mark-{uuid.uuid4()}", 0.0

    async def play() -> Any:
        nonlocal slowest
        run = f"kill -{end} $PPID; (sleep 33.5; echo {mark}) & env -i sleep 33.5; echo {mark}"
        environment = AgentEnvironment({"command": ["sh", "-c", run], "sandbox": "none", "timeout_s": 1})
        step = asyncio.ensure_future(environment.step([[]], [{"agent": agent(NOWHERE)}]))
        while not step.done():
            before = time.monotonic()
            await asyncio.sleep(0.01)
            slowest = max(slowest, time.monotonic() - before)
        return await step

    started = time.monotonic()
    assert "gave no result in 1 s" in asyncio.run(play()).errors[0]
    assert time.monotonic() - started < 15 and slowest < 1
    assert not processes_with(mark) and not processes_with("sleep\x0033.5") and not list(tmp_path.iterdir())


def test_the_status_of_a_killed_guard_is_a_signal() -> None:
    (result,) = played(NOWHERE, {"command": ["sh", "-c", "kill -9 $PPID"], "sandbox": "none"})
    assert "was ended by signal 9" in result.error


@pytest.mark.parametrize("end", ["result(1)", "time.sleep(100)", "sys.exit(3)"])
def test_no_process_is_left(end: str, sandbox: str) -> None:
    mark = f"mark-{uuid.uuid4()}"
    section = command(f"MARK = {mark!r}\n{FORKS}\n{end}", sandbox, timeout_s=3, environment={"MARK": mark})
    (result,) = played(NOWHERE, section)
    assert (result.reward == 1.0) == (end == "result(1)"), result.error
    assert not processes_with(mark)


def test_a_cancelled_step_ends_its_program(sandbox: str) -> None:
    mark = f"mark-{uuid.uuid4()}"

    async def cancel() -> None:
        environment = AgentEnvironment(command("time.sleep(100)", sandbox, environment={"MARK": mark}))
        step = asyncio.ensure_future(environment.step([[]], [{"agent": agent(NOWHERE)}]))
        await _until(lambda: processes_with(mark))
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        await _until(lambda: not processes_with(mark))
        await environment.shutdown()

    asyncio.run(cancel())


def test_a_program_ends_with_the_process_of_the_environment(tmp_path: Path) -> None:
    mark = f"mark-{uuid.uuid4()}"
    code = f"""
import asyncio
from nemo_rl.agents.programs.commands import CommandProgram
from nemo_rl.agents.programs.interfaces import AgentTask
program = CommandProgram(["python", "-c", "import time; time.sleep(100)", {mark!r}], {{}}, 1000)
asyncio.run(program.run(AgentTask([], None, {{}}, "", "", "", 0, 100)))
"""
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=variables)
    try:
        asyncio.run(_until(lambda: [pid for pid in processes_with(mark) if pid != parent.pid]))
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    asyncio.run(_until(lambda: not processes_with(mark) and not list(tmp_path.iterdir())))


@pytest.mark.skipif(NO_NAMESPACES, reason="no namespaces here")
def test_a_sandboxed_command_reaches_only_the_endpoint(
    endpoint: FakeEndpoint, other: FakeEndpoint, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    tmp_path.chmod(0o777)
    os.environ["AGENT_TEST_SECRET"] = "secret"
    code = f"""
import socket
def tried(name, attempt):
    try:
        attempt()
        print("ESCAPED", name)
    except (OSError, KeyError):
        pass
tried("another port", lambda: call({other.url!r}))
for address in ("8.8.8.8", "10.0.0.1", "169.254.169.254"):
    tried(address, lambda: socket.create_connection((address, 53), 2))
for family in (socket.AF_UNIX, socket.AF_NETLINK, socket.AF_PACKET, socket.AF_VSOCK):
    tried(family, lambda: socket.socket(family, socket.SOCK_RAW if family != socket.AF_UNIX else socket.SOCK_STREAM))
tried("datagram", lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("8.8.8.8", 53)))
tried("file", lambda: open({str(secret)!r}))
tried("library", lambda: open({__file__!r}))
tried("variable", lambda: os.environ["AGENT_TEST_SECRET"])
tried("folder", lambda: os.listdir("/tmp"))
tried("processes", lambda: os.listdir("/proc/1"))
result(call() == "4")
"""
    (result,) = played(endpoint.url, command(code, "auto"))
    del os.environ["AGENT_TEST_SECRET"]
    assert result.reward == 1.0 and result.answer is None, (result.error, result.answer)
    assert not other.calls


@pytest.mark.skipif(NO_NAMESPACES, reason="no namespaces here")
def test_a_sandboxed_command_sees_what_is_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("agent")
    folder.chmod(0o755)
    (folder / "data.json").write_text("0.5")
    link = folder.with_name("link-to-agent")
    link.symlink_to(folder)
    (result,) = played(NOWHERE, command(f"result(json.load(open('{link}/data.json')))", "auto", readable=[str(link)]))
    link.unlink()
    assert result.reward == 0.5, result.error


@pytest.mark.skipif(NO_NAMESPACES, reason="no namespaces here")
def test_the_python_of_a_script_may_be_a_link_to_a_link(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("links")
    folder.chmod(0o755)
    environment, between = folder / "environment", folder / "between"
    for place in (environment, between):
        place.mkdir(mode=0o755)
    (between / "python").symlink_to(os.path.realpath(sys.executable))
    (environment / "python").symlink_to(between / "python")
    script = environment / "script"
    script.write_text(f"#!{environment}/python -IS\nopen('reward.json', 'w').write('1')\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "prefix", str(environment))
    monkeypatch.setattr(sys, "executable", str(environment / "python"))
    (result,) = played(NOWHERE, {"command": [str(script)]})
    assert result.reward == 1.0, result.error


@pytest.mark.skipif(NO_NAMESPACES, reason="no namespaces here")
def test_a_large_answer_and_many_connections_pass_the_relay(endpoint: FakeEndpoint) -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
task["messages"] = [{"role": "user", "content": "x" * 1000000}]
with ThreadPoolExecutor(16) as threads:
    texts = list(threads.map(lambda _: call(), range(32)))
result(all(text == "x" * 1000000 for text in texts))
"""
    (result,) = played(endpoint.url, command(code, "auto"))
    assert result.reward == 1.0 and endpoint.calls == {KEY: 32}, result.error


@pytest.mark.skipif(NO_NAMESPACES, reason="no namespaces here")
def test_limits_of_a_sandboxed_command() -> None:
    cases = {
        "x = bytearray(300 << 20)": "MemoryError",
        "open('big', 'wb').write(bytes(3 << 20))": "File too large",
    }
    for code, reason in cases.items():
        section = command(code, "auto", memory_mb=256, file_mb=1)
        (result,) = played(NOWHERE, section)
        assert reason in result.error, result.error


async def _until(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def test_the_task_is_json_of_its_fields(sandbox: str) -> None:
    code = "result(1); print(json.dumps({key: task[key] for key in sorted(task)}), os.environ['ANTHROPIC_BASE_URL'])"
    (result,) = played(NOWHERE, command(code, sandbox, row_fields=["id"]), [{"id": 3}])
    text, _, base = result.answer.rpartition(" ")
    assert base == NOWHERE.removesuffix("/v1")
    given = {"messages": [{"role": "user", "content": "4"}], "tools": None, "row": {"id": 3}, "seed": 7}
    assert json.loads(text) == given | {"base_url": NOWHERE, "api_key": "***", "model": "policy", "timeout_s": 300.0}


@pytest.mark.skipif(NO_NAMESPACES, reason="no namespaces here")
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="gives up a right of root")
def test_a_machine_without_the_right_to_start_a_network_is_refused() -> None:
    code = """
from nemo_rl.config.schema.agents import AgentEnvironmentConfig
from nemo_rl.agents.programs.sandboxed import SandboxedCommand
SandboxedCommand(AgentEnvironmentConfig.build(command=["python"], sandbox="landlock"))
"""
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    limited = ["setpriv", "--bounding-set", "-net_admin", sys.executable, "-c", code]
    done = subprocess.run(limited, env=variables, capture_output=True, text=True, timeout=60)
    assert "ConfigError: " in done.stderr and "set env.agent.sandbox=none" in done.stderr, done.stderr
