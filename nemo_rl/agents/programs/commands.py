"""Run programs that are processes without a sandbox, and read the results that they leave.

    environment ── stdin: command ──► guard ──► program and what it starts
                ◄── stdout, stderr ───────────────┘  └─► reward.json

Invariant: when `run` returns or is cancelled, no process and no file of the program exists. `guard` removes both if
this process dies. If the program kills `guard`, `end_processes` finds its processes.
"""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import override

from nemo_rl.agents.programs.interfaces import AgentError, AgentProgram, AgentResult, AgentTask, read_result, too_slow
from nemo_rl.host.processes import descendants
from nemo_rl.sandbox.scratch import read_files, remove
from nemo_rl.utils.errors import ConfigError

_AGAIN_S = 0.01


def end_processes(guard: int | None, folder: str, deadline_s: float) -> bool:
    """Kill a guard, its descendants and all processes of a folder, and block until they have ended.

    Args:
        guard: process id of the guard, or None if the guard has ended.
        folder: path of a folder that belongs to one command.
        deadline_s: time in seconds after which the function gives up.

    Returns:
        Whether all processes have ended.
    """
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        below = [] if guard is None else descendants(guard)
        found = {*below, *_processes_of(folder)} - {guard, os.getpid()}
        if guard is not None:  # before the others, so that it does not report the command's end
            found.add(guard)
            guard = None
        elif not found:
            return True
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_AGAIN_S)
    return False


def _processes_of(folder: str) -> list[int]:
    """Return the ids of processes that have a folder in an environment variable or as their current folder."""
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):  # no process, or it has ended or is another user's
            place = Path("/proc", str(int(entry)))
            if folder.encode() in (place / "environ").read_bytes() or os.readlink(place / "cwd").startswith(folder):
                found.append(int(entry))
    return found


logger = logging.getLogger(__name__)

TASK_FILE, REWARD_FILE = "task.json", "reward.json"
LARGEST_REWARD_FILE = 2**20
_SHOWN_CHARS = 1000
_CHUNK_BYTES = 65536
_END_DEADLINE_S = 10.0
_POLL_S = 0.01
_GUARD = str(Path(__file__).with_name("guard.py"))


