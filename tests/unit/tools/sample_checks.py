"""Checks that end in every possible way, for tests of the runner; importing this takes no time."""

import os
import time
from collections.abc import Iterator
from typing import Any

from gpu_checks.report import Finding
from gpu_checks.runner import Setting


class Stand:
    def __init__(self, setting: Setting):
        if setting.folder == "unusable":
            raise ValueError("no device here")
        self.calls = 0

    def machine(self) -> dict[str, Any]:
        return {"device": "none"}


def counts(stand: Stand) -> Iterator[Finding]:
    stand.calls += 1
    yield Finding("calls of this process", {"calls": stand.calls, "planted": os.environ.get("PLANTED", "")})


def finds_a_problem(stand: Stand) -> Iterator[Finding]:
    yield Finding("fine", {"error": 0.1})
    yield Finding("wrong", {"error": 3.0}, "too large")


def raises(stand: Stand) -> Iterator[Finding]:
    yield Finding("before", {})
    raise ValueError("planted\nwith a second line")


def hangs(stand: Stand) -> Iterator[Finding]:
    yield Finding("before", {})
    time.sleep(60)


def dies(stand: Stand) -> Iterator[Finding]:
    yield Finding("before", {})
    os._exit(7)
