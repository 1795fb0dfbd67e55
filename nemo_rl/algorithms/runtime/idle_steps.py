"""Steps that train nothing, because nothing in them counts in the loss: say so, and know when it is too many."""

import logging
from collections.abc import Mapping

from nemo_rl.utils.errors import NothingToLearnError

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

    def note(self, step: int, metrics: Mapping[str, float]) -> NothingToLearnError | None:
        """Take in a finished step and warn if it was idle; an error if it was one too many.

        Args:
            step: its number.
            metrics: of the step; `global_valid_seqs` is 0 where no update was made (`Policy.train`).
        """
        if metrics.get("global_valid_seqs") != 0:
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        causes = ", ".join(f"{name}={metrics[name]:.4g}" for name in _CAUSES if metrics.get(name))
        message = (
            f"Step {step} trained nothing: none of its samples counts in the loss{causes and f' ({causes})'}. Weights "
            f"and optimizer are as they were. Such steps in a row: {self.in_a_row} of max_idle_steps={self._most}"
        )
        logger.warning("%s.", message)
        if self.in_a_row < self._most:
            return None
        return NothingToLearnError(
            f"{message}. Look at the samples of these steps, mend what keeps them out of the loss, and start the same "
            "command again."
        )
