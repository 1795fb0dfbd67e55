"""Run tools in separate processes, so that a tool may hang, die, or use all its memory.

    environment ── one JSON line for each call ──► `tool_process`: the object of one episode
                ◄── one JSON line, of limited length ──

Invariant: a process that misses a deadline is killed with everything it started, and no process outlives its episode.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from nemo_rl.host.processes import import_path
from nemo_rl.kits.tools.found import FoundTools
from nemo_rl.kits.tools.interfaces import OpenTools, ToolOutput, ToolSource
from nemo_rl.kits.tools.outputs import OutputLimits

_START_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 1.0
_POLL_S = 0.02
_ESCAPES = 6
"""Largest number of bytes of JSON for one byte of text."""


class IsolatedTools(ToolSource):
    """A function or class that runs in one process for each episode.

    Args:
        found: the function or class.
        name: name under which the process finds the function or class.
        timeout_s: deadline of a call in seconds.
        limits: limits on an output.
        memory_limit_mb: limit of the address space in MB, in addition to what the imports use.
    """

    def __init__(
        self, found: FoundTools, name: str, *, timeout_s: float, limits: OutputLimits, memory_limit_mb: int
    ) -> None:
        self.specs = found.specs
        self._has_state = found.has_state
        self._arguments = {
            "name": name,
            "kwargs": dict(found.kwargs),
            "limits": asdict(limits),
            "memory_limit_mb": memory_limit_mb,
        }
        self._timeout_s = timeout_s

    async def open(self, metadata: Any) -> OpenTools:
        """Open the tools (`ToolSource.open`). A function's process starts with its first call.

        Raises:
            ToolProcessError: the process did not start, or the class raised.
        """
        tools = _OpenIsolated({**self._arguments, "metadata": metadata}, self._timeout_s, self._has_state)
        if self._has_state:
            try:
                await tools.start()
            except ToolProcessError:
                await tools.close()
                raise
        return tools


class ToolProcessError(RuntimeError):
    """Raised if the process of a tool did not start, died, or gave no answer in time."""


class _OpenIsolated(OpenTools):
    def __init__(self, arguments: Mapping[str, Any], timeout_s: float, has_state: bool) -> None:
        self._arguments = arguments
        self._timeout_s = timeout_s
        self._has_state = has_state
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Start the process and construct the object in it."""
        python_path, folders = import_path()
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "nemo_rl.kits.tools.tool_process"),
            *(str(os.getpid()), *folders),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            limit=_line_limit(OutputLimits(**self._arguments["limits"])),
        )
        greeting = await self._ask(dict(self._arguments), _START_TIMEOUT_S)
        if "error" in greeting:
            raise ToolProcessError(greeting["error"])

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolOutput:
        """Call a tool (`OpenTools.call`). Calls of one episode run one after another."""
        request = {"tool": name, "arguments": arguments}
        async with self._turn:
            try:
                async with asyncio.timeout(self._timeout_s + _START_TIMEOUT_S):
                    if self._process is None and not self._has_state:
                        await self.start()
                    reply = await self._ask(request, self._timeout_s)
            except (ToolProcessError, TimeoutError) as error:
                await self._kill()
                lost = " Its state is lost." if self._has_state else ""
                return ToolOutput(f"Error: {name}: {error}{lost}", "timeout" if _is_late(error) else "error")
        if "error" in reply:
            return ToolOutput(reply["error"], "error")
        return ToolOutput(reply["output"], parts=reply["parts"])

    async def close(self) -> None:
        """Give the object one second to close itself, and then kill the process and all processes that it started."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await _ended(self._process, _CLOSE_TIMEOUT_S)
        await self._kill()

    async def _ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        if self._process is None or self._process.stdin is None or self._process.stdout is None:
            raise ToolProcessError("its process has ended.")
        try:
            async with asyncio.timeout(timeout_s):
                self._process.stdin.write(json.dumps(request, default=str).encode() + b"\n")
                await self._process.stdin.drain()
                line = await self._line(self._process, self._process.stdout)
        except TimeoutError as error:
            raise ToolProcessError(f"gave no answer in {timeout_s:g} s.") from error
        except (OSError, ValueError) as error:
            raise ToolProcessError(f"its process wrote something else than an answer ({error}).") from error
        if not line.endswith(b"\n"):
            raise ToolProcessError("its process died.")
        reply: dict[str, Any] = json.loads(line)
        return reply

    async def _line(self, process: asyncio.subprocess.Process, answers: asyncio.StreamReader) -> bytes:
        """Read a line, or return b"" if the process ends first, even if one of its children keeps the pipe open."""
        reading = asyncio.ensure_future(answers.readline())
        ending = asyncio.ensure_future(_ended(process))
        try:
            await asyncio.wait([reading, ending], return_when=asyncio.FIRST_COMPLETED)
            return reading.result() if reading.done() else b""
        finally:
            reading.cancel()
            ending.cancel()

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await _ended(process, _CLOSE_TIMEOUT_S)
        if process.stdin is not None:
            process.stdin.close()


async def _ended(process: asyncio.subprocess.Process, timeout_s: float = float("inf")) -> None:
    """Wait until a process has ended. Unlike `Process.wait`, do not wait until its pipes are closed."""
    deadline = time.monotonic() + timeout_s
    while process.returncode is None and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)


def _line_limit(limits: OutputLimits) -> int:
    """Return the largest length of an answer, which has the texts twice, and images as base64."""
    return 2 * _ESCAPES * limits.max_bytes + 2 * limits.max_image_bytes + 65536


def _is_late(error: BaseException) -> bool:
    return isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError)
