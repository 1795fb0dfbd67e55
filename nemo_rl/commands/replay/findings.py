"""The result of a comparison: a stage for each part of a step, each with its differences."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

NOT_RECORDED = "the run did not record them (logger.record_modules)"
"""Why the outputs of modules were not compared; the user's choice, so the verdict does not name it."""
_SHOWN = 5


@dataclass(frozen=True)
class Difference:
    """One thing that differs."""

    name: str
    """Name of the key, sample, module or tensor."""
    text: str
    """Description of the difference, in a sentence."""
    size: float | None = None
    """Size of the difference, in the unit of the stage; None if it has none."""


@dataclass(frozen=True)
class Stage:
    """The comparison of one part of a step."""

    name: str
    """Name of the part."""
    compared: int = 0
    """Number of values, rows or tensors that were compared."""
    unit: str = ""
    """Unit of the sizes."""
    differences: Sequence[Difference] = ()
    """Differences larger than the tolerance, in the order in which the step computes the values."""
    tolerance: float = 0.0
    """Largest size that counts as equal; 0: bits are compared."""
    largest: float = 0.0
    """Size of the largest difference, including those within the tolerance."""
    cause: str = ""
    """Advice where to look if this stage is the first that differs."""
    skipped: str | None = None
    """Reason why nothing was compared; None if something was."""


@dataclass(frozen=True)
class Comparison:
    """The comparison of a step."""

    step: int
    """Number of the step."""
    stages: Sequence[Stage]
    """Its parts in order."""
    is_exact: bool
    """Whether bits are compared."""
    notes: Sequence[str] = field(default_factory=list)
    """Differences that do not count as one of the step, such as versions."""

    @property
    def first(self) -> Stage | None:
        """The first stage that differs; None if the step is equal."""
        return next((stage for stage in self.stages if stage.differences), None)

    @property
    def verdict(self) -> str:
        """The result in a sentence or two."""
        how = "bit for bit" if self.is_exact else "within the tolerances"
        if self.first is None:
            return f"Step {self.step} is equal to that of the run, {how}.{self._not_compared}"
        later = [stage for stage in self.stages if stage.differences and stage is not self.first]
        end = "All numbers are equal nevertheless." if self.first.name == "configuration" and not later else ""
        text = f"Step {self.step} differs. The first difference: {self.first.differences[0].text}. {end}".strip()
        return f"{text} {self.first.cause}".strip()

    @property
    def _not_compared(self) -> str:
        """The parts of an equal step that were left out, as a sentence; "" if there are none."""
        skipped = [
            f"{stage.name} ({stage.skipped})" for stage in self.stages if stage.skipped not in (None, NOT_RECORDED)
        ]
        return f" Not compared: {'; '.join(skipped)}." if skipped else ""

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "step": self.step,
            "equal": self.first is None,
            "exact": self.is_exact,
            "verdict": self.verdict,
            "first": None if self.first is None else _first(self.first),
            "stages": [_stage(stage) for stage in self.stages],
            "notes": list(self.notes),
        }


def _first(stage: Stage) -> dict[str, Any]:
    first = stage.differences[0]
    return {"stage": stage.name} | _difference(first)


def _stage(stage: Stage) -> dict[str, Any]:
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
    """Return a size for JSON, in which an infinite one is a string."""
    return size if size is None or math.isfinite(size) else str(size)
