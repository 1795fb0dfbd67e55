"""Count steps in which a model makes no update, log the reason, and end the run after too many of them in a row."""

import logging
from collections.abc import Mapping

from nemo_rl.utils.errors import NemoRLError, NonFiniteError, NothingToLearnError

logger = logging.getLogger(__name__)

_CAUSES = ("reward_error_rate", "truncation_rate", "prompt_too_long_rate", "num_masked_seqs")

_LOOK_AT_SAMPLES = (
    "Inspect the samples of these steps, fix what excludes them from the loss, and start the same command again."
)
_LOOK_AT_NUMBERS = (
    "The warnings above name the tensors. A lower learning rate, clipping ({model}.max_grad_norm) or another precision "
    "are usual remedies; look at the data of these steps too."
)


class IdleSteps:
    """Counter of consecutive steps in which the policy, or the critic of PPO, made no update.

    Args:
        most: Number of consecutive idle steps that ends the run.
    """

    def __init__(self, most: int) -> None:
        self.in_a_row = 0
        """Number of idle steps since the last step in which all models were updated."""
        self._most = most

    def note(self, step: int, metrics: Mapping[str, float]) -> NemoRLError | None:
        """Count a finished step and warn if it was idle.

        Args:
            metrics: Metrics of the step: the numbers of updates of the policy (`num_updates`) and of the critic
                (`critic/num_updates`), and of sequences that count (`global_valid_seqs`, see `Policy.train`).

        Returns:
            The error that ends the run if there were too many idle steps in a row, or else None.
        """
        nothing_counts = metrics.get("global_valid_seqs") == 0
        critic_updates = metrics.get("critic/num_updates", 1.0)
        if made_update(metrics) and critic_updates > 0:
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        model = "policy" if metrics.get("num_updates", 1.0) == 0 else "value"
        if nothing_counts:
            what = f"trained nothing: {_reason(metrics)}"
        elif model == "policy":
            what = "trained nothing: the gradients of all of its updates were not finite"
        else:
            what = "did not train the critic: the gradients of all of its updates were not finite"
        whose = "Its weights" if model == "value" and not nothing_counts else "Weights"
        message = f"Step {step} {what}. {whose} and optimizer are as they were. "
        message += f"Such steps in a row: {self.in_a_row} of max_idle_steps={self._most}"
        logger.warning("%s.", message)
        if self.in_a_row < self._most:
            return None
        if nothing_counts:
            return NothingToLearnError(f"{message}. {_LOOK_AT_SAMPLES}")
        return NonFiniteError(f"{message}. {_LOOK_AT_NUMBERS.format(model=model)}")


def made_update(metrics: Mapping[str, float]) -> bool:
    """Return whether a step updated the policy. If the metric `num_updates` is missing, return True."""
    return metrics.get("num_updates", 1.0) > 0 and metrics.get("global_valid_seqs") != 0


def _reason(metrics: Mapping[str, float]) -> str:
    causes = ", ".join(f"{name}={metrics[name]:.4g}" for name in _CAUSES if metrics.get(name))
    return f"none of its samples counts in the loss{causes and f' ({causes})'}"
