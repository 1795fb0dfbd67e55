"""Define the result of a comparison: a stage for each part of a step, each with its differences."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from nemo_rl.commands.replay.records import Step
from nemo_rl.config.rules.resume import ChangedKey
from nemo_rl.utils.errors import ReplayError

NOT_RECORDED = "the run did not record them (logger.record_modules)"
"""Reason why the outputs of modules were not compared. The user chose this, so the verdict does not name it."""
_SHOWN = 5


@dataclass(frozen=True)
class Difference:
    """Description of one difference."""

    name: str
    """Name of the key, sample, module or tensor."""
    text: str
    """Description of the difference, in a sentence."""
    size: float | None = None
    """Size of the difference, in the unit of the stage, or None if the difference has no size."""


@dataclass(frozen=True)
class Compared:
    """Comparison of one part of a step."""

    name: str
    """Name of the part."""
    compared: int = 0
    """Number of values, rows or tensors that were compared."""
    unit: str = ""
    """Unit of the sizes."""
    differences: Sequence[Difference] = ()
    """Differences above the tolerance, in the order in which the step computes the values."""
    tolerance: float = 0.0
    """Largest size that counts as equal, or 0 to compare bits."""
    largest: float = 0.0
    """Size of the largest difference, including those within the tolerance."""
    cause: str = ""
    """Advice where to search if this stage is the first that differs."""
    skipped: str | None = None
    """Reason why nothing was compared, or None if something was compared."""


@dataclass(frozen=True)
class Comparison:
    """Comparison of a step."""

    step: int
    """Number of the step."""
    stages: Sequence[Compared]
    """Parts of the step, in order."""
    is_exact: bool
    """Whether bits are compared."""
    notes: Sequence[str] = field(default_factory=list)
    """Differences that do not count as differences of the step, such as versions."""

    @property
    def first(self) -> Compared | None:
        """First stage that differs, or None if the step is equal."""
        return next((stage for stage in self.stages if stage.differences), None)

    @property
    def verdict(self) -> str:
        """Result of the comparison in one or two sentences."""
        how = "bit for bit" if self.is_exact else "within the tolerances"
        if self.first is None:
            return f"Step {self.step} is equal to that of the run, {how}.{self._not_compared}"
        later = [stage for stage in self.stages if stage.differences and stage is not self.first]
        end = "All numbers are equal nevertheless." if self.first.name == "configuration" and not later else ""
        text = f"Step {self.step} differs. The first difference: {self.first.differences[0].text}. {end}".strip()
        return f"{text} {self.first.cause}".strip()

    @property
    def _not_compared(self) -> str:
        """Return a sentence on the parts of an equal step that were not compared, or "" if there are none."""
        skipped = [
            f"{stage.name} ({stage.skipped})" for stage in self.stages if stage.skipped not in (None, NOT_RECORDED)
        ]
        return f" Not compared: {'; '.join(skipped)}." if skipped else ""

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as plain values."""
        return {
            "step": self.step,
            "equal": self.first is None,
            "exact": self.is_exact,
            "verdict": self.verdict,
            "first": None if self.first is None else _first(self.first),
            "stages": [_stage(stage) for stage in self.stages],
            "notes": list(self.notes),
        }


def _first(stage: Compared) -> dict[str, Any]:
    first = stage.differences[0]
    return {"stage": stage.name} | _difference(first)


def _stage(stage: Compared) -> dict[str, Any]:
    return {
        "name": stage.name,
        "compared": stage.compared,
        "differing": len(stage.differences),
        "tolerance": stage.tolerance,
        "unit": stage.unit,
        "largest": _number(stage.largest),
        "skipped": stage.skipped,
        "differences": [_difference(each) for each in stage.differences[:_SHOWN]],
    }


def _difference(each: Difference) -> dict[str, Any]:
    return {"name": each.name, "text": each.text, "size": _number(each.size)}


def _number(size: float | None) -> float | str | None:
    """Return a size for JSON, with an infinite size as a string."""
    return size if size is None or math.isfinite(size) else str(size)


DIVISION = "layout of passes and memory"
"""Group of keys in `config.rules.resume.APPLIED` that decide which rank computes what."""
WITHOUT_INFLUENCE = (
    "length, validation and early stop",
    "saving and logging",
    "machines, deadlines and processes",
    "engines and weight sync",
    "limits and defaults of data sets",
)
"""Groups of keys in `APPLIED` that a step does not read once it has rollouts and weights."""
_SHOWN_FILES = 20
_OUTSIDE_A_STEP = (
    *("doctor/", "environments/", "evals/", "launch/", "models/generation/", "optimizations/", "regrade/", "replay/"),
    *("report/", "sizing/", "weight_sync/"),
)
_NUMBERS = ("torch", "transformers", "numpy", "flash-attn", "triton")
"""Packages whose versions may change the last bits."""


