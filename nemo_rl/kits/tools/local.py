"""Run tools in the environment's process.

Invariant: a call ends at its deadline. A function that hangs keeps its thread, but delays no other call. A tool that
may hang or die should have its own process (`isolate: true`).
"""

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, override

from nemo_rl.host.boundary import Boundary
from nemo_rl.kits.tools.found import FoundTools
from nemo_rl.kits.tools.interfaces import OpenTools, ToolOutput, ToolSource, text_of_error
from nemo_rl.kits.tools.outputs import OutputLimits, tool_output


class LocalTools(ToolSource):
    """Function, or class with one object for each episode or one object for all episodes.

    Args:
        found: the function or class.
        shared: whether all episodes use one object.
        timeout_s: deadline of a call in seconds.
        limits: limits on an output.
    """

    def __init__(self, found: FoundTools, *, shared: bool, timeout_s: float, limits: OutputLimits) -> None:
        self.specs = found.specs
        self._found = found
        self._shared = shared
        self._limits = timeout_s, limits
        self._lock = asyncio.Lock()
        self._common: _OpenLocal | None = None

    @override
    async def open(self, metadata: Any) -> OpenTools:
        if not self._shared:
            return _OpenLocal(*await _on_thread(lambda: self._found.opened(metadata)), *self._limits)
        async with self._lock:
            if self._common is None:
                self._common = _OpenLocal(*await _on_thread(lambda: self._found.opened(None)), *self._limits)
        return _Borrowed(self._common)

    async def shutdown(self) -> None:
        """Close the object that all episodes share."""
        if self._common is not None:
            await self._common.close()


class _OpenLocal(OpenTools):
    def __init__(
        self,
        methods: Mapping[str, Callable[..., Any]],
        close: Callable[[], None],
        timeout_s: float,
        limits: OutputLimits,
    ) -> None:
        self._methods = methods
        self._close = close
        self._timeout_s = timeout_s
        self._limits = limits

    @override
    async def call(self, name: str, arguments: dict[str, Any]) -> ToolOutput:
        method, limits = self._methods[name], self._limits

        def called() -> ToolOutput:
            return tool_output(method(**arguments), limits)

        async def awaited() -> ToolOutput:
            return tool_output(await method(**arguments), limits)

        running = awaited() if inspect.iscoroutinefunction(method) else _on_thread(called)
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                return await running
        except (Exception, SystemExit) as error:  # boundary: the tool is user code
            if deadline.expired():
                return ToolOutput(f"Error: {name} gave no answer in {self._timeout_s:g} s", "timeout")
            return ToolOutput(text_of_error(error), "error")

    @override
    async def close(self) -> None:
        await _on_thread(self._close)


class _Borrowed(OpenTools):
    """Open tools that all episodes share, and that stay open when an episode ends."""

    def __init__(self, tools: OpenTools) -> None:
        self._tools = tools

    @override
    async def call(self, name: str, arguments: dict[str, Any]) -> ToolOutput:
        return await self._tools.call(name, arguments)


async def _on_thread[T](call: Callable[[], T]) -> T:
    """Run a function on its own daemon thread. A thread pool would run out of threads if functions hang."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(give: Callable[[], None]) -> None:
        if not future.done():
            give()

    def run() -> None:
        with Boundary(BaseException) as caught:  # the tool is user code; the caller raises it
            give = partial(future.set_result, call())
        if caught:
            error = caught.take()
            if isinstance(error, StopIteration | KeyboardInterrupt):
                error = RuntimeError(f"{type(error).__name__}: {error}")
            give = partial(future.set_exception, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, give)

    threading.Thread(target=run, daemon=True, name="tool").start()
    return await future
