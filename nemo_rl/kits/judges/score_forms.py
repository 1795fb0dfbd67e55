"""Compute the reward of a conversation from the scores of a reward model, for each form of scores.

    SingleScore       one score of the answer, which is the reward
    AttributeScores   a score for each attribute; the reward is a weighted sum, whose terms are reward components
    StepScores        a score of each step of the answer; the reward is a function of the steps' probabilities

Invariant: rows have the same tokens as in training with `run_rm.py`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from nemo_rl.config.schema.judges import RewardModelEnvironmentConfig
from nemo_rl.data.messages.content import TextRules
from nemo_rl.data.messages.observations import template_message
from nemo_rl.data.messages.steps import StepForm, ends_of_step_texts, ends_of_steps, split_steps
from nemo_rl.kits.judges.scoring_ranks import ConversationTokens, ScoringRanks, StepRow
from nemo_rl.utils.errors import ConfigError, DataError, did_you_mean

if TYPE_CHECKING:
    from nemo_rl.data.interfaces import LLMMessageLogType, TokenizerType

_KEY = "env.reward_model.attribute_weights"


class ScoreForm(Protocol):
    """Interface of a form of scores. `Any` is the type of a row, and the type of its scores."""

    @property
    def no_reward(self) -> float | dict[str, float]:
        """Return a value in place of the reward of a sample with an error."""

    def row_of(self, conversation: "LLMMessageLogType") -> Any:
        """Return the row of a conversation.

        Raises:
            DataError: the conversation cannot be scored.
        """

    def scores(self, ranks: ScoringRanks, rows: Sequence[Any]) -> list[Any]:
        """Return the score, or a list of scores, of each row."""

    def reward(self, score: Any) -> float | dict[str, float]:
        """Return the reward of finite scores, or a reward for each component."""

    def step_rewards(self, conversation: "LLMMessageLogType", score: Any) -> list[tuple[int, float]] | None:
        """Return end and reward of each step of the answer, or None (`EnvironmentReturn.step_rewards`)."""


@dataclass(frozen=True)
class SingleScore:
    """One score of an answer."""

    tokens: ConversationTokens
    """Tokens of conversations."""
    no_reward: float = 0.0

    def row_of(self, conversation: "LLMMessageLogType") -> Tensor:
        """Return the tokens of a conversation (`ScoreForm.row_of`)."""
        return self.tokens.of(conversation)

    def scores(self, ranks: ScoringRanks, rows: Sequence[Tensor]) -> list[float]:
        """Return the score of each row."""
        return ranks.scores(rows)

    def reward(self, score: float) -> float:
        """Return the score."""
        return score

    def step_rewards(self, conversation: "LLMMessageLogType", score: float) -> None:
        """Return None: the score is that of the whole answer."""


@dataclass(frozen=True)
class AttributeScores:
    """A score of an answer for each attribute."""

    tokens: ConversationTokens
    """Tokens of conversations."""
    weights: dict[str, float]
    """Weight of each score in the reward, by name."""
    places: list[int]
    """Index of each of these scores among the model's scores."""

    @property
    def no_reward(self) -> dict[str, float]:
        """Return 0 for each component."""
        return dict.fromkeys(self.weights, 0.0)

    def row_of(self, conversation: "LLMMessageLogType") -> Tensor:
        """Return the tokens of a conversation (`ScoreForm.row_of`)."""
        return self.tokens.of(conversation)

    def scores(self, ranks: ScoringRanks, rows: Sequence[Tensor]) -> list[list[float]]:
        """Return all scores of each row."""
        return ranks.attribute_scores(rows)

    def reward(self, score: list[float]) -> dict[str, float]:
        """Return each weighted score. Their sum is the reward."""
        named = zip(self.weights.items(), self.places, strict=True)
        return {name: weight * score[place] for (name, weight), place in named}

    def step_rewards(self, conversation: "LLMMessageLogType", score: list[float]) -> None:
        """Return None: the scores are those of the whole answer."""


@dataclass(frozen=True)
class StepScores:
    """A score of each step of an answer, which is the log-odds that the step is right."""

    form: StepForm
    """Form in which the model reads answers."""
    longest: int
    """Largest number of tokens that the model reads."""
    step_reward: str = "min"
    """Name of the function of the probabilities."""
    no_reward: float = 0.0

    def row_of(self, conversation: "LLMMessageLogType") -> StepRow:
        """Return the tokens and the ends of the steps of the last message (`ScoreForm.row_of`)."""
        *prompt, answer = [template_message(message) for message in conversation]
        log = self.form.log(prompt, split_steps(answer["content"], self.form.separator))
        token_ids = torch.cat([entry["token_ids"] for entry in log])
        if len(token_ids) > self.longest:
            raise DataError(
                f"the conversation has {len(token_ids)} tokens for the reward model, which reads {self.longest}. Raise "
                "env.reward_model.max_model_len"
            )
        return StepRow(token_ids, ends_of_steps(log))

    def scores(self, ranks: ScoringRanks, rows: Sequence[StepRow]) -> list[list[float]]:
        """Return the score of each step of each row."""
        return ranks.step_scores(rows)

    def reward(self, score: list[float]) -> float:
        """Return a number from 0 to 1, or with `each` the sum of the probabilities."""
        return _STEP_REWARDS[self.step_reward](_probabilities(score))

    def step_rewards(self, conversation: "LLMMessageLogType", score: list[float]) -> list[tuple[int, float]] | None:
        """Return each step's probability with `each`, otherwise None (`ScoreForm.step_rewards`)."""
        if self.step_reward != "each":
            return None
        ends = ends_of_step_texts(template_message(conversation[-1])["content"], self.form.separator)
        return list(zip(ends, _probabilities(score), strict=True))


def _probabilities(scores: Sequence[float]) -> list[float]:
    return torch.tensor(scores, dtype=torch.float64).sigmoid().tolist()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _last(values: Sequence[float]) -> float:
    return values[-1]


_STEP_REWARDS: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "mean": _mean,
    "product": math.prod,
    "last": _last,
    "each": sum,
}


def form_of(config: RewardModelEnvironmentConfig, tokenizer: "TokenizerType", names: Sequence[str]) -> ScoreForm:
    """Choose the form of a model's scores.

    Args:
        names: names of the model's scores.

    Raises:
        ConfigError: the section does not fit the number or the names of the scores.
    """
    if config.reward_model_cfg.reward_model_type == "process":
        if len(names) > 1:
            raise ConfigError(
                f"env.reward_model.reward_model_cfg.reward_model_type=process, but the model has {len(names)} scores: "
                f"{', '.join(names)}. Name a process reward model with one score."
            )
        form = StepForm(tokenizer, config.step_separator, TextRules(rows=True, tools=True), config.max_model_len)
        return StepScores(form, config.max_model_len, config.step_reward)
    tokens = ConversationTokens(tokenizer, config.max_model_len, config.too_long, config.ends_with_turn)
    weights = dict(config.attribute_weights)
    if not weights and len(names) == 1:
        return SingleScore(tokens)
    if not weights:
        raise ConfigError(
            f"{_KEY} is empty, but the model has {len(names)} scores: {', '.join(names)}. Give those that count a "
            f"weight, for example {{{names[0]}: 1.0}}."
        )
    for name in (name for name in weights if name not in names):
        raise ConfigError(
            f"{_KEY}.{name}: the model has no such score.{did_you_mean(name, names)} Scores: {', '.join(names)}."
        )
    return AttributeScores(tokens, weights, [names.index(name) for name in weights])
