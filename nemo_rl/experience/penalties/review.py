"""Look at finished answers, and note on each trajectory which penalties apply to which turn.

    RolloutRunner (driver or runner actor) ─► AnswerReview(samples of a group) ─► Trajectory.penalties, ...
    nemo_rl regrade ─► AnswerReview.judge(stored tokens) ─► the same verdict
    credit assignment ─► Trajectory.penalized_reward

Where answers are reviewed the tokens are at hand: with rollout runners, the driver never has them. Invariant: the
reward stays as the environment gave it; only notes are added.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_rl.config import EffortLevelConfig, RewardPenaltyConfig
from nemo_rl.experience.branches import spans_of_turns
from nemo_rl.experience.penalties.rules import (
    PENALTIES,
    DuplicatedReasoning,
    EmptyFinalAnswer,
    MalformedThinkTag,
    RewardPenalty,
    UnwantedTokens,
)
from nemo_rl.experience.penalties.thinking import (
    SampledTurn,
    ThinkingReader,
    check_token_ids,
    sampled_turns,
    thinking_reader,
)
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.utils.errors import ConfigError

type Review = Callable[[Sequence[Trajectory]], None]
"""Notes what it finds on the finished samples of a group."""


@dataclass(frozen=True)
class Verdict:
    """The findings of a review of one answer."""

    penalties: dict[str, list[int]]
    """For each penalty that is switched on, the turns to which it applies; empty for none."""
    malformed_thinking: list[tuple[int, int]]
    """First token and end of each tag that is out of place, as positions in the conversations laid end to end."""
    num_thinking_tokens: int
    """Tokens of thinking in all turns."""


@dataclass(frozen=True)
class AnswerReview:
    """Reviews answers; a `Review`."""

    reader: ThinkingReader
    """Finds thinking tags."""
    penalties: Mapping[str, RewardPenalty]
    """Penalties by name."""

    def __call__(self, samples: Sequence[Trajectory]) -> None:
        """Review samples that have a reward; the others train nothing."""
        for sample in samples:
            if sample.reward is None:
                continue
            conversations = [
                ([token for message in log for token in message["token_ids"].tolist()], spans_of_turns(log))
                for log in sample.logs
            ]
            verdict = self.judge_all(conversations)
            sample.penalties = verdict.penalties
            sample.malformed_thinking = verdict.malformed_thinking
            sample.num_thinking_tokens = verdict.num_thinking_tokens

    def judge(self, token_ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> Verdict:
        """Review one answer that is one conversation; arguments and errors as in `judge_all`."""
        return self.judge_all([(token_ids, spans)])

    def judge_all(self, conversations: Sequence[tuple[Sequence[int], Sequence[tuple[int, int]]]]) -> Verdict:
        """Review one answer.

        Turns are numbered through all conversations of the answer.

        Args:
            conversations: for each, its whole sequence of tokens, and first token and end of each sampled turn in it.

        Raises:
            ValueError: a penalty names a turn that does not exist.
        """
        turns: list[SampledTurn] = []
        malformed: list[tuple[int, int]] = []
        offset = 0
        for token_ids, spans in conversations:
            own = sampled_turns(self.reader, token_ids, spans)
            for turn in own:
                start = offset + turn.start
                malformed += [(start + first, start + end) for first, end in turn.malformed]
            turns += own
            offset += len(token_ids)
        return Verdict(self._offending(turns), malformed, sum(turn.num_thinking_tokens for turn in turns))

    def _offending(self, turns: Sequence[SampledTurn]) -> dict[str, list[int]]:
        found = {name: sorted(set(penalty.offending(turns))) for name, penalty in self.penalties.items()}
        for name, numbers in found.items():
            if not all(number in range(len(turns)) for number in numbers):
                raise ValueError(
                    f"reward_penalties.own.{name}: offending returned the turns {numbers} of an answer with "
                    f"{len(turns)}. Return numbers from 0 to {len(turns) - 1}."
                )
        return found


def nothing(samples: Sequence[Trajectory]) -> None:
    """Note nothing; the `Review` of a run without penalties."""


@dataclass(frozen=True)
class ReviewSettings:
    """Settings from which each process that plays rollouts makes its review."""

    penalties: RewardPenaltyConfig = field(default_factory=RewardPenaltyConfig)
    effort_levels: Mapping[str, EffortLevelConfig] = field(default_factory=dict)
    """The section `effort_levels`, whose budgets need the number of thinking tokens."""
    marks_malformed: bool = False
    """Whether thinking tags that are out of place get their own advantage."""

    def make(self, tokenizer: Any) -> Review:
        """Build the review.

        Raises:
            ConfigError: tokens do not exist, or a penalty of the user's own cannot be used.
        """
        penalties = self.penalties
        if not (penalties.built_in or penalties.own or self.effort_levels or self.marks_malformed):
            return nothing
        return AnswerReview(thinking_reader(penalties, tokenizer), named_penalties(penalties, tokenizer))


def named_penalties(config: RewardPenaltyConfig, tokenizer: Any) -> dict[str, RewardPenalty]:
    """Build the penalties that are switched on.

    Raises:
        ConfigError: an unwanted token does not exist or ends each answer, or a class cannot be used.
    """
    unwanted = config.ids.unwanted or []
    if config.penalize_unwanted_tokens:
        check_token_ids(tokenizer, {"unwanted": unwanted})
        if tokenizer.eos_token_id in unwanted:
            raise ConfigError(
                f"reward_penalties.token_ids.unwanted has {tokenizer.eos_token_id}, the end-of-sequence token, with "
                "which every finished answer ends. Take it away."
            )
    built_in: dict[str, RewardPenalty] = {
        "duplicated_reasoning": DuplicatedReasoning(),
        "empty_final_answer": EmptyFinalAnswer(),
        "malformed_think_tag": MalformedThinkTag(),
        "unwanted_tokens": UnwantedTokens(frozenset(unwanted)),
    }
    own = {
        name: PENALTIES.make(part.name, f"reward_penalties.own.{name}", part.kwargs)
        for name, part in config.own.items()
    }
    return {name: built_in[name] for name in config.built_in} | own
