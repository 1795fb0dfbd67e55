"""Define penalties on turns of an answer that have a fault.

Invariant: a penalty gets only the text and tokens of one answer, but no reward and no other answers. Its result for an
answer is therefore always the same.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Protocol

from nemo_rl.config import EffortLevelConfig, RewardPenaltyConfig
from nemo_rl.experience.branches import spans_of_turns
from nemo_rl.experience.thinking import SampledTurn, ThinkingReader, check_token_ids, sampled_turns, thinking_reader
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.named_parts import Registry

_WORD = re.compile(r"[぀-ヿ㐀-鿿가-힯]|\w+")
"""Matches a word, or a character of a script that is written without spaces."""
_RUN = 8
"""Number of consecutive words that are compared at once (a run of words)."""
_FEWEST_WORDS = 40
"""Number of words of reasoning below which no repetition is reported."""
_COPIED = 0.8
"""Share of the reasoning's runs that a final answer must contain to be a repetition."""
_REPEATED = 1 / 3
"""Share of the reasoning's runs that may occur earlier in it. Above this share, the reasoning repeats itself."""


class RewardPenalty(Protocol):
    """A penalty. Each process that samples rollouts constructs its own object."""

    def offending(self, turns: Sequence[SampledTurn]) -> Collection[int]:
        """Return the numbers, from 0, of the turns to which the penalty applies.

        Args:
            turns: all sampled turns of one answer.
        """


class MalformedThinkTag:
    """Penalty for misplaced thinking tags (`SampledTurn.malformed`)."""

    def offending(self, turns: Sequence[SampledTurn]) -> list[int]:
        """Return the numbers of turns with misplaced tags."""
        return [number for number, turn in enumerate(turns) if turn.malformed]


class EmptyFinalAnswer:
    """Penalty for a final answer without text, or for thinking that does not end."""

    def offending(self, turns: Sequence[SampledTurn]) -> list[int]:
        """Return the numbers of turns with an empty final answer."""
        return [number for number, turn in enumerate(turns) if not turn.final_answer.strip()]


class DuplicatedReasoning:
    """Penalty for a final answer that repeats the reasoning, and for reasoning that repeats itself (`repeats`)."""

    def offending(self, turns: Sequence[SampledTurn]) -> list[int]:
        """Return the numbers of turns with repetitions."""
        return [number for number, turn in enumerate(turns) if repeats(turn.reasoning, turn.final_answer)]


@dataclass(frozen=True)
class UnwantedTokens:
    """Penalty for tokens that must not be sampled."""

    token_ids: frozenset[int]

    def offending(self, turns: Sequence[SampledTurn]) -> list[int]:
        """Return the numbers of turns with unwanted tokens."""
        return [number for number, turn in enumerate(turns) if not self.token_ids.isdisjoint(turn.token_ids)]


def repeats(reasoning: Sequence[str], final_answer: str) -> bool:
    """Return whether a final answer repeats its reasoning, or the reasoning repeats itself.

    Sequences of 8 words ("runs") are compared, without case, punctuation and white space. Reasoning of less than 40
    words is never a repetition. The reasoning repeats itself if more than a third of its runs occur earlier in it. The
    answer repeats the reasoning if it has at least 80 % of the reasoning's runs.

    Args:
        reasoning: Texts of the thinking.
        final_answer: Text after the thinking.
    """
    words = _words(" ".join(reasoning))
    if len(words) < _FEWEST_WORDS:
        return False
    runs = _runs(words)
    different = set(runs)
    if len(runs) - len(different) > _REPEATED * len(runs):
        return True
    return len(different & set(_runs(_words(final_answer)))) >= _COPIED * len(different)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _runs(words: Sequence[str]) -> list[tuple[str, ...]]:
    return [tuple(words[start : start + _RUN]) for start in range(len(words) - _RUN + 1)]


PENALTIES: Registry[RewardPenalty] = Registry("reward penalty", RewardPenalty)
"""User-defined penalties (`reward_penalties.own`), constructed with their `kwargs`."""

type Review = Callable[[Sequence[Trajectory]], None]
"""Function that stores its findings on the finished samples of a group."""


