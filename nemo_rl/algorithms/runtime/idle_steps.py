"""Count the steps without an update, log the reason, and end the run after too many in a row."""

import logging
from collections.abc import Mapping

from nemo_rl.utils.errors import NemoRLError, NonFiniteError, NothingToLearnError

logger = logging.getLogger(__name__)

_CAUSES = ("reward_error_rate", "truncation_rate", "prompt_too_long_rate", "num_masked_seqs")

_NOT_FINITE = "the gradients of all of its updates were not finite"
_LOOK_AT_SAMPLES = (
    "Inspect the samples of these steps, fix what excludes them from the loss, and start the same command again."
)
_LOOK_AT_NUMBERS = (
    "The warnings above name the tensors. A lower learning rate, clipping (policy.max_grad_norm) or another precision "
    "are usual remedies; look at the data of these steps too."
)


class IdleSteps:
    """Counter of the steps in a row without an update.

    Args:
        most: number of idle steps in a row that ends the run.

    Attributes:
        in_a_row: idle steps since the last one that trained.
    """

    def __init__(self, most: int) -> None:
        self.in_a_row = 0
        self._most = most

    def note(self, step: int, metrics: Mapping[str, float]) -> NemoRLError | None:
        """Count a finished step and warn if it was idle.

        Args:
            step: number of the step.
            metrics: metrics of the step; `num_updates` is how many updates it made, `global_valid_seqs` how many of
                its sequences count (`Policy.train`).

        Returns:
            The error that ends the run if there were too many idle steps in a row, else None.
        """
        nothing_counts = metrics.get("global_valid_seqs") == 0
        if not nothing_counts and made_update(metrics):
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        reason = _reason(metrics) if nothing_counts else _NOT_FINITE
        message = f"Step {step} trained nothing: {reason}. Weights and optimizer are as they were. "
        message += f"Such steps in a row: {self.in_a_row} of max_idle_steps={self._most}"
        logger.warning("%s.", message)
        if self.in_a_row < self._most:
            return None
        if nothing_counts:
            return NothingToLearnError(f"{message}. {_LOOK_AT_SAMPLES}")
        return NonFiniteError(f"{message}. {_LOOK_AT_NUMBERS}")


def made_update(metrics: Mapping[str, float]) -> bool:
    """Return whether a step made an update; without the metric `num_updates` it is assumed that it did."""
    return metrics.get("num_updates", 1.0) > 0 and metrics.get("global_valid_seqs") != 0


def _reason(metrics: Mapping[str, float]) -> str:
    causes = ", ".join(f"{name}={metrics[name]:.4g}" for name in _CAUSES if metrics.get(name))
    return f"none of its samples counts in the loss{causes and f' ({causes})'}"
