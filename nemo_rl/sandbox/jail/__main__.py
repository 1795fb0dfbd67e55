"""Isolate this process, and then execute the program. This is the first code that runs in a sandbox.

    outside ─── enters namespaces (or bubblewrap has) ── waits for `init`
                  └─ init: own root, no identity ─────── waits for the program, and with it everything ends
                       └─ the program: limits, Landlock, seccomp, exec

The code is started as `python -I -S jail PLAN CONTROL` with two file descriptors: a plan (in the format of `marshal`),
and a pipe on which it reports `init PID`, and then `ready` or `error TEXT`. The code sees only the standard library, of
which it imports only small modules, because every program waits for these imports.
"""

from __future__ import annotations

import marshal
import os
import sys

import handover
import identity
import landlock
import seccomp
import view

TYPE_CHECKING = False  # the module `typing` takes as long to import as everything else here
if TYPE_CHECKING:
    from typing import Any

    type Plan = dict[str, Any]

_NEW_NAMESPACES = os.CLONE_NEWNS | os.CLONE_NEWPID | os.CLONE_NEWNET | os.CLONE_NEWIPC | os.CLONE_NEWUTS
_NOT_FOUND = 127


def main(plan_file: int, control: int) -> int:
    """Run the program of a plan, and return its exit status, or 128 + n if signal n ended it."""
    plan: Plan = marshal.loads(os.pread(plan_file, os.fstat(plan_file).st_size, 0))
    os.close(plan_file)
    try:
        if plan["namespaces"] == "own":
            return _run_in_own_namespaces(plan, control)
        if plan["namespaces"] == "outer":
            _prepare(plan)
        else:
            _give_up_rights(plan)
        _become_the_program(plan, control)
    except OSError as error:
        os.write(control, f"error {error}\n".encode())
    return 1


def _run_in_own_namespaces(plan: Plan, control: int) -> int:
    identity.end_with_parent()
    _enter_namespaces(plan["is_privileged"])
    if plan["port"] is not None:
        handover.start_loopback()
    init = os.fork()
    if init:
        os.write(control, f"init {init}\n".encode())
        os.close(control)
        return _status_of(init)
    identity.end_with_parent()
    view.enter(plan["readable"], plan["devices"], plan["scratch"])
    _prepare(plan)
    program = os.fork()
    if program:
        os.closerange(0, 1024)
        os._exit(_status_of(program))
    _become_the_program(plan, control)
    return 1


def _enter_namespaces(is_privileged: bool) -> None:
    """Enter new namespaces, including a user namespace if this process may not mount without one."""
    if is_privileged:
        os.unshare(_NEW_NAMESPACES)
        return
    user, group = os.geteuid(), os.getegid()
    os.unshare(_NEW_NAMESPACES | os.CLONE_NEWUSER)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/gid_map", f"{group} {group} 1")
    _write("/proc/self/uid_map", f"{user} {user} 1")


def _prepare(plan: Plan) -> None:
    """Mount the scratch folder, and then give up the rights that mounting needs."""
    view.mount_scratch(plan["scratch"], plan["scratch_bytes"], plan["scratch_files"])
    if plan["is_privileged"]:
        identity.become_nobody(plan["user_number"])
    identity.drop()


def _give_up_rights(plan: Plan) -> None:
    """Give up this process's rights, if the program shares the machine's files."""
    keeps_reading = plan["is_root"] and identity.become_nobody_among_files(
        plan["user_number"], plan["scratch"], plan["arguments"][0]
    )
    identity.drop(keeps_reading)


def _become_the_program(plan: Plan, control: int) -> None:
    os.chdir(plan["scratch"])
    os.umask(0o077)
    for name, content in plan["files"].items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "wb") as file:
            file.write(content)
    if plan["handover"] is not None:
        handover.give(plan["handover"], plan["port"])
    may_connect = plan["port"] is not None
    identity.limit(plan["limits"])
    _restrict_files(plan, may_connect)
    for descriptor in plan["inherited"]:
        os.set_inheritable(descriptor, True)
    os.set_inheritable(control, False)
    seccomp.install(plan["namespaces"] != "none", plan["may_fork"], may_connect, os.getpid())
    os.write(control, b"ready\n")
    try:
        os.execve(plan["arguments"][0], plan["arguments"], plan["environment"])
    except OSError as error:  # `ready` was sent, so this is a failure of the program
        os.write(2, f"{plan['arguments'][0]} or its interpreter cannot be run: {error.strerror}\n".encode())
        os._exit(_NOT_FOUND)


def _restrict_files(plan: Plan, may_connect: bool) -> None:
    """Apply Landlock's rules if the kernel has them, and raise an error if it does not and they are needed."""
    version = landlock.version(plan["newest_landlock"])
    least = landlock.RESTRICTS_TRUNCATION if plan["namespaces"] == "none" else int(plan["needs_landlock"])
    if version < least:
        raise OSError(
            f"Landlock has version {version} here, and without namespaces version {least} (Linux 6.2) is needed: "
            "a program could empty files of its user with an earlier one"
            if version
            else "the kernel has no Landlock, or it is switched off"
        )
    if version:
        landlock.restrict(version, plan["readable"], [plan["scratch"]], plan["devices"], may_connect)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _status_of(child: int) -> int:
    """Wait for a child and return its status. Orphans that end before it are reaped too, as they count as processes."""
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    os._exit(main(int(sys.argv[1]), int(sys.argv[2])))
