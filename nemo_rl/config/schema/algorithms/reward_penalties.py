"""Define the keys of `reward_penalties` and `effort_levels`, which lower the rewards of environments.

A penalty concerns the form of an answer. A level of effort is the amount of thinking that a prompt asks for.
"""

from typing import Any

from pydantic import Field

from nemo_rl.config.base.section import Section
from nemo_rl.config.base.value_types import CountOrZero, Factor, FactorOrZero, TokenId, Tokens
from nemo_rl.config.schema.named_part import NamedPartConfig

BUILT_IN = ("duplicated_reasoning", "empty_final_answer", "malformed_think_tag", "unwanted_tokens")
"""Names of the built-in penalties, each switched on by `penalize_<name>`."""


class RewardPenaltyTokenIdsConfig(Section):
    """Token ids that penalties look for."""

    unwanted: list[TokenId] | None = None
    """Tokens that penalize_unwanted_tokens penalises."""
    think_open: CountOrZero | None = None
    """Token that opens the thinking; null: the tokenizer's token for the first of thinking_tags, or the text of the tag
    if it consists of several tokens."""
    think_close: CountOrZero | None = None
    """Token that closes the thinking; null: the token of the second of thinking_tags, or its text as above."""


class OwnPenaltyConfig(NamedPartConfig):
    """A penalty of your own."""

    name: str
    """Dotted path of the class."""


class RewardPenaltyConfig(Section):
    """Penalties on the form of answers. An answer with a penalty has a training reward of at most 0."""

    penalize_duplicated_reasoning: bool = False
    """Penalise an answer that repeats its reasoning or whose reasoning repeats itself, almost word for word."""
    penalize_empty_final_answer: bool = False
    """Penalise a turn that has only white space and special tokens after its thinking."""
    penalize_malformed_think_tag: bool = False
    """Penalise a turn whose thinking is opened twice, closed without being open, or not closed."""
    penalize_unwanted_tokens: bool = False
    """Penalise a turn that contains one of token_ids.unwanted."""
    token_ids: RewardPenaltyTokenIdsConfig | None = None
    """Token ids that penalties look for."""
    thinking_tags: list[str] = ["<think>", "</think>"]
    """Texts that open and close the thinking, for penalties, grpo.malformed_thinking_advantage and effort_levels."""
    own: dict[str, OwnPenaltyConfig] = Field(default_factory=dict)
    """User-defined penalties by name. Their metrics are penalized_by_<name>."""

    @property
    def ids(self) -> RewardPenaltyTokenIdsConfig:
        """Return the section `token_ids`, or a section whose keys are all null."""
        return self.token_ids or RewardPenaltyTokenIdsConfig()

    @property
    def built_in(self) -> list[str]:
        """Return the names of the enabled built-in penalties."""
        switches = (
            self.penalize_duplicated_reasoning,
            self.penalize_empty_final_answer,
            self.penalize_malformed_think_tag,
            self.penalize_unwanted_tokens,
        )
        return [name for name, is_on in zip(BUILT_IN, switches, strict=True) if is_on]


class EffortLevelConfig(Section):
    """One level of effort. All answers to a prompt have the same level, drawn with the seed (seed, phase, row)."""

    weight: Factor = 1.0
    """Share of prompts with this level, relative to the weights of the other levels."""
    system_prompt: str | None = None
    """Text appended to the system message, or sent as the system message if there is none; null: no text."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the chat template, which override those of policy.tokenizer.chat_template_kwargs."""
    max_thinking_tokens: Tokens | None = None
    """Largest number of thinking tokens without a penalty, over all turns of an answer; null: no limit."""
    over_budget_penalty: FactorOrZero = 1.0
    """Largest penalty for thinking beyond max_thinking_tokens, subtracted from the reward after reward_scaling."""
    over_budget_tokens: Tokens | None = None
    """Number of tokens beyond max_thinking_tokens over which the penalty grows linearly to its largest value; null:
    max_thinking_tokens."""

    @property
    def is_plain(self) -> bool:
        """Return True if the level does not change the prompt."""
        return self.system_prompt is None and not self.chat_template_kwargs
