"""Run programs that are processes in a sandbox, from which they can reach only the endpoint.

Invariant: such a program sees its task, its own files and the Python of the run. It sees no other row, no environment
variable of the run, and no network except the endpoint's port.
"""

import asyncio
import os
import sys
import sysconfig
from dataclasses import replace
from typing import override
from urllib.parse import urlsplit

from nemo_rl.agents.programs.commands import (
    LARGEST_REWARD_FILE,
    REWARD_FILE,
    TASK_FILE,
    found_command,
    result_of,
    search_path,
    task_file_of,
    variables_of,
    wrote_too_much,
)
from nemo_rl.agents.programs.interfaces import AgentError, AgentProgram, AgentResult, AgentTask, too_slow
from nemo_rl.config.schema.agents import AgentEnvironmentConfig
from nemo_rl.kits.code.interpreter import limits_of
from nemo_rl.sandbox import End, Program, ProgramOutcome, Sandbox, why_unavailable
from nemo_rl.sandbox.mechanisms import SCRATCH
from nemo_rl.sandbox.program import port_inside
from nemo_rl.utils.errors import ConfigError, SandboxError

_HTTP_PORT = 80
_KEYS = {End.MEMORY: "memory_mb", End.PROCESSES: "max_processes", End.SCRATCH: "scratch_mb", End.CPU_TIME: "timeout_s"}
"""Configuration keys of the limits that may end a program."""
_ADVICE = (
    "Programs that reach only the endpoint need bubblewrap, or the right to make namespaces and to start the network "
    "in them (CAP_SYS_ADMIN and CAP_NET_ADMIN, or namespaces of users). Install bubblewrap, or set "
    "env.agent.sandbox=none to run the command with all rights of the run."
)


class SandboxedCommand(AgentProgram):
    """Run an isolated process for each task.

    Args:
        cfg: the section `env.agent`, with a command.

    Raises:
        ConfigError: there is no such program, or this machine does not support the sandbox.
    """

    def __init__(self, cfg: AgentEnvironmentConfig) -> None:
        assert cfg.command is not None and cfg.sandbox != "none", "the section has a command in a sandbox"
        self._cfg = cfg
        self._command = tuple(found_command(cfg.command))
        self._readable = (self._command[0], *_python_of_the_run(), *cfg.readable)
        cpu_time_s = cfg.timeout_s * (os.cpu_count() or 1)  # in effect, only the wall time is limited
        limits = limits_of(cfg, wall_time_s=cfg.timeout_s, cpu_time_s=cpu_time_s)
        try:
            self._sandbox = Sandbox(limits, cfg.sandbox, cfg.max_open_episodes)
        except SandboxError as error:
            raise ConfigError(f"{error}\n  {_ADVICE}") from None
        reason = why_unavailable(self._sandbox.mechanism, with_address=True)
        if reason is not None:
            raise ConfigError(f"This machine cannot give a program in a sandbox an address: {reason}\n  {_ADVICE}")

    @override
    async def run(self, task: AgentTask) -> AgentResult:
        address, inside = _seen_inside(task)
        variables = {"PATH": search_path("/usr/bin:/bin"), **variables_of(inside, SCRATCH), **self._cfg.environment}
        outcome = await self._sandbox.run_async(
            Program(
                command=self._command,
                environment=variables,
                files={TASK_FILE: task_file_of(inside)},
                readable=self._readable,
                address=address,
                returned=(REWARD_FILE,),
                returned_bytes=LARGEST_REWARD_FILE,
            )
        )
        return self._result(task, outcome)

    async def shutdown(self) -> None:
        """Wait for the running programs, at most as long as their limits allow."""
        await asyncio.to_thread(self._sandbox.close)

    def _result(self, task: AgentTask, outcome: ProgramOutcome) -> AgentResult:
        if outcome.end is End.WALL_TIME:
            raise too_slow(task)
        if outcome.end is End.OUTPUT:
            raise wrote_too_much(self._cfg.output_bytes)
        if outcome.end is not End.EXITED:
            key = _KEYS.get(outcome.end, "sandbox")
            raise AgentError(f"the program reached its limit of {outcome.end} (env.agent.{key}) and was ended")
        return result_of(task, outcome.exit_code, outcome.stdout, outcome.stderr, outcome.files)


def _python_of_the_run() -> tuple[str, ...]:
    """Return the paths of the run's Python, its installed packages, and its virtual environment if there is one.

    The first lines of scripts name Python by a link in the virtual environment, which may lead to further links.
    """
    if sys.prefix != sys.base_prefix:
        return (sys.prefix, sys.executable)
    return (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sys.executable)


def _seen_inside(task: AgentTask) -> tuple[tuple[str, int], AgentTask]:
    """Return the address of the endpoint, and the task with the address that is valid inside the sandbox."""
    parts = urlsplit(task.base_url)
    host, port = parts.hostname or "127.0.0.1", parts.port or _HTTP_PORT
    return (host, port), replace(task, base_url=parts._replace(netloc=f"127.0.0.1:{port_inside(port)}").geturl())
