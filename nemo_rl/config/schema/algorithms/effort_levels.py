"""Keys of `effort_levels`: how much a prompt asks the model to think, and what more than that costs."""

from typing import Any

from pydantic import Field

from nemo_rl.config.base.numbers import Factor, FactorOrZero, Tokens
from nemo_rl.config.base.section import Section


class EffortLevelConfig(Section):
    """One level. Each prompt has one, drawn from (seed, phase, row); all answers to it have the same."""

    weight: Factor = 1.0
    """Share of the prompts with this level, relative to the weights of the others."""
    system_prompt: str | None = None
    """Text added to the end of the system message, or sent as one where there is none; null: none."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the chat template, besides those of policy.tokenizer.chat_template_kwargs, which they replace."""
    max_thinking_tokens: Tokens | None = None
    """Tokens of thinking, over all turns of an answer, that cost nothing; null: any number."""
    over_budget_penalty: FactorOrZero = 1.0
    """Largest penalty for thinking beyond max_thinking_tokens, subtracted from the reward after reward_scaling."""
    over_budget_tokens: Tokens | None = None
    """Tokens beyond max_thinking_tokens over which the penalty grows linearly to its largest value; null: as many as
    max_thinking_tokens."""

    @property
    def is_plain(self) -> bool:
        """True if the level leaves the prompt as it is."""
        return self.system_prompt is None and not self.chat_template_kwargs
