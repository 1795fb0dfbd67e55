"""Compute the seconds of each phase of a run, for each step and in total."""

from statistics import median
from typing import Any

from nemo_rl.commands.report.curves import Curves

_PREFIX = "timing/train/"
_TOTAL = f"{_PREFIX}total_step_time"
_OUTSIDE = "checkpointing"
"""A phase that is not in the total."""
_NESTED = ("exposed_generation", "idle/")
"""Prefixes of the names of times that are part of a phase."""
_REST = "the rest"


def phases_of(curves: Curves) -> dict[str, Any]:
    """Return the phases of the training steps, the longest first.

    Returns:
        `steps`; `total`, the seconds of each step with its checkpoint; and `phases`, each with `name`, `seconds` by
        step, their `sum`, `median` and `share` of the total. Time that belongs to no phase is a phase of its own. Empty
        if the run has no timings.
    """
    total = curves.get(_TOTAL)
    steps = [step for step, _ in total.known]
    seconds = [value for _, value in total.known]
    if not steps:
        return {}
    nested = tuple(_PREFIX + name for name in _NESTED)
    columns: dict[str, list[float]] = {}
    for name, curve in curves.by_name.items():
        if name.startswith(_PREFIX) and name != _TOTAL and not name.startswith(nested):
            known = dict(curve.known)
            columns[name.removeprefix(_PREFIX)] = [known.get(step, 0.0) for step in steps]
    for row, saving in enumerate(columns.get(_OUTSIDE, [])):
        seconds[row] += saving
    covered = [sum(column[row] for column in columns.values()) for row in range(len(steps))]
    columns[_REST] = [max(whole - part, 0.0) for whole, part in zip(seconds, covered, strict=True)]
    phases = [
        {
            "name": name,
            "seconds": [round(value, 4) for value in column],
            "sum": sum(column),
            "median": median(column),
            "share": sum(column) / max(sum(seconds), 1e-9),
        }
        for name, column in columns.items()
    ]
    return {"steps": steps, "total": seconds, "phases": sorted(phases, key=lambda phase: -float(str(phase["sum"])))}
