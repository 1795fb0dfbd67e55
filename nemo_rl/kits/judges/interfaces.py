"""The model of a judge: what it is asked, and what can go wrong.

Invariant: a request ends within its time limit with the judge's text or a `JudgeError`.
"""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl.config.schema.judges import LLMJudgeConfig


class JudgeError(Exception):
    """A judge gave no verdict.

    Args:
        reason: what happened.
        may_pass: whether the same request may succeed later.
        wait_s: seconds that the endpoint asks to wait.
    """

    def __init__(self, reason: str, *, may_pass: bool = True, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.may_pass = may_pass
        self.wait_s = wait_s


@dataclass(frozen=True)
class JudgeText:
    """The answer of a judge."""

    text: str
    """Text that it wrote."""
    prompt_tokens: int = 0
    """Tokens of the request, 0 if the endpoint does not say."""
    completion_tokens: int = 0
    """Tokens of the answer, 0 if the endpoint does not say."""
    is_complete: bool = True
    """Whether the judge ended it; false if the limit of tokens cut it off, so that it has no verdict."""


class JudgeModel(abc.ABC):
    """A language model that judges.

    Args:
        config: the section `env.llm_judge`.
    """

    repeats_itself = False
    """Whether the same request always gets the same text, so that asking again is of no use."""

    def __init__(self, config: LLMJudgeConfig) -> None:
        self._config = config

    def body(self, prompt: str) -> dict[str, Any]:
        """Return the request that asks a prompt, in the form of a chat completion."""
        config = self._config
        system = [] if config.system_prompt is None else [{"role": "system", "content": config.system_prompt}]
        return {
            "model": config.judge_name,
            "messages": [*system, {"role": "user", "content": prompt}],
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
        }

    @abc.abstractmethod
    async def ask(self, body: Mapping[str, Any], attempt: int = 0) -> JudgeText:
        """Send a request.

        Args:
            body: what `body` returned.
            attempt: how often it was sent before.

        Raises:
            JudgeError: the judge gave no text.
        """

    def close(self) -> None:  # noqa: B027  (optional hook)
        """Release what the model holds."""
