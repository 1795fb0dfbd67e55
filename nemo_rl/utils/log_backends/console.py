"""Log one line per step on the console, with a progress bar on a terminal.

The records go through `utils.logging_setup`, which prints them above the bar. Invariant: the line shows the same
numbers that the trackers get.
"""

import logging
from collections.abc import Mapping
from typing import Any

from nemo_rl.host.console_bars import Bar
from nemo_rl.utils.log_backends.tracker import LoggerInterface, Metrics, to_scalars

logger = logging.getLogger("nemo_rl.console")

_SHOWN = (
    ("train", "loss"),
    ("train", "reward"),
    ("train", "accuracy"),
    ("train", "grad_norm"),
    ("train", "lr"),
    ("train", "gen_kl_error"),
    ("train", "token_mult_prob_error"),
    ("train", "mean_gen_tokens_per_sample"),
    ("train", "num_reward_errors"),
    ("timing/train", "generation"),
    ("timing/train", "policy_training"),
    ("timing/train", "total_step_time"),
)
_SHORT = {
    "token_mult_prob_error": "mult_err",
    "gen_kl_error": "gen_kl",
    "mean_gen_tokens_per_sample": "len",
    "total_step_time": "step_s",
    "generation": "gen_s",
    "policy_training": "train_s",
}
_ROUGH = ("timing/train",)
_ONLY_IF_ANY = ("num_reward_errors",)
_LAST_PREFIX = "performance"


class ConsoleLogger(LoggerInterface):
    """Log one line per step when the step's last group of metrics has arrived."""

    shows_repeated = True

    def __init__(self, total_steps: int | None = None):
        self._pending: dict[tuple[str, str], float] = {}
        self._total = total_steps
        self._bar = Bar("step", total_steps) if total_steps else None

    def log_metrics(
        self, metrics: Metrics, step: int, prefix: str = "", step_metric: str | None = None, step_finished: bool = False
    ) -> None:
        """Show metrics. A group named `performance` also ends a step."""
        self._pending |= {(prefix, name): value for name, value in to_scalars(metrics).items()}
        if prefix == _LAST_PREFIX or step_finished:
            self._print_step(step)

    def _print_step(self, step: int) -> None:
        given = [(prefix, name) for prefix, name in _SHOWN if (prefix, name) in self._pending]
        shown = [
            f"{_SHORT.get(name, name)}={self._pending[prefix, name]:.{3 if prefix in _ROUGH else 4}g}"
            for prefix, name in given
            if name not in _ONLY_IF_ANY or self._pending[prefix, name]
        ]
        of_total = f"/{self._total}" if self._total else ""
        logger.info("step %d%s  %s", step, of_total, "  ".join(shown))
        self._pending = {}
        if self._bar is not None:
            self._bar.show(step)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Do nothing, because the configuration is stored with the run."""

    def close(self) -> None:
        """Remove the progress bar."""
        if self._bar is not None:
            self._bar.close()
