"""Run an isolated tool for one episode. The process reads calls and writes outputs as JSON lines.

`isolated` starts it as `python -m nemo_rl.kits.tools.tool_process PARENT_PID`. Invariant: the process ends when its
parent ends, it answers each request with one line, and nothing that a tool prints reaches the protocol or a log.

    first request  {"name": str, "kwargs": {}, "metadata": any, "limits": {}, "memory_limit_mb": int}
    reply          {"ready": true} | {"error": str}
    request        {"tool": str, "arguments": {}}
    reply          {"output": str, "parts": []} | {"error": str}
"""

import asyncio
import inspect
import json
import os
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from nemo_rl.host.boundary import Boundary
from nemo_rl.host.processes import die_with_parent, limit_memory
from nemo_rl.kits.tools.found import FoundTools, find_tools
from nemo_rl.kits.tools.interfaces import text_of_error
from nemo_rl.kits.tools.outputs import OutputLimits, tool_output


def main(parent_pid: int) -> int:
    """Serve calls until the request pipe closes, and return the exit status."""
    die_with_parent(parent_pid)
    requests, replies = _take_over_pipes()
    first = json.loads(requests.readline())
    with Boundary(Exception) as caught:  # the tool is user code
        found = find_tools(first["name"], first["kwargs"], f"tool {first['name']!r}")
        limit_memory(first["memory_limit_mb"] + _used_mb())
        methods, close = found.opened(first["metadata"])
    if caught:
        _send(replies, {"error": text_of_error(caught.take())})
        return 1
    _send(replies, {"ready": True})
    limits = OutputLimits(**first["limits"])
    for line in requests:
        _send(replies, _called(found, methods, json.loads(line), limits))
    close()
    return 0


def _called(
    found: FoundTools, methods: Mapping[str, Callable[..., Any]], request: Mapping[str, Any], limits: OutputLimits
) -> dict[str, Any]:
    """Make one call and return its output, or the error that it raised."""
    with Boundary(Exception) as caught:  # the tool is user code
        # JSON reduced the arguments to plain values. This converts them to the types of the type hints again.
        arguments = found.specs[request["tool"]].checked(request["arguments"])
        value = methods[request["tool"]](**arguments)
        output = tool_output(asyncio.run(value) if inspect.iscoroutine(value) else value, limits)
        return {"output": output.text, "parts": list(output.parts)}
    return {"error": text_of_error(caught.take())}


def _send(replies: TextIO, message: Mapping[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def _used_mb() -> int:
    """Return the size of the address space of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    return pages * resource.getpagesize() // 2**20


def _take_over_pipes() -> tuple[TextIO, TextIO]:
    """Keep stdin and stdout for the protocol, and discard the output of tools."""
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    return requests, replies


if __name__ == "__main__":
    sys.path.extend(sys.argv[2:])
    sys.exit(main(int(sys.argv[1])))
