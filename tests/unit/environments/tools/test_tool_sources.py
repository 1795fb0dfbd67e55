"""Tools run in this process, in processes of their own and in servers; what they do costs at most their own call."""

import asyncio
import os
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.config.schema.kits import ToolEnvironmentConfig
from nemo_rl.kits.tools.toolbox import Episode, Toolbox, make_toolbox
from nemo_rl.utils.errors import ConfigError

HERE = Path(__file__).parent
SERVER = [sys.executable, str(HERE / "mcp_server_for_tests.py")]


def toolbox(*entries: dict[str, Any], **keys: Any) -> Toolbox:
    return make_toolbox(ToolEnvironmentConfig.build(tools=list(entries), **keys))


async def called(episode: Episode, tool: str, /, **arguments: Any) -> tuple[str, str | None]:
    output = await episode.tools_of(tool).call(tool, arguments)
    return output.text, output.fault


def run[T](coroutine: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        async with asyncio.timeout(100):
            return await coroutine

    return asyncio.run(limited())


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"


def wait_until_dead(pid: int) -> None:
    deadline = time.monotonic() + 20
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is alive"
        time.sleep(0.05)


@pytest.mark.fast
def test_each_episode_has_its_own_state_unless_it_is_shared(tmp_path: Path) -> None:
    async def play(shared: bool) -> list[str]:
        tools = toolbox({"name": "tools_for_tests.Counter", "kwargs": {"start": 10}, "shared": shared})
        one, two = await tools.open({"path": str(tmp_path / "one")}), await tools.open({"path": str(tmp_path / "two")})
        texts = [(await called(episode, "add", amount=n))[0] for episode, n in ((one, 1), (two, 2), (one, 3))]
        await one.close()
        await two.close()
        await tools.shutdown()
        return texts

    assert run(play(shared=False)) == ["11", "12", "14"]
    assert [(tmp_path / name).read_text(encoding="utf-8") for name in ("one", "two")] == ["14", "12"]
    assert run(play(shared=True)) == ["11", "13", "16"]


HARMLESS = {
    "raise_error": ("Error: RuntimeError: broken", "error"),
    "hang": ("gave no answer in 1 s", "timeout"),
    "not_a_number": ("NaN", None),
    "surrogate": ("a?b", None),
    "much": ("x" * 64 + "\n[cut: 99999936 more characters]", None),
}


@pytest.mark.parametrize("isolate", [False, True])
def test_a_hostile_tool_costs_its_own_call(isolate: bool) -> None:
    async def play() -> None:
        tools = toolbox(
            {"name": "tools_for_tests.Hostile", "isolate": isolate},
            {"name": "calculator"},
            timeout_s=1.0 if not isolate else 5.0,
            max_output_bytes=64,
        )
        for name, (text, fault) in HARMLESS.items():
            episode = await tools.open({})
            found, kind = await called(episode, name)
            assert kind == fault, (name, found)
            assert text.replace("1 s", "5 s" if isolate else "1 s") in found, (name, found)
            assert await called(episode, "calculator", expression="6*7") == ("42", None)
            await episode.close()

    run(play())


def test_an_isolated_tool_may_die_print_and_fork_and_leaves_no_process() -> None:
    async def play() -> list[int]:
        tools = toolbox({"name": "tools_for_tests.Hostile", "isolate": True}, timeout_s=20.0)
        episode = await tools.open({})
        assert await called(episode, "print_much") == ("printed", None)
        left, fault = await called(episode, "fork")
        assert fault is None
        text, fault = await called(episode, "fill_memory")
        assert "MemoryError" in text
        text, fault = await called(episode, "exit")
        assert (fault, "its process died" in text) == ("error", True), text
        text, fault = await called(episode, "die")
        assert (fault, "its process has ended" in text) == ("error", True), text
        await episode.close()
        again = await tools.open({})
        text, fault = await called(again, "die")
        assert (fault, "its process died. Its state is lost." in text) == ("error", True), text
        await again.close()
        return [int(left)]

    for pid in run(play()):
        wait_until_dead(pid)


@pytest.mark.fast
def test_calls_run_at_the_same_time_and_a_slow_one_ends_at_its_deadline() -> None:
    async def play() -> float:
        tools = toolbox({"name": "tools_for_tests.wait", "timeout_s": 0.5})
        episode = await tools.open({})
        started = time.monotonic()
        outputs = await asyncio.gather(*(called(episode, "wait", seconds=s) for s in (0.2, 0.2, 0.2, 60)))
        assert [fault for _, fault in outputs] == [None, None, None, "timeout"]
        return time.monotonic() - started

    assert run(play()) < 5


def test_a_server_has_state_for_each_episode_and_is_stopped() -> None:
    async def play() -> list[int]:
        entry = {"name": "mcp", "command": SERVER, "kwargs": {"TOOL_COLOUR": "green"}}
        tools = await asyncio.to_thread(toolbox, entry, timeout_s=20.0, max_output_bytes=1000)
        assert tools.specs["note"].schema["function"]["parameters"]["required"] == ["text"]
        one, two = await tools.open({}), await tools.open({})
        assert await called(one, "note", text="a") == ("a", None)
        assert await called(one, "note", text="b") == ("a,b", None)
        assert await called(two, "note", text="c") == ("c", None)
        colour, pid = (await called(two, "variable", name="TOOL_COLOUR"))[0].split()
        assert colour == "green"
        text, fault = await called(two, "fail")
        assert (fault, "fail" in text) == ("error", True), text
        text, fault = await called(two, "note")
        assert fault == "error", text
        text, fault = await called(two, "much")
        assert text.endswith("[cut: 999000 more characters]")
        text, fault = await called(one, "die")
        assert fault is not None
        await one.close()
        await two.close()
        return [int(pid)]

    for pid in run(play()):
        wait_until_dead(pid)


def test_a_shared_server_serves_all_episodes_and_a_call_that_hangs_ends() -> None:
    async def play() -> int:
        entry = {"name": "mcp", "command": SERVER, "shared": True}
        tools = await asyncio.to_thread(toolbox, entry, timeout_s=3.0)
        one, two = await tools.open({}), await tools.open({})
        await called(one, "note", text="a")
        assert await called(two, "note", text="b") == ("a,b", None)
        pid = int((await called(one, "variable", name="X"))[0])
        text, fault = await called(one, "hang")
        assert (fault, "gave no answer in 3 s" in text) == ("timeout", True), text
        await one.close()
        await two.close()
        assert is_alive(pid)
        await tools.shutdown()
        return pid

    wait_until_dead(run(play()))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        ([{"name": "calculator"}, {"name": "calculator"}], "two tools named 'calculator'"),
        ([{"name": "mcp"}], "env.tools.tools.0.command is missing"),
        ([{"name": "mcp", "command": ["true"]}], "cannot be started"),
        ([{"name": "calculator", "command": ["true"]}], "belongs to name=mcp"),
        ([{"name": "calculator", "isolate": True, "shared": True}], "shared=true cannot be set"),
    ],
)
def test_entries_that_cannot_be_used_are_refused(entries: list[dict[str, Any]], complaint: str) -> None:
    with pytest.raises(ConfigError, match="env.tools.tools|MCP server") as caught:
        toolbox(*entries)
    assert complaint in str(caught.value)


def test_a_class_that_cannot_open_fails_its_episode_and_leaves_nothing() -> None:
    async def play() -> None:
        tools = toolbox({"name": "tools_for_tests.Counter", "isolate": True}, {"name": "tools_for_tests.Counter2"})
        with pytest.raises(ValueError, match="not today"):
            await tools.open({})

    before = set(os.listdir("/proc"))
    run(play())
    children = [pid for pid in set(os.listdir("/proc")) - before if pid.isdigit() and is_child(int(pid))]
    assert children == []


def is_child(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1] == str(os.getpid())
    except OSError:
        return False
