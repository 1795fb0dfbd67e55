"""Steps without an update: say why there was none, and know when there are too many in a row."""

import logging
from collections.abc import Mapping

from nemo_rl.utils.errors import NemoRLError, NonFiniteError, NothingToLearnError

logger = logging.getLogger(__name__)

_CAUSES = ("reward_error_rate", "truncation_rate", "prompt_too_long_rate", "num_masked_seqs")


class IdleSteps:
    """Counts the steps in a row without an update.

    Args:
        most: so many are too many.

    Attributes:
        in_a_row: idle steps since the last one that trained.
    """

    def __init__(self, most: int) -> None:
        self.in_a_row = 0
        self._most = most

    def note(self, step: int, metrics: Mapping[str, float]) -> NemoRLError | None:
        """Take in a finished step and warn if it was idle; an error if it was one too many.

        Args:
            step: its number.
            metrics: of the step; `num_updates` is how many updates it made, `global_valid_seqs` how many of its
                sequences count (`Policy.train`).
        """
        nothing_counts = metrics.get("global_valid_seqs") == 0
        if not nothing_counts and made_update(metrics):
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        count = f"Such steps in a row: {self.in_a_row} of max_idle_steps={self._most}"
        error = _nothing_counted(step, metrics, count) if nothing_counts else _nothing_was_finite(step, count)
        if self.in_a_row >= self._most:
            return error
        logger.warning("%s", error)
        return None


def made_update(metrics: Mapping[str, float]) -> bool:
    """Whether a step made an update; one whose policy does not say did."""
    return metrics.get("num_updates", 1.0) > 0 and metrics.get("global_valid_seqs") != 0


def _nothing_counted(step: int, metrics: Mapping[str, float], count: str) -> NothingToLearnError:
    causes = ", ".join(f"{name}={metrics[name]:.4g}" for name in _CAUSES if metrics.get(name))
    return NothingToLearnError(
        f"Step {step} trained nothing: none of its samples counts in the loss{causes and f' ({causes})'}. Weights and "
        f"optimizer are as they were. {count}. Inspect the samples of these steps, fix what excludes them from the "
        "loss, and start the same command again."
    )


def _nothing_was_finite(step: int, count: str) -> NonFiniteError:
    return NonFiniteError(
        f"Step {step} trained nothing: the gradients of all of its updates were not finite. Weights and optimizer are "
        f"as they were. {count}. The warnings above name the tensors. A lower learning rate, gradient clipping "
        "(policy.max_grad_norm) or another precision are usual remedies; look at the data of these steps too."
    )
