"""Read the metrics of a run into curves, also while the run writes them."""

from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from nemo_rl.commands.report.run_files import TRAINING, RunFiles, finite
from nemo_rl.config.base.names import MACHINE_METRICS

_LARGEST = 2**53
"""Largest step of a curve, because a browser does not represent larger integers exactly."""
_OF_SECONDS = f"{MACHINE_METRICS}/"
"""Beginning of the names of curves whose steps are seconds."""


@dataclass
class Curve:
    """Curve of one metric."""

    steps: list[int] = field(default_factory=list)
    """Steps with a value, in ascending order."""
    values: list[float | None] = field(default_factory=list)
    """One value for each step, or None if it is not finite."""
    times: list[float | None] = field(default_factory=list)
    """Time of each value in seconds since 1970, without pauses of the run, or None if the file has no times."""

    def add(self, step: int, value: float | None, time: float | None) -> None:
        """Add the value of a step. If a restart repeats the step, replace its value and remove all later ones."""
        self.cut(step)
        self.steps.append(step)
        self.values.append(finite(value))
        self.times.append(time)

    def cut(self, step: int) -> None:
        """Remove the values of a step and of all later steps."""
        while self.steps and self.steps[-1] >= step:
            for column in (self.steps, self.values, self.times):
                column.pop()

    @property
    def known(self) -> list[tuple[int, float]]:
        """Steps with finite values, and these values."""
        return [(step, value) for step, value in zip(self.steps, self.values, strict=True) if value is not None]

    def as_json(self) -> dict[str, Any]:
        """Return the columns, with the values rounded to the digits that a chart can show."""
        values = [None if value is None else float(f"{value:.7g}") for value in self.values]
        return {"steps": self.steps, "values": values, "times": self.times}


@dataclass
class Curves:
    """All metrics of a run, by `<prefix>/<name>`."""

    run: RunFiles
    by_name: dict[str, Curve] = field(default_factory=dict)
    """The curves that were read so far."""
    trained_at: float | None = None
    """Seconds since 1970 of the last training step; None without a training step, or if the file has no times."""
    _read_to: dict[Path, int] = field(default_factory=dict)
    """Position in the file of metrics up to which it was read, by folder."""
    _gaps_s: float = 0.0
    """Number of seconds between the parts of a resumed run, which are subtracted from times."""
    _seconds_before: int = 0
    """Last second of curves whose steps are seconds, before the part of the run that is read now."""
    _last_trained: int = 0
    _repeated: set[str] = field(default_factory=set)
    """Curves whose steps decreased since the last training step."""

    def read(self) -> bool:
        """Read the new lines since the last call, and return whether there were any."""
        has_read = False
        for part in self.run.parts:
            for row, end in part.metric_rows(self._read_to.get(part.folder, 0)):
                prefix, step, time = str(row.get("prefix", "")), row.get("step"), finite(row.get("time"))
                if part.folder not in self._read_to and self._read_to:
                    self._begin(part, time)
                self._read_to[part.folder], has_read = end, True
                if not isinstance(step, int) or abs(step) > _LARGEST:
                    continue
                if prefix == TRAINING:
                    self._train(step, time)
                for name, value in row["metrics"].items():
                    if value is None or isinstance(value, (int, float)):
                        self._add(f"{prefix}/{name}" if prefix else name, step, value, time)
        return has_read

    def _begin(self, part: RunFiles, time: float | None) -> None:
        """Prepare for the lines of a part of the run that continues an earlier part."""
        started, last = finite(part.record().get("started")) or time, self.last_time
        if started is not None and last is not None:
            self._gaps_s = max(started - last, 0.0)
        seconds = (curve.steps[-1] for name, curve in self.by_name.items() if name.startswith(_OF_SECONDS))
        self._seconds_before = max(seconds, default=0)

    def _train(self, step: int, time: float | None) -> None:
        """Remove the values of steps that the run repeats because it resumed from an earlier checkpoint."""
        if step < self._last_trained:
            for name, curve in self.by_name.items():
                if not name.startswith(_OF_SECONDS):
                    curve.cut(step + 1 if name in self._repeated else step)
            self.by_name = {name: curve for name, curve in self.by_name.items() if curve.steps}
        self._last_trained, self.trained_at = step, time
        self._repeated.clear()

    def _add(self, name: str, step: int, value: float | None, time: float | None) -> None:
        curve = self.by_name.setdefault(name, Curve())
        if name.startswith(_OF_SECONDS):
            step += self._seconds_before
        if not curve.steps or curve.steps[-1] >= step:
            self._repeated.add(name)
        curve.add(step, value, None if time is None else time - self._gaps_s)

    def get(self, name: str) -> Curve:
        """Return a curve, which is empty if the metric does not exist."""
        return self.by_name.get(name, Curve())

    @property
    def last_time(self) -> float | None:
        """Seconds since 1970 of the last metric, or None if the file has no times."""
        return max((curve.times[-1] or 0.0 for curve in self.by_name.values()), default=0.0) or None

    @property
    def last_step(self) -> int:
        """The last training step with metrics, or 0 if there is none."""
        return max((curve.steps[-1] for name, curve in self.by_name.items() if name.startswith("train/")), default=0)


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
        step, their `sum`, `median` and `share` of the total. Time outside of all phases is also a phase. Empty
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
