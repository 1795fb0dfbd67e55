"""Provide the tool `python`, which runs each call as a separate program in a sandbox.

With `stateful`, the earlier programs of the episode run again before the new one, in the same sandbox. Between two
calls nothing runs, and only the text of the programs is stored. Invariant: a program affects only its own call. The
time that a call waits for a free worker does not count against its time limit.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, override

from nemo_rl.config.schema.kits import PythonToolConfig
from nemo_rl.kits.code.inside.values import COMPLETED
from nemo_rl.kits.code.interpreter import came_to_end, limits_of, program_of, text_of_outcome
from nemo_rl.kits.tools.interfaces import Fault, OpenTools, ToolOutput, ToolSource, cut_middle, spec_of, text_of_error
from nemo_rl.sandbox import End, ProgramOutcome, Sandbox
from nemo_rl.utils.errors import ConfigError, SandboxError

logger = logging.getLogger(__name__)

PYTHON = "python"
"""Name of the entries for this tool."""
_KEEPS = " Variables, functions and files of earlier programs are kept."
_KEEPS_NOT = " Each program starts without the variables and files of earlier ones."


class SandboxedPython(ToolSource):
    """A tool that runs Python programs of the model.

    Args:
        kwargs: keys of `PythonToolConfig`.
        place: key of `kwargs`, for messages.
        timeout_s: limit of a program's wall time in seconds.
        max_bytes: largest length of an output in bytes.

    Raises:
        ConfigError: a key is wrong.
        SandboxError: this machine does not support a sandbox.
    """

    def __init__(self, kwargs: Mapping[str, Any], place: str, timeout_s: float, max_bytes: int) -> None:
        try:
            self._keys = PythonToolConfig.build(**kwargs)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from None
        limits = limits_of(self._keys, wall_time_s=timeout_s, cpu_time_s=self._keys.cpu_time_s or timeout_s)
        self._sandbox = Sandbox(limits, self._keys.sandbox, self._keys.num_workers)
        self._max_bytes = max_bytes
        spec = spec_of(self._interpreter().python, "the tool python")
        text = spec.description + (_KEEPS if self._keys.stateful else _KEEPS_NOT)
        self.specs = {PYTHON: replace(spec, description=text)}

    @override
    async def open(self, metadata: Any) -> OpenTools:
        return self._interpreter()

    def _interpreter(self) -> "_Interpreter":
        return _Interpreter(self._sandbox, self._max_bytes, stateful=self._keys.stateful)

    async def shutdown(self) -> None:
        """Wait for the running programs, at most as long as their limits allow."""
        await asyncio.to_thread(self._sandbox.close)


class _Interpreter(OpenTools):
    """The programs of one episode."""

    def __init__(self, sandbox: Sandbox, max_bytes: int, *, stateful: bool) -> None:
        self._sandbox = sandbox
        self._max_bytes = max_bytes
        self._stateful = stateful
        self._earlier: list[str] = []
        self._in_order = asyncio.Lock()

    @override
    async def call(self, name: str, arguments: dict[str, Any]) -> ToolOutput:
        try:
            return await self.python(**arguments)
        except (SandboxError, OSError) as error:  # OSError, for example, if there are too many open files or processes
            logger.warning("A program of the tool python could not be run: %s", error)
            return ToolOutput(text_of_error(error), "error")

    async def python(self, code: str) -> ToolOutput:
        """Run a Python program and return what it prints, and the value of an expression in its last line."""
        if not self._stateful:
            return self._said(await self._sandbox.run_async(program_of([code], {})))
        async with self._in_order:
            return self._said(await self._continued(code))

    async def _continued(self, code: str) -> ProgramOutcome:
        """Run a program after the earlier programs, and keep it for later calls if it ended."""
        programs = [*self._earlier, code]
        outcome = await self._sandbox.run_async(program_of(programs, {}))
        if came_to_end(outcome):
            self._earlier = programs
        return outcome

    def _said(self, outcome: ProgramOutcome) -> ToolOutput:
        """Return the output that the model reads."""
        text = cut_middle(text_of_outcome(outcome), self._max_bytes) or "[no output]"
        return ToolOutput(text, _fault(outcome))


def _fault(outcome: ProgramOutcome) -> Fault | None:
    """Return "timeout" if a limit of time ended the program, "error" if it failed in another way, or None."""
    if outcome.end in (End.WALL_TIME, End.CPU_TIME):
        return "timeout"
    return None if came_to_end(outcome) and outcome.exit_code == COMPLETED else "error"
