"""The promises of a run for each process that dies or is stopped, in each phase of a step.

`test_faults` checks every cell with a real run; docs/reference/faults.md shows the same table. Invariant: every cell of
the matrix has exactly one promise.
"""

import itertools
from dataclasses import dataclass
from enum import StrEnum

_AHEAD = (
    "grpo.overlap.mode=ahead",
    "grpo.overlap.order=in_order",
    "grpo.overlap.in_flight_weight_updates=false",
    "grpo.overlap.max_age_steps=2",
)
_RUNNER = ("cluster.rollout_runners=1",)
MODES: dict[str, tuple[str, ...]] = {
    "none": (),
    "ahead": _AHEAD,
    "runner": _RUNNER,
    "runner-ahead": (*_RUNNER, *_AHEAD),
}
"""How sampling and training overlap, and who plays rollouts, with the overrides; `ahead` with the schedule that repeats
itself bit for bit."""
VICTIMS = ("driver", "policy rank", "engine", "environment", "grading process", "rollout runner", "raylet", "gcs")
PHASES = ("sync", "sampling", "training", "validating", "saving")
SIGNALS = ("SIGKILL", "SIGSTOP")


class Promise(StrEnum):
    """What a run does after a fault."""

    SURVIVES = "survives"
    """The run continues by itself and ends with status 0; its metrics equal those of an undisturbed run bit for bit."""
    WAITS = "waits"
    """The run stands still until SIGCONT, then continues as if nothing had happened; its metrics are equal too."""
    ENDS = "ends"
    """Within a minute, the run ends and names the cause; the same command resumes it, and the metrics are equal."""


@dataclass(frozen=True)
class Row:
    """The promise for one victim and one signal.

    Attributes:
        promise: the same in all phases.
        evidence: regular expression that the log of the run matches afterwards; "" if the log says nothing.
        how: how the run notices the fault and what it does, for the documentation.
    """

    promise: Promise
    evidence: str
    how: str


ROWS: dict[tuple[str, str], Row] = {
    ("driver", "SIGKILL"): Row(
        Promise.ENDS, "", "all its processes end with it; the shell reports the signal (status 137)"
    ),
    ("driver", "SIGSTOP"): Row(Promise.WAITS, "", "nothing ends; SIGCONT continues the run"),
    ("policy rank", "SIGKILL"): Row(
        Promise.SURVIVES,
        r"Restart 1 of 3: the ranks of policy are replaced",
        "new ranks load the newest checkpoint, and the steps after it are trained again",
    ),
    ("policy rank", "SIGSTOP"): Row(
        Promise.SURVIVES,
        r"Stopped \(SIGSTOP\) are lm_policy-0-\d[\s\S]*Stacks of[\s\S]*Restart 1 of 3",
        "at the deadline of the phase the message has the stacks of all ranks; then as after SIGKILL",
    ),
    ("engine", "SIGKILL"): Row(
        Promise.SURVIVES,
        r"Generation engine 0 died; restarting it",
        "another engine gets the current weights and the unfinished requests",
    ),
    ("engine", "SIGSTOP"): Row(
        Promise.SURVIVES,
        r"Generation engine 0 died; restarting it",
        "after `engine_silence_s`, or at the deadline of a sync; then as after SIGKILL",
    ),
    ("environment", "SIGKILL"): Row(
        Promise.SURVIVES, r"The actor of environment 'math' ended", "another actor gets the unfinished batch"
    ),
    ("environment", "SIGSTOP"): Row(
        Promise.SURVIVES, r"The actor of environment 'math' ended", "after `environment_s`; then as after SIGKILL"
    ),
    ("grading process", "SIGKILL"): Row(Promise.SURVIVES, "", "another process grades the answer"),
    ("grading process", "SIGSTOP"): Row(
        Promise.SURVIVES, "", "after `timeout_s` of the environment; then as after SIGKILL"
    ),
    ("rollout runner", "SIGKILL"): Row(
        Promise.SURVIVES, r"The actor of rollout runner '0' ended", "another actor plays its open groups again"
    ),
    ("rollout runner", "SIGSTOP"): Row(
        Promise.SURVIVES,
        r"The actor of rollout runner '0' ended \(no sign of life for 10 s",
        "after `rollout_runner_silence_s`; then as after SIGKILL",
    ),
    ("raylet", "SIGKILL"): Row(
        Promise.ENDS,
        r"The node manager of this run's Ray \(raylet, pid \d+\) was killed by SIGKILL",
        "the log names it; `RayDiedError` within seconds, unless Ray's own code ends the driver first",
    ),
    ("raylet", "SIGSTOP"): Row(
        Promise.ENDS,
        r"The node manager of this run's Ray \(raylet, pid \d+\) was stopped \(SIGSTOP\)",
        "after 15 to 25 s; then as after SIGKILL",
    ),
    ("gcs", "SIGKILL"): Row(
        Promise.ENDS,
        r"The control service of this run's Ray \(gcs_server, pid \d+\) was killed by SIGKILL",
        "the log names it; `RayDiedError` within seconds, unless Ray's own code ends the driver first",
    ),
    ("gcs", "SIGSTOP"): Row(
        Promise.ENDS,
        r"The control service of this run's Ray \(gcs_server, pid \d+\) was stopped \(SIGSTOP\)",
        "after 15 to 25 s; then as after SIGKILL",
    ),
}


@dataclass(frozen=True)
class Cell:
    """One fault: the victim gets the signal while the run is in the phase."""

    victim: str
    phase: str
    signal: str
    mode: str = "none"

    @property
    def row(self) -> Row:
        """The promise and how it is kept."""
        return ROWS[self.victim, self.signal]

    def __str__(self) -> str:
        return f"{self.victim}-{self.phase}-{self.signal}-{self.mode}".replace(" ", "_")


_OVERLAPPED = ("driver", "policy rank", "engine", "environment"), ("sampling", "training", "saving"), ("SIGKILL",)
"""Faults that also hit work of the other side, or groups that wait, with `ahead`."""
_STOPPED = ("policy rank", "engine"), ("training",), ("SIGSTOP",)

_WITH_RUNNER = ("rollout runner", "engine", "policy rank"), ("sampling", "training", "saving"), ("SIGKILL",)
"""Faults that also hit runners while they sample ahead."""


def _mode(victim: str) -> str:
    return "runner" if victim == "rollout runner" else "none"


CELLS = [Cell(*fault, _mode(fault[0])) for fault in itertools.product(VICTIMS, PHASES, SIGNALS)]
CELLS += [Cell(*fault, "ahead") for fault in (*itertools.product(*_OVERLAPPED), *itertools.product(*_STOPPED))]
CELLS += [Cell(*fault, "runner-ahead") for fault in itertools.product(*_WITH_RUNNER)]
CELLS += [
    Cell("rollout runner", "training", "SIGSTOP", "runner-ahead"),
    Cell("engine", "sampling", "SIGSTOP", "runner"),
]
IN_CI = [
    Cell("policy rank", "training", "SIGKILL"),
    Cell("engine", "sampling", "SIGKILL"),
]
"""Cells that run with the other tests; `pytest tests/faults -m long` runs all others."""


def table() -> str:
    """Return the table of docs/reference/faults.md."""
    lines = [f"| process | signal | {' | '.join(PHASES)} | how |", f"|{'---|' * (3 + len(PHASES))}"]
    for (victim, signal), row in ROWS.items():
        cells = " | ".join(str(row.promise) for _ in PHASES)
        lines.append(f"| {victim} | {signal} | {cells} | {row.how} |")
    return "\n".join(lines)
