"""Decide what follows when a group of answers could not be sampled: another attempt, a skipped prompt, or the end.

A group fails when an engine cannot be kept running or a deadline passes. What environments raise is recorded with its
sample and fails no group. Invariant: a prompt is skipped only if the configuration allows it, and each skipped prompt
is counted and logged.
"""

import logging
from dataclasses import dataclass, field

from nemo_rl.config import OverlapConfig
from nemo_rl.utils.errors import GenerationError

logger = logging.getLogger(__name__)


@dataclass
class GroupFailures:
    """Counts the failures of groups."""

    overlap: OverlapConfig
    num_skipped: int = 0
    """Prompts that were skipped."""
    _in_a_row: int = field(default=0, init=False)

    def note_success(self) -> None:
        """Note that a group was finished: the count of failures in a row begins again."""
        self._in_a_row = 0

    def pause_before_next(self, attempt: int, failure: Exception) -> float | None:
        """Return the seconds to wait before a failed group is sampled again; None: skip its prompt.

        Args:
            attempt: number of the attempt that failed, from 1.
            failure: why it failed; raised if the run has to end.
        """
        keys = self.overlap.group_failures
        most = keys.max_attempts_per_prompt
        if most is None:
            self._in_a_row += 1
            if self._in_a_row > self.overlap.max_generation_failures:
                raise failure
            count = f"{self._in_a_row} of {self.overlap.max_generation_failures} in a row"
        elif attempt < most:
            count = f"attempt {attempt} of {most}"
        else:
            self._skip(failure)
            return None
        pause_s = min(keys.backoff_base_s * 2 ** (attempt - 1), keys.max_backoff_s)
        logger.warning("A group failed and is sampled again after %g s (%s): %s", pause_s, count, failure)
        return pause_s

    def _skip(self, failure: Exception) -> None:
        keys = self.overlap.group_failures
        if self.num_skipped >= keys.max_skipped_prompts:
            if keys.max_skipped_prompts:
                failure.add_note(
                    f"{self.num_skipped} prompts were skipped already, as many as "
                    "overlap.group_failures.max_skipped_prompts allows."
                )
            raise failure
        self.num_skipped += 1
        logger.warning(
            "A prompt is skipped after %d failed attempts (%d of at most %d in the run): %s",
            keys.max_attempts_per_prompt,
            self.num_skipped,
            keys.max_skipped_prompts,
            failure,
        )

    def check_step(self, num_groups: int, num_skipped: int) -> None:
        """Check that few enough groups of a step were skipped.

        Raises:
            GenerationError: too many.
        """
        least = self.overlap.group_failures.min_step_fraction
        if num_groups - num_skipped < least * num_groups:
            raise GenerationError(
                f"{num_skipped} of the {num_groups} prompts of a step were skipped, because their answers could not be "
                f"sampled; overlap.group_failures.min_step_fraction={least:g} asks for more. The warnings above say "
                "why. Fix the cause and start the same command again."
            )
