"""Call the tools of MCP servers, which are programs that speak the Model Context Protocol over stdin and stdout.

Each server has an asyncio task of its own, because the client of the package `mcp` must be entered and left in one
task. Invariant: every wait has a deadline, and a server is stopped, with everything it started, at the end of its
episode or of the environment.
"""

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, override

from nemo_rl.host.boundary import Boundary, raised_as
from nemo_rl.kits.tools.interfaces import OpenTools, ToolOutput, ToolSource, ToolSpec, text_of_error
from nemo_rl.kits.tools.outputs import OutputLimits, Part, data_address, output_of_parts
from nemo_rl.utils.errors import ConfigError

MCP = "mcp"
"""Name of the entries for MCP servers."""
START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 15.0


class McpTools(ToolSource):
    """Tools of one server program.

    Args:
        command: program and arguments.
        variables: environment variables of the server.
        shared: whether all episodes use one server.
        timeout_s: deadline of a call in seconds.
        limits: limits on an output.

    Raises:
        ConfigError: the server does not start, or offers no tools.
    """

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        *,
        shared: bool,
        timeout_s: float,
        limits: OutputLimits,
    ) -> None:
        self._command = list(command)
        self._variables = dict(variables)
        self._shared = shared
        self._limits = timeout_s, limits
        self._lock = asyncio.Lock()
        self._common: _McpServer | None = None
        with ThreadPoolExecutor(1) as thread:  # this thread may run an event loop already
            self.specs = thread.submit(asyncio.run, self._listed()).result()

    @override
    async def open(self, metadata: Any) -> OpenTools:
        if not self._shared:
            return _OpenMcp(await self._started(), *self._limits, stops=True)
        async with self._lock:
            if self._common is None or self._common.has_ended:
                self._common = await self._started()
        return _OpenMcp(self._common, *self._limits, stops=False)

    async def shutdown(self) -> None:
        """Stop the server that all episodes share."""
        if self._common is not None:
            await self._common.stop()

    async def _started(self) -> "_McpServer":
        server = _McpServer(self._command, self._variables)
        await server.start()
        return server

    async def _listed(self) -> dict[str, ToolSpec]:
        """Start a server, request its tools, and stop the server."""
        what = f"the MCP server {' '.join(self._command)!r}"
        server = await self._started()
        try:
            with raised_as(lambda error: ConfigError(f"{what} does not list its tools: {error!r}.")):
                async with asyncio.timeout(START_TIMEOUT_S):  # the server is another program
                    listed = (await server.client.list_tools()).tools
        finally:
            await server.stop()
        if not listed:
            raise ConfigError(f"{what} has no tools.")
        return {tool.name: ToolSpec(tool.name, tool.description or "", tool.input_schema) for tool in listed}


class _McpServer:
    """One running server with its client."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        self._command = command
        self._variables = variables
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.client: Any = None

    @property
    def has_ended(self) -> bool:
        """True if the server is no longer running."""
        return self._task is None or self._task.done()

    async def start(self) -> None:
        """Start the program and connect to it."""
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._serve(ready))
        await asyncio.wait([ready, self._task], timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            self.client = ready.result()
            return
        reason = f"gave no answer in {START_TIMEOUT_S:g} s"
        if self._task.done():
            reason = repr(self._task.exception())
        await self.stop()
        raise ConfigError(f"the MCP server {' '.join(self._command)!r} cannot be started: {reason}.")

    async def stop(self) -> None:
        """Stop the program, and kill it if it does not end by itself."""
        self._closing.set()
        if self._task is None:
            return
        await asyncio.wait([self._task], timeout=_STOP_TIMEOUT_S)
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):  # boundary: the server is another program
            await self._task

    async def _serve(self, ready: "asyncio.Future[Any]") -> None:
        from mcp.client import Client
        from mcp.client.stdio import StdioServerParameters, stdio_client

        program, *arguments = self._command
        parameters = StdioServerParameters(command=program, args=arguments, env=dict(self._variables))
        with open(os.devnull, "w", encoding="utf-8") as discarded:
            async with Client(stdio_client(parameters, errlog=discarded)) as client:
                ready.set_result(client)
                await self._closing.wait()


class _OpenMcp(OpenTools):
    def __init__(self, server: _McpServer, timeout_s: float, limits: OutputLimits, *, stops: bool) -> None:
        self._server = server
        self._timeout_s = timeout_s
        self._limits = limits
        self._stops = stops

    @override
    async def call(self, name: str, arguments: dict[str, Any]) -> ToolOutput:
        if self._server.has_ended:
            return ToolOutput(f"Error: {name}: its server has ended.", "error")
        with Boundary(Exception) as caught:  # the server is another program
            async with asyncio.timeout(self._timeout_s) as deadline:
                result = await self._server.client.call_tool(name, arguments)
            output = output_of_parts(map(_part, result.content), self._limits)
        if caught:
            if deadline.expired():
                return ToolOutput(f"Error: {name} gave no answer in {self._timeout_s:g} s", "timeout")
            return ToolOutput(text_of_error(caught.take()), "error")
        return replace(output, fault="error") if result.is_error else output

    @override
    async def close(self) -> None:
        if self._stops:
            await self._server.stop()


def _part(block: Any) -> Part:
    """Return a block of a result as a part. A block that is neither text nor an image is named by its type."""
    if block.type == "image":
        return {"type": "image", "image": data_address(block.data)}
    return {"type": "text", "text": getattr(block, "text", f"[{block.type}]")}
