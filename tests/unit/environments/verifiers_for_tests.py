"""Verifiers that misbehave on demand, as the response tells them."""

import math
import os
import time

from nemo_rl.environments.grading.grade import VerifierResult


def obedient(response: str, ground_truth: str) -> VerifierResult:
    command, _, argument = response.partition(" ")
    if command == "sleep":
        time.sleep(float(argument))
    elif command == "spin":
        math.factorial(10**8)  # one C call: signal handlers would not run
    elif command == "raise":
        raise KeyError(argument)
    elif command == "print":
        print("noise on stdout")
    elif command == "read":
        assert input is not None and os.read(0, 1) == b""
    elif command == "pid":
        return VerifierResult(1.0, str(os.getpid()))
    elif command == "exit":
        os._exit(int(argument))
    elif command == "allocate":
        bytearray(10 * 2**30)
    elif command == "nonsense":
        return VerifierResult(object())  # type: ignore[arg-type]
    return VerifierResult(float(response == ground_truth), response)


def modules(response: str, ground_truth: str) -> VerifierResult:
    """Return the heavy modules that this process has imported."""
    import sys

    return VerifierResult(1.0, ",".join(name for name in ("torch", "ray", "numpy") if name in sys.modules))