@dataclass(frozen=True)
class Tolerances:
    """Largest differences that count as equal (0 for equal bits)."""

    advantages: float = 0.0
    """Absolute difference of an advantage."""
    logprobs: float = 0.0
    """Absolute difference of the log-probability of a token."""
    loss: float = 0.0
    """Difference of the loss, relative to the recorded value, or absolute if that is below 1."""
    modules: float = 0.0
    """Distance of outputs relative to their norm."""
    gradients: float = 0.0
    """Distance of a tensor relative to its norm."""
    weights: float = 0.0
    """Distance of a new tensor relative to the distance that the update moved it."""

    @property
    def is_exact(self) -> bool:
        """True if bits are compared."""
        return self == Tolerances()


FLOAT32 = Tolerances(advantages=1e-5, logprobs=1e-4, loss=1e-4, modules=1e-4, gradients=1e-3, weights=1e-2)
OTHER_PRECISIONS = Tolerances(advantages=1e-5, logprobs=0.1, loss=5e-2, modules=3e-2, gradients=0.2, weights=0.5)


def tolerances(precision: str, factor: float = 1.0) -> Tolerances:
    """Return the tolerances of a precision, each multiplied by a factor."""
    stated = FLOAT32 if precision == "float32" else OTHER_PRECISIONS
    return Tolerances(**{each.name: getattr(stated, each.name) * factor for each in fields(stated)})


def factor_of(option: str) -> float | None:
    """Return the factor of the tolerances that `--tolerance` names: 0 compares bits, None lets `chosen` decide.

    Raises:
        ReplayError: the option is wrong.
    """
    if option in ("auto", "exact"):
        return None if option == "auto" else 0.0
    try:
        factor = float(option)
    except ValueError:
        factor = -1.0
    if not 0 < factor < math.inf:
        raise ReplayError(f"--tolerance={option} must be auto, exact or a number above 0.")
    return factor


def chosen(
    factor: float | None, recorded: Step, repeated: Step, changed: list[ChangedKey]
) -> tuple[Tolerances, list[str]]:
    """Return the tolerances of a comparison, and the notes of `circumstances`.

    Args:
        factor: factor of the tolerances, as `factor_of` returns it. If None, 0 without notes, or else 1.
        repeated: the repeated step.
        changed: keys that differ.
    """
    notes = circumstances(recorded, repeated, changed)
    if factor is None:
        factor = 1.0 if notes else 0.0
    return tolerances(str(recorded.summary["config"]["policy"]["precision"]), factor), notes


def circumstances(recorded: Step, repeated: Step, changed: list[ChangedKey]) -> list[str]:
    """Return notes on differences that may change only the last bits: versions, devices, layout of the ranks."""
    before, now = recorded.summary, repeated.summary
    notes = [
        f"{name}: {_get(before['environment'], name)} in the run, {_get(now['environment'], name)} now"
        for name in _NUMBERS
        if _get(before["environment"], name) != _get(now["environment"], name)
    ]
    devices = [
        sorted({device for update in step.updates for device in update.devices}) for step in (recorded, repeated)
    ]
    if devices[0] != devices[1]:
        notes.append(f"device: {', '.join(devices[0])} in the run, {', '.join(devices[1])} now")
    if before["layout"] != now["layout"]:
        notes.append(f"ranks: {_layout(before['layout'])} in the run, {_layout(now['layout'])} now")
    notes += [f"{key.key}: {key.before} in the run, {key.now} now" for key in changed if key.about == DIVISION]
    return notes


def _get(versions: Mapping[str, Any], name: str) -> str:
    return str(versions.get(name, "absent"))


def _layout(layout: Mapping[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in layout.items() if size > 1) or "1"


def code_notes(recorded: Step, repeated: Step) -> list[str]:
    """Return one note with the files of the library that differ from the run's files, or none if all are equal."""
    before, now = recorded.summary["code"], repeated.summary["code"]
    names = (name for name in sorted({*before, *now}) if not name.startswith(_OUTSIDE_A_STEP))
    changed = [name for name in names if before.get(name) != now.get(name)]
    if not changed:
        return []
    more = f" and {len(changed) - _SHOWN_FILES} more" if len(changed) > _SHOWN_FILES else ""
    return [f"files of nemo_rl that have changed since the run: {', '.join(changed[:_SHOWN_FILES])}{more}"]
