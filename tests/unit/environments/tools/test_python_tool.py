"""The tool python runs programs in the real sandbox: outputs, state, limits, order and what it leaves."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_tool_sources import called, run, toolbox

from nemo_rl.sandbox import why_unavailable
from nemo_rl.sandbox.mechanisms import IN_ORDER, Mechanism
from nemo_rl.utils.errors import ConfigError, SandboxError

pytestmark = pytest.mark.skipif(all(why_unavailable(one) for one in IN_ORDER), reason="no sandbox works here")

TIMEOUT_S = 2.0


def python(**kwargs: Any) -> dict[str, Any]:
    return {"name": "python", "timeout_s": TIMEOUT_S, "kwargs": {"memory_mb": 256, **kwargs}}


def played(*codes: str, max_output_bytes: int = 8192, **kwargs: Any) -> list[tuple[str, str | None]]:
    """Run programs one after another in one episode."""

    async def play() -> list[tuple[str, str | None]]:
        tools = toolbox(python(**kwargs), max_output_bytes=max_output_bytes)
        episode = await tools.open(None)
        outputs = [await called(episode, "python", code=code) for code in codes]
        await episode.close()
        await tools.shutdown()
        return outputs

    return run(play())


@pytest.mark.parametrize(
    ("code", "output", "fault"),
    [
        ("print('a')\n6 * 7", "a\n42", None),
        ("x = 1", "[no output]", None),
        ("import sys; print('out'); print('err', file=sys.stderr)", "out\nerr", None),
        ("print('before')\nexit()\nprint('after')", "before", None),
        ("raise SystemExit('why')", "why", None),
        ("import os; os._exit(0)", "[no output]", "error"),
        ("if __name__ == '__main__':\n    print('main')", "main", None),
        ("open('note', 'w').write('12'); open('note').read()", "'12'", None),
    ],
)
def test_output_is_what_the_program_prints_and_its_last_value(code: str, output: str, fault: str | None) -> None:
    assert played(code) == [(output, fault)]


def test_an_exception_and_a_mistake_of_syntax_are_told() -> None:
    raised, unreadable, asked = played("def f():\n    return 1 / 0\n\nf()", "print(", "input()")
    assert "line 4, in <module>" in raised[0] and "ZeroDivisionError" in raised[0] and raised[1] == "error"
    assert "SyntaxError" in unreadable[0] and unreadable[1] == "error"
    assert "EOFError" in asked[0]
    assert "session" not in raised[0] + unreadable[0]  # nothing of the library's own frames


def test_both_ends_of_a_long_output_are_kept() -> None:
    ((text, fault),) = played("print('ä' * 1000 + 'b' * 1000)\nraise ValueError('end')", max_output_bytes=100)
    assert text.startswith("ä" * 25 + "\n[cut: ") and text.endswith("ValueError: end") and fault == "error"
    assert len(text.encode()) < 140


def test_each_program_is_alone_unless_it_is_stateful() -> None:
    codes = ("n = 20\nprint('once')", "n += 22\nopen('file', 'w').write(str(n))", "print(n, open('file').read())")
    assert [text.splitlines()[-1] for text, _ in played(*codes)] == [
        "once",
        "NameError: name 'n' is not defined",
        "NameError: name 'n' is not defined",
    ]
    assert played(*codes, stateful=True) == [("once", None), ("2", None), ("42 42", None)]


def test_programs_that_did_not_come_to_their_end_are_forgotten() -> None:
    outputs = played(
        "n = 1",
        "n = 2\nwhile True: pass",
        "import os; n = 3; os._exit(0)",
        "n = 4\nimport os; os.kill(os.getpid(), 9)",
        "n += 1\nraise ValueError",
        "import os; n += 1; os.system('echo from a child'); os.write(1, b'below Python'); exit()",
        "print(n)",
        stateful=True,
    )
    assert [fault for _, fault in outputs] == [None, "timeout", "error", "error", "error", None, None]
    assert outputs[-1][0] == "3"  # of earlier programs only the variables are seen again


def test_an_episode_sees_nothing_of_another_and_its_calls_run_in_order() -> None:
    async def play() -> list[Any]:
        tools = toolbox(python(stateful=True, num_workers=4))
        one, two = await tools.open(None), await tools.open(None)
        appended = [called(one, "python", code=f"values = [*globals().get('values', []), {n}]") for n in range(4)]
        await asyncio.gather(*appended, called(two, "python", code="values = 'other'"))
        outputs = await asyncio.gather(*(called(each, "python", code="print(values)") for each in (one, two)))
        await tools.shutdown()
        return outputs

    assert run(play()) == [("[0, 1, 2, 3]", None), ("other", None)]


HOSTILE = {
    "loop": ("while True: pass", "timeout", "beyond the limit of"),
    "sleep": ("import time; time.sleep(3600)", "timeout", "beyond the limit of wall time"),
    "1 GB of output": ("for _ in range(1024): print('x' * 2**20)", "error", "beyond the limit of output"),
    "memory": ("x = bytearray(64 * 2**30)", "error", "MemoryError"),
    "kill": ("import os; os.kill(os.getpid(), 9)", "error", "ended by signal 9"),
    "fork bomb": (
        "import os, time\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        time.sleep(60)",
        "timeout",
        "beyond the limit of",
    ),
    "daemon": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(3600)\n"
        "    os._exit(0)\nprint('gone')",
        None,
        "",
    ),
    "large file": ("open('file', 'wb').write(b'x' * 2**30)", "error", ""),
    "file outside": ("open('/tmp/nemo_rl_python_tool_escaped', 'w').write('x')", "error", ""),
    "network": ("import socket; socket.create_connection(('127.0.0.1', 80), 1)", "error", ""),
}
"""Program -> the fault of its call, None where it depends on the mechanism, and a part of what the model reads."""


@pytest.mark.parametrize("mechanism", IN_ORDER, ids=lambda one: f"{one.name}-{one.namespaces}")
def test_hostile_programs_cost_their_own_calls_and_leave_nothing(
    mechanism: Mechanism, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if reason := why_unavailable(mechanism):
        pytest.skip(reason)
    monkeypatch.setattr("nemo_rl.sandbox.sandbox.choose_mechanism", lambda _: mechanism)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def play() -> tuple[list[Any], Any]:
        tools = toolbox(python(num_workers=4))
        episodes = [await tools.open(None) for _ in [*HOSTILE, "honest"]]
        codes = [*(code for code, _, _ in HOSTILE.values()), "40 + 2"]
        calls = [called(each, "python", code=code) for each, code in zip(episodes, codes, strict=True)]
        *hostile, honest = await asyncio.gather(*calls)
        after = [await called(each, "python", code="'alive'") for each in episodes]
        await asyncio.gather(*(each.close() for each in episodes))
        await tools.shutdown()
        assert after == [("'alive'", None)] * len(episodes)
        return hostile, honest

    hostile, honest = run(play())
    assert honest == ("42", None)
    for (text, fault), (name, (_, expected, said)) in zip(hostile, HOSTILE.items(), strict=True):
        assert expected in (None, fault) and said in text, (name, text, fault)
        assert len(text.encode()) < 8300
    assert [child for child in psutil.Process().children(recursive=True) if _is_of_a_sandbox(child)] == []
    assert list(tmp_path.iterdir()) == []  # scratch folders of the mechanism without its own files
    assert not Path("/tmp/nemo_rl_python_tool_escaped").exists()


def test_no_more_programs_run_than_workers_and_waiting_costs_no_call() -> None:
    """Six programs of one second each with two workers take three rounds, longer than the limit of one call."""
    code = "import time\nstart = time.time()\ntime.sleep(1)\nprint(start, time.time())"

    async def play() -> list[tuple[float, float]]:
        tools = toolbox(python(num_workers=2))
        episode = await tools.open(None)
        texts = await asyncio.gather(*(called(episode, "python", code=code) for _ in range(6)))
        await tools.shutdown()
        assert [fault for _, fault in texts] == [None] * 6
        starts_and_ends = [text.split() for text, _ in texts]
        return [(float(start), float(end)) for start, end in starts_and_ends]

    spans = run(play())
    assert max(end for _, end in spans) - min(start for start, _ in spans) > TIMEOUT_S
    assert max(sum(start < end and other < start for other, end in spans) for start, _ in spans) <= 1


def test_a_call_that_is_cancelled_ends_its_program() -> None:
    async def play() -> float:
        tools = toolbox({"name": "python", "timeout_s": 60.0})
        episode = await tools.open(None)
        calling = asyncio.create_task(called(episode, "python", code="import time; time.sleep(3600)"))
        await asyncio.sleep(1.0)
        calling.cancel()
        started = time.monotonic()
        await episode.close()
        await tools.shutdown()
        return time.monotonic() - started

    assert run(play()) < 20
    assert [child for child in psutil.Process().children(recursive=True) if _is_of_a_sandbox(child)] == []


def test_wrong_keys_and_a_machine_without_sandbox_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"env.tools.tools.0.kwargs: .*memory: "):
        toolbox(python(memory=3))
    with pytest.raises(ConfigError, match="Remove isolate and shared"):
        toolbox({"name": "python", "isolate": True})
    monkeypatch.setenv("PATH", os.devnull)
    why_unavailable.cache_clear()
    try:
        with pytest.raises(SandboxError, match=r"never run without one.*\n.*bwrap is not installed"):
            toolbox(python(sandbox="bubblewrap"))
    finally:
        why_unavailable.cache_clear()


def _is_of_a_sandbox(process: psutil.Process) -> bool:
    try:
        return "sandbox" in " ".join(process.cmdline()) or "bwrap" in process.name()
    except psutil.Error:
        return False
