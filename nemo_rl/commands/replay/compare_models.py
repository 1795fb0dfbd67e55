"""Compare the outputs of modules, gradients and weights of a step by their fingerprints, and its norms.

Distances are estimates (`Fingerprint.distance`). Whether bits are equal is decided by checksums.
"""

import math
from collections.abc import Iterable, Mapping

from nemo_rl.commands.replay.findings import NOT_RECORDED, Compared, Difference, Tolerances
from nemo_rl.commands.replay.records import Step
from nemo_rl.models.policy.update_records import UpdateRecord
from nemo_rl.models.training.tensor_checks import Fingerprint, added

_FLOOR = 0.01
"""Smallest norm for relative differences, as a share of the norm of the whole model."""
_OTHER_START = (
    "The step does not begin as in the run: the checkpoint is another one, or the model that policy.model_name names "
    "has changed."
)
_FORWARD = (
    "This is the first module whose output differs. Samples and weights are equal, so the computation of this module "
    "differs, or the code that calls it gives it other inputs."
)
_BACKWARD = "The loss is equal, so the backward pass differs from this tensor on, or the sum of gradients over ranks."
_RATE = "The learning rate follows from policy.optimizer, policy.scheduler and their state in the checkpoint."
_GRAD_NORM = "The gradients are equal, so what adds up their norm over tensors and ranks differs."
_OPTIMIZER = (
    "The gradients, their norm and the learning rate are equal, so clipping, the optimizer or its state differ."
)
_NOT_SHOWN = "the training backend does not show them"
_RATE_LIMIT = 1e-9
"""Largest relative difference of learning rates that counts as equal if bits are not compared."""

type Prints = Mapping[str, Fingerprint]


def old_weights(recorded: Step, repeated: Step) -> Compared:
    """Compare the weights before the step, whose bits must be equal for any division among ranks."""
    name = "weights before the step"
    if not recorded.updates or not repeated.updates:
        return Compared(name, skipped="no update was made, because no token counts")
    before, now = recorded.updates[0].before, repeated.updates[0].before
    if not before and not now:
        return Compared(name, skipped=_NOT_SHOWN)
    found, largest = _tensors(before, now, before, 0.0, "weight")
    return Compared(name, len(before), "relative", found, 0.0, largest, _OTHER_START)


def modules(before: UpdateRecord, now: UpdateRecord, title: str, limits: Tolerances) -> Compared:
    """Find the first module, in the order in which calls end, whose output differs."""
    name = f"outputs of modules{title}"
    if not any(before.modules):
        return Compared(name, skipped=NOT_RECORDED)
    if _calls(before) != _calls(now):
        return Compared(name, skipped="modules are called in another order, or ranks divide the work differently")
    found: list[tuple[int, Difference]] = []
    largest = 0.0
    for rank, (old, new) in enumerate(zip(before.modules, now.modules, strict=True)):
        for number, ((module, its), (_, mine)) in enumerate(zip(old, new, strict=True)):
            size = _relative(its.distance(mine), max(its.norm, mine.norm))
            largest = max(largest, size)
            if (its.checksum != mine.checksum) if limits.is_exact else size > limits.modules:
                what = f"the forward pass of module {module} differs, by {size:.1e} of its output (rank {rank})"
                found.append((number, Difference(module, what, size)))
    ordered = [difference for _, difference in sorted(found, key=lambda pair: pair[0])]
    return Compared(name, sum(map(len, before.modules)), "relative", ordered, limits.modules, largest, _FORWARD)


def _calls(update: UpdateRecord) -> list[list[str]]:
    return [[module for module, _ in calls] for calls in update.modules]


def gradients(before: UpdateRecord, now: UpdateRecord, title: str, limits: Tolerances) -> Compared:
    """Compare the gradients from the last tensors of the model to the first, as the backward pass computes them."""
    name, old = f"gradients{title}", dict(reversed(before.gradients.items()))
    if not old and not now.gradients:
        return Compared(name, skipped=_NOT_SHOWN)
    found, largest = _tensors(old, now.gradients, old, limits.gradients, "gradient")
    return Compared(name, len(old), "relative", found, limits.gradients, largest, _BACKWARD)


def norm_and_rate(before: UpdateRecord, now: UpdateRecord, title: str, limits: Tolerances) -> Compared:
    """Compare the gradient norm and the learning rate of an update. NaN counts as equal to NaN."""
    found, sizes, causes = [], [], []
    for name, old, new, limit, cause in (
        ("learning rate", before.lr, now.lr, 0.0 if limits.is_exact else _RATE_LIMIT, _RATE),
        ("gradient norm", before.grad_norm, now.grad_norm, limits.gradients, _GRAD_NORM),
    ):
        same = old == new or (math.isnan(old) and math.isnan(new))
        sizes.append(0.0 if same else _relative(abs(old - new), abs(old)))
        if sizes[-1] > limit:
            text = f"the {name} differs: {old:.8g} in the run, {new:.8g} now"
            found.append(Difference(name, text, sizes[-1]))
            causes.append(cause)
    name, cause = f"learning rate and gradient norm{title}", next(iter(causes), "")
    return Compared(name, len(sizes), "relative", found, limits.gradients, max(sizes), cause)


def new_weights(before: UpdateRecord, now: UpdateRecord, title: str, limits: Tolerances) -> Compared:
    """Compare the weights after the update by distances relative to the change that the update made."""
    name, unit = f"weights after the step{title}", "relative to the update"
    if not before.after and not now.after:
        return Compared(name, skipped=_NOT_SHOWN)
    moved = {
        name: Fingerprint(0, weight.distance(before.before[name]) ** 2)
        for name, weight in before.after.items()
        if name in before.before
    }
    found, largest = _tensors(before.after, now.after, moved, limits.weights, "new weight")
    return Compared(name, len(before.after), unit, found, limits.weights, largest, _OPTIMIZER)


def _tensors(before: Prints, now: Prints, scales: Prints, limit: float, what: str) -> tuple[list[Difference], float]:
    """Compare tensors by name, and return the differences and the largest size.

    A size is relative to the norm of the tensor in `scales`, but at least to `_FLOOR` of the norm of all of them.
    """
    floor = _FLOOR * _norm(scales.values())
    found, largest = [], 0.0
    for name, old in before.items():
        new = now.get(name)
        if new is None:
            found.append(Difference(name, f"the {what} of {name} is missing now"))
            continue
        size = _relative(old.distance(new), max(scales[name].norm if name in scales else 0.0, floor))
        largest = max(largest, size)
        if old.checksum != new.checksum and (limit == 0 or size > limit):
            text = f"the {what} of {name} differs, by {size:.1e} (norm {old.norm:.6g}, now {new.norm:.6g})"
            found.append(Difference(name, text, size))
    found += [Difference(name, f"the {what} of {name} is missing in the run") for name in now if name not in before]
    return found, largest


def _norm(prints: Iterable[Fingerprint]) -> float:
    total = added(prints).square_sum
    return math.sqrt(total) if math.isfinite(total) else math.inf


def _relative(distance: float, norm: float) -> float:
    if distance == 0:
        return 0.0
    return distance / norm if norm > 0 and math.isfinite(distance) and math.isfinite(norm) else math.inf