class CommandProgram(AgentProgram):
    """Run a process for each task, with the rights, the environment variables and the network of this process.

    Args:
        command: program and arguments.
        environment: further environment variables.
        output_bytes: largest length of standard output, and of standard error. A process that writes more is ended.

    Raises:
        ConfigError: there is no such program.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], output_bytes: int) -> None:
        self._command = found_command(command)
        self._environment = environment
        self._output_bytes = output_bytes

    @override
    async def run(self, task: AgentTask) -> AgentResult:
        content = task_file_of(task)
        folder = os.path.realpath(tempfile.mkdtemp(prefix="nemo_rl_agent_"))
        try:
            Path(folder, TASK_FILE).write_bytes(content)
            status, out, err = await self._ran(task, folder)
            files = read_files(folder, [REWARD_FILE], LARGEST_REWARD_FILE)
        finally:
            await asyncio.shield(asyncio.to_thread(remove, folder))
        return result_of(task, status, out, err, files)

    async def _ran(self, task: AgentTask, folder: str) -> tuple[int, str, str]:
        """Run the program in a folder, and return its exit status, standard output and standard error."""
        variables = {**os.environ, **variables_of(task, folder), **self._environment}
        plan = json.dumps({"command": self._command, "environment": variables})
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", _GUARD, folder, str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        assert process.stdin and process.stdout and process.stderr
        reads = [asyncio.ensure_future(self._read(pipe)) for pipe in (process.stdout, process.stderr)]
        try:
            process.stdin.write(plan.encode() + b"\n")
            async with asyncio.timeout(task.timeout_s):
                out, err = await asyncio.gather(*reads)
                status = await process.wait()
        except TimeoutError:
            raise too_slow(task) from None
        finally:
            await asyncio.shield(_ended(process, reads, folder))
        return status if status >= 0 else 128 - status, out, err

    async def _read(self, pipe: asyncio.StreamReader) -> str:
        content = bytearray()
        while data := await pipe.read(_CHUNK_BYTES):
            content += data
            if len(content) > self._output_bytes:
                raise wrote_too_much(self._output_bytes)
        return content.decode(errors="replace")


async def _ended(process: asyncio.subprocess.Process, reads: Sequence[asyncio.Task[str]], folder: str) -> None:
    """Let the guard end all processes of the program. If it does not, end the processes and the guard here."""
    assert process.stdin and process.stdout and process.stderr
    process.stdin.close()
    for read in reads:  # a pipe has one reader at a time
        read.cancel()
    await asyncio.gather(*reads, return_exceptions=True)
    has_ended = await _returned(process)
    if process.returncode is None or process.returncode < 0:  # the guard itself was killed, or did not end in time
        guard = None if has_ended else process.pid
        if not await asyncio.to_thread(end_processes, guard, folder, _END_DEADLINE_S):
            logger.warning("processes of a program in %s did not end in %g s of SIGKILL", folder, _END_DEADLINE_S)
        await _returned(process)
    try:
        async with asyncio.timeout(_END_DEADLINE_S):
            for pipe in (process.stdout, process.stderr):  # to the end of the pipe, at which asyncio closes it
                while await pipe.read(_CHUNK_BYTES):
                    continue
    except TimeoutError:
        logger.warning("a process that a program in %s started still holds its output", folder)


async def _returned(process: asyncio.subprocess.Process) -> bool:
    """Return whether a process ends in time. Its pipes are no longer read, and may stay open."""
    deadline = asyncio.get_running_loop().time() + _END_DEADLINE_S
    while process.returncode is None and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(_POLL_S)
    return process.returncode is not None


def found_command(command: Sequence[str]) -> list[str]:
    """Return a command with the absolute path of its program. Programs next to the run's Python come first.

    Raises:
        ConfigError: there is no such program.
    """
    program = shutil.which(command[0], path=search_path(os.environ.get("PATH", os.defpath)))
    if program is None:
        raise ConfigError(
            f"env.agent.command starts {command[0]!r}, which is no program on this machine. Give its absolute path, or "
            "add its folder to PATH."
        )
    return [os.path.abspath(program), *command[1:]]


def search_path(rest: str) -> str:
    """Return the folders in which programs are searched, beginning with the folder of the run's Python."""
    return os.pathsep.join([sysconfig.get_path("scripts"), rest])


def task_file_of(task: AgentTask) -> bytes:
    """Return the content of the file of a task.

    Raises:
        AgentError: the task has values that JSON cannot represent.
    """
    try:
        return json.dumps(task.as_json).encode()
    except (TypeError, ValueError) as error:
        raise AgentError(f"the task cannot be written as JSON: {error}") from None


def variables_of(task: AgentTask, folder: str) -> dict[str, str]:
    """Return the environment variables for the program of a task whose files are in a folder."""
    files = {"NEMO_RL_TASK_FILE": f"{folder}/{TASK_FILE}", "NEMO_RL_REWARD_FILE": f"{folder}/{REWARD_FILE}"}
    return {**task.environment, **files}


def result_of(task: AgentTask, status: int, out: str, err: str, files: Mapping[str, bytes | None]) -> AgentResult:
    """Return the result of a program that has ended. Its output is the answer if it left no reward file.

    Args:
        status: exit status, or 128 + n if signal n ended the program.
        files: content of the files that the program wrote, or None for a file that cannot be read.

    Raises:
        AgentError: the status is not 0, or the file of the reward cannot be read or understood.
    """
    if status != 0:
        how = f"was ended by signal {status - 128}" if status > 128 else f"exited with status {status}"
        said = task.without_key(err.strip() or out.strip())[-_SHOWN_CHARS:] or "it wrote nothing"
        raise AgentError(f"the program {how}: {said}")
    content = files.get(REWARD_FILE, b"null")
    if content is None:
        raise AgentError(f"{REWARD_FILE} of the program is no regular file of at most {LARGEST_REWARD_FILE} bytes")
    try:
        result = read_result(json.loads(content))
    except (ValueError, RecursionError) as error:
        raise AgentError(f"the program wrote no result into {REWARD_FILE}: {error}") from None
    if result.answer is None and out.strip():
        return AgentResult(result.reward, out.strip(), result.metrics, result.call_rewards)
    return result


def wrote_too_much(limit: int) -> AgentError:
    """Make the error of a program with too much output."""
    return AgentError(f"the program wrote more than {limit} bytes (env.agent.output_bytes) and was ended")
