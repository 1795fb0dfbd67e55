"""Limits of processor time, for machines of any speed and with any other load."""

import time

_REFERENCE_S = 0.014
"""Processor seconds of `_work` on an idle machine of 2026, which the limits of tests are for."""


def slowness() -> float:
    """Return how many times longer this machine takes now than the machine that limits are for, at least 1."""
    started = time.process_time()
    sum(number * number for number in range(200_000))
    return max(1.0, (time.process_time() - started) / _REFERENCE_S)
