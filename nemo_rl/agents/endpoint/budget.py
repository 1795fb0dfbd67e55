"""The answers and tokens that the program of one sample may still get.

Invariant: the tokens of all answers, also of those that are sampled at the same time, stay within the limits.
"""

from dataclasses import dataclass, replace

from nemo_rl.agents.endpoint.calls import CallError, CallRequest
from nemo_rl.experience.limits import RolloutLimits
from nemo_rl.experience.trajectory import Ending
from nemo_rl.models.generation.interfaces import SamplingParams


@dataclass(frozen=True)
class Grant:
    """The tokens that the answers of one request may have."""

    tokens: int
    """Tokens of each answer."""
    num_answers: int
    bound: Ending | None
    """The limit of the run that an answer with so many tokens has reached; None if the program has set it."""

    def applied(self, sampling: SamplingParams, stop: tuple[str, ...]) -> SamplingParams:
        """Return sampling parameters with this limit and further stop strings."""
        stops = tuple(dict.fromkeys((*sampling.stop_strings, *stop)))
        return replace(sampling, max_new_tokens=self.tokens, stop_strings=stops)


@dataclass
class Budget:
    """Answers and tokens that a program may still get."""

    limits: RolloutLimits
    """Limits of the sample."""
    max_new_tokens: int
    """Most tokens of one answer, as the run has it."""
    max_calls: int
    """Answers."""
    num_calls: int = 0
    """Answers that were granted."""
    num_tokens: int = 0
    """Tokens of finished answers."""
    num_granted: int = 0
    """Tokens of answers that are being sampled."""
    bound: Ending | None = None
    """The limit for which the last request was refused; None if it was granted."""

    def grant(self, request: CallRequest, num_prompt_tokens: int, num_reserved: int = 0) -> Grant:
        """Take the answers of a request out of the budget.

        Args:
            request: the request.
            num_prompt_tokens: tokens of its prompt.
            num_reserved: tokens of the context that the engine needs besides prompt and answer.

        Raises:
            CallError: nothing is left.
        """
        if self.num_calls + request.num_answers > self.max_calls:
            self.bound = Ending.MAX_TURNS
            message = f"This key may get {self.max_calls} answers (max_calls of its environment)."
            raise CallError(403, message, "calls_exhausted")
        tokens_left = {Ending.SEQUENCE_LENGTH: self.limits.max_sequence_length - num_prompt_tokens - num_reserved}
        if self.limits.max_episode_tokens is not None:
            left = self.limits.max_episode_tokens - self.num_tokens - self.num_granted
            tokens_left[Ending.EPISODE_TOKENS] = left // request.num_answers
        bound = min(tokens_left, key=lambda ending: tokens_left[ending])
        if tokens_left[bound] <= 0:
            self.bound = bound
            raise self._no_room(num_prompt_tokens, num_reserved)
        tokens_left[Ending.TURN_TOKENS] = self.max_new_tokens
        bound = min(tokens_left, key=lambda ending: tokens_left[ending])
        is_own = request.max_tokens is not None and request.max_tokens <= tokens_left[bound]
        tokens = min(tokens_left[bound], request.max_tokens or tokens_left[bound])
        self.bound = None
        self.num_calls += request.num_answers
        self.num_granted += tokens * request.num_answers
        return Grant(tokens, request.num_answers, None if is_own else bound)

    def give_back(self, grant: Grant, num_tokens: int) -> None:
        """Settle a grant.

        Args:
            grant: the grant.
            num_tokens: tokens of its answers.
        """
        self.num_granted -= grant.tokens * grant.num_answers
        self.num_tokens += num_tokens

    def _no_room(self, num_prompt_tokens: int, num_reserved: int) -> CallError:
        limits = self.limits
        reserved = f", the engine needs {num_reserved} more for an answer of a demanded form" if num_reserved else ""
        # NeMo Gym's model server recognises a prompt that is too long by the words "context length".
        return CallError(
            400,
            f"The prompt does not fit into the context length: it has {num_prompt_tokens} tokens{reserved}, and "
            f"the program has {self.num_tokens + self.num_granted} tokens of answers, so none is left for another "
            f"(policy.max_total_sequence_length={limits.max_sequence_length}, "
            f"max_episode_tokens={limits.max_episode_tokens}). Shorten the messages.",
            "context_length_exceeded",
            "messages",
        )