@dataclass(frozen=True)
class Verdict:
    """The result of the review of one answer."""

    penalties: dict[str, list[int]]
    """For each enabled penalty, the numbers of the turns to which it applies, by the name of the penalty."""
    malformed_thinking: list[tuple[int, int]]
    """First token and end of each misplaced tag, as positions in the concatenated conversations."""
    num_thinking_tokens: int
    """Number of thinking tokens in all turns."""


@dataclass(frozen=True)
class AnswerReview:
    """Find malformed thinking and apply penalties to answers."""

    reader: ThinkingReader
    """Reader that finds thinking tags."""
    penalties: Mapping[str, RewardPenalty]
    """Penalties by name."""

    def __call__(self, samples: Sequence[Trajectory]) -> None:
        """Review the samples that have a reward. Samples without a reward are not used for training."""
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
        """Review an answer with one conversation. Arguments and errors are those of `judge_all`."""
        return self.judge_all([(token_ids, spans)])

    def judge_all(self, conversations: Sequence[tuple[Sequence[int], Sequence[tuple[int, int]]]]) -> Verdict:
        """Review one answer.

        Turns are numbered through all conversations of the answer.

        Args:
            conversations: Tokens of each conversation, with the start and end position of each sampled turn.

        Raises:
            ValueError: A penalty names a turn that does not exist.
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
    """Do nothing. This is the `Review` of a run without penalties."""


@dataclass(frozen=True)
class ReviewSettings:
    """Settings of the review, from which each process that samples rollouts makes its own."""

    penalties: RewardPenaltyConfig = field(default_factory=RewardPenaltyConfig)
    effort_levels: Mapping[str, EffortLevelConfig] = field(default_factory=dict)
    """The section `effort_levels`. Its budgets need the number of thinking tokens."""
    marks_malformed: bool = False
    """Whether misplaced thinking tags get an advantage of their own."""

    def make(self, tokenizer: Any) -> Review:
        """Build the review.

        Raises:
            ConfigError: Configured tokens do not exist, or a user-defined penalty cannot be used.
        """
        penalties = self.penalties
        if not (penalties.built_in or penalties.own or self.effort_levels or self.marks_malformed):
            return nothing
        return AnswerReview(thinking_reader(penalties, tokenizer), named_penalties(penalties, tokenizer))


def named_penalties(config: RewardPenaltyConfig, tokenizer: Any) -> dict[str, RewardPenalty]:
    """Build the enabled penalties, by name.

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


def review_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute the metrics of reviewed samples, or return none in runs without penalties and effort levels.

    `penalized_by_<name>` is the share of reviewed samples to which the penalty `<name>` applies. `penalized_rate` is
    the share to which any penalty applies. `penalized_reward` is the mean reward after penalties.
    """
    reviewed = [t for t in trajectories if t.num_thinking_tokens is not None]
    if not reviewed:
        return {}
    metrics = {
        "malformed_thinking_rate": fmean(bool(t.malformed_thinking) for t in reviewed),
        "mean_thinking_tokens": fmean(t.num_thinking_tokens or 0 for t in reviewed),
    }
    names = dict.fromkeys(name for t in reviewed for name in t.penalties)
    metrics |= {f"penalized_by_{name}": fmean(bool(t.penalties.get(name)) for t in reviewed) for name in names}
    if names:
        metrics["penalized_rate"] = fmean(t.is_penalized for t in reviewed)
        metrics["penalized_reward"] = fmean(t.penalized_reward or 0.0 for t in reviewed)
    return metrics | _by_effort(reviewed)


def _by_effort(reviewed: Sequence[Trajectory]) -> dict[str, float]:
    """Compute the number, reward and lengths of each effort level's samples, as `effort/<level>/<name>`."""
    metrics: dict[str, float] = {}
    for level in sorted({t.effort for t in reviewed if t.effort is not None}):
        own = [t for t in reviewed if t.effort == level]
        found = {
            "num_samples": float(len(own)),
            "reward": fmean(t.reward or 0.0 for t in own),
            "mean_gen_tokens_per_sample": fmean(t.response_length for t in own),
            "mean_thinking_tokens": fmean(t.num_thinking_tokens or 0 for t in own),
        }
        metrics |= {f"effort/{level}/{name}": value for name, value in found.items()}
    return metrics
