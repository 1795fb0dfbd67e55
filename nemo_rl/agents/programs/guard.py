"""Run a command, and end every process that it started when the command ends.

The guard is started as `python -I -S guard.py FOLDER PARENT`. FOLDER contains the files of the command. The process
PARENT, which started the guard, removes these files, or the guard does if PARENT has died. The first line of standard
input is JSON with the command and its environment. When PARENT closes it or dies, the command is ended. Invariant:
when the guard ends, no process of the command exists. It adopts orphans, and imports only the standard library.
"""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys

_PR_SET_CHILD_SUBREAPER = 36
_LOOK_S = 0.2
_AGAIN_S = 0.005
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126


def main(folder: str, parent: int) -> int:
    """Run the command, and return its exit status, or 128 + n if signal n ended it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        return _run()
    finally:
        if os.getppid() != parent:
            _remove(folder)


def _run() -> int:
    plan = json.loads(_first_line())
    try:
        # The command gets its own session, so that a signal to its process group does not reach this process.
        process = subprocess.Popen(
            plan["command"], stdin=subprocess.DEVNULL, env=plan["environment"], start_new_session=True
        )
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
    status = _wait(process.pid)
    process.returncode = status
    _end_all()
    return status if status >= 0 else 128 - status


def _first_line() -> bytes:
    """Read one line without reading ahead."""
    line = bytearray()
    while not line.endswith(b"\n"):
        data = os.read(0, 1)
        if not data:
            sys.exit(1)
        line += data
    return bytes(line)


def _wait(pid: int) -> int:
    """Wait for a child, and return its status (-n after signal n), or -SIGKILL if standard input ended first."""
    pidfd = os.pidfd_open(pid)
    while True:
        ready, _, _ = select.select([0, pidfd], [], [], _LOOK_S)
        status = _reap(pid)
        if status is not None:
            return status
        if 0 in ready:
            return -signal.SIGKILL


def _reap(pid: int) -> int | None:
    """Reap all children that have ended, and return the status of the child `pid`, or None if it has not ended."""
    found = None
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if ended == 0:
            return found
        if ended == pid:
            found = os.waitstatus_to_exitcode(status)


def _end_all() -> None:
    """Kill all descendants of this process, including those that start in the meantime."""
    while below := _below(os.getpid()):
        for pid in below:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        _reap(0)
        select.select([], [], [], _AGAIN_S)


def _below(pid: int) -> list[int]:
    """Return all descendants of a process, including ended processes that were not reaped."""
    found = _children(pid)
    for each in found:
        found += _children(each)
    return found


def _children(pid: int) -> list[int]:
    place, found = f"/proc/{pid}/task", []
    try:
        for thread in os.listdir(place):
            with open(f"{place}/{thread}/children", encoding="ascii") as file:
                found += [int(child) for child in file.read().split()]
    except OSError:  # the process has ended meanwhile
        pass
    return found


def _remove(folder: str) -> None:
    """Remove the files of the command as far as possible. The task's files come first, because they have the key."""
    import shutil  # imported only here, because every command waits for the imports

    for name in os.listdir(folder):
        if os.path.isfile(os.path.join(folder, name)):
            os.unlink(os.path.join(folder, name))
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    os._exit(main(sys.argv[1], int(sys.argv[2])))
