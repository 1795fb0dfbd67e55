"""Bounds of rollouts: how many tokens a turn may have, and which bound has ended an episode."""

from dataclasses import dataclass

from nemo_rl.experience.trajectory import Ending, Trajectory


@dataclass(frozen=True)
class RolloutLimits:
    """Bounds of a rollout. The tokens of a single turn are bounded by `SamplingParams.max_new_tokens`."""

    max_sequence_length: int
    """Tokens of prompt and all turns."""
    max_turns: int
    """Response turns."""
    timeout_s: float
    """Seconds for a whole collection, or for a group that is played alone."""
    max_episode_tokens: int | None = None
    """Tokens that the policy writes in all turns; None: no such bound."""

    def room(self, sample: Trajectory) -> int:
        """Return the largest number of tokens that a sample's next response may have, not regarding the turn's own."""
        room = self.max_sequence_length - sample.length
        if self.max_episode_tokens is None:
            return room
        return min(room, self.max_episode_tokens - sample.response_length)

    def bound_of(self, sample: Trajectory) -> Ending:
        """Return the bound that a sample's last response, which was cut off, has reached."""
        if sample.length >= self.max_sequence_length:
            return Ending.SEQUENCE_LENGTH
        if self.max_episode_tokens is not None and sample.response_length >= self.max_episode_tokens:
            return Ending.EPISODE_TOKENS
        return Ending.TURN_TOKENS
