"""Run a grading process, which reads answers as JSON lines and writes results as JSON lines.

`pool.GradingProcess` starts this process as `python -m nemo_rl.environments.grading.worker_main`. It has no deadline of
its own: the process that waits for its reply kills it. Invariant: the grading process ends when its parent ends, for
whatever reason, and it answers each request with one line, which is a result or an error.

    request   {"response": str, "ground_truth": str, "prompt": str | null}
    reply     {"reward": float | {name: float}, "extracted_answer": str | null} | {"error": str}
    greeting  {"ready": true} | {"fatal": str}
"""

import json
import os
import sys
from inspect import signature
from typing import Any, TextIO

from nemo_rl.environments.grading.grade import Verifier, load_verifier
from nemo_rl.host.boundary import Boundary
from nemo_rl.host.processes import die_with_parent, limit_memory

_MAX_ERROR_CHARS = 1000


def main(verifier_name: str, parent_pid: int, memory_limit_mb: int) -> int:
    """Serve requests until the request pipe closes, and return the exit status."""
    die_with_parent(parent_pid)
    limit_memory(memory_limit_mb)  # so that an answer like 10^10^10 ends in a MemoryError
    requests, replies = _take_over_pipes()
    with Boundary(Exception) as caught:  # the verifier may be the user's own code
        verifier = load_verifier(verifier_name)
    if caught:
        _send(replies, json.dumps({"fatal": _describe(caught.take())}))
        return 1
    _send(replies, json.dumps({"ready": True}))
    for line in requests:
        _send(replies, _judge(verifier, json.loads(line)))
    return 0


def _judge(verifier: Verifier, request: dict[str, Any]) -> str:
    """Run the verifier and return its result as JSON, or the error that it raised."""
    with Boundary(Exception) as caught:  # the verifier may be the user's own code
        more = {"prompt": request["prompt"]} if "prompt" in signature(verifier).parameters else {}
        verified = verifier(request["response"], request["ground_truth"], **more)
        return json.dumps({"reward": verified.reward, "extracted_answer": verified.extracted_answer})
    return json.dumps({"error": _describe(caught.take())})


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]


def _send(replies: TextIO, message: str) -> None:
    replies.write(message + "\n")
    replies.flush()


def _take_over_pipes() -> tuple[TextIO, TextIO]:
    """Keep stdin and stdout for the protocol, and redirect prints of a verifier to stderr."""
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, replies


if __name__ == "__main__":
    sys.path.extend(sys.argv[4:])
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
