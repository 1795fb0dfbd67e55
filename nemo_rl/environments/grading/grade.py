"""The result of a verifier for one answer, and the names of verifiers.

Both ends of the pipe between `pool` (in the environment's actor) and `worker_main` (the grading process) use this
module. Invariant: an answer that could not be graded has no reward, only the reason.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.imports import import_dotted

Reward = float | dict[str, float]


@dataclass(frozen=True)
class VerifierResult:
    """Judgement of a verifier about one answer."""

    reward: Reward
    """Reward of 1.0 or 0.0, or one value for each named reward component."""
    extracted_answer: str | None = None
    """Text that the verifier took as the final answer, or None if it found none."""
    correct: bool | None = None
    """Whether the answer is right, or None if the reward says so."""

    @property
    def is_correct(self) -> bool:
        """True if the answer is right. If `correct` is None, the reward or its component of correctness must be 1.0."""
        if self.correct is not None:
            return self.correct
        return (self.reward["reward/correctness"] if isinstance(self.reward, dict) else self.reward) == 1.0


@dataclass(frozen=True)
class Grade:
    """Outcome of grading: exactly one of `verified` and `error` is set."""

    verified: VerifierResult | None = None
    """Judgement of the verifier, or None if there is an error."""
    error: str | None = None
    """Reason why there is no judgement: the verifier raised, exceeded its deadline or died."""


Verifier = Callable[..., VerifierResult]
"""Function `verify(response, ground_truth) -> VerifierResult`, which raises if it cannot judge the response.

A verifier with an argument `prompt` is also given the end of the text before the response, or None if it is not known.
"""

PROMPT_CHARS = 200
"""Number of characters from the end of a prompt that a verifier gets."""

SOLUTION_MARK = "####"
"""Mark before the final answer in the solutions of GSM8K."""

_MOST_WORDS = 30
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")

_HERE = "nemo_rl.environments.grading"

VERIFIERS: dict[str, str] = {
    "hf_math_verify": f"{_HERE}.hf_math_verify.verify_math",
    "math_multi_reward": f"{_HERE}.hf_math_verify.verify_math_components",
    "dapo_math_verify": f"{_HERE}.dapo.verify_final_answer",
    "english_multichoice": f"{_HERE}.multichoice.verify_english",
    "multilingual_multichoice": f"{_HERE}.multichoice.verify_multilingual",
}
"""Dotted path of each verifier's function by the verifier's name. Only the grading process imports the function."""


def require_final_answer(ground_truth: str) -> None:
    """Refuse a ground truth that no final answer can equal, such as a whole solution.

    Raises:
        ValueError: The ground truth has no text, contains the mark "####" of a solution, or has more than 30 words.
    """
    if not ground_truth.strip():
        raise ValueError(f"there is no expression in the ground truth {ground_truth!r}")
    if SOLUTION_MARK in ground_truth:
        raise ValueError(f"the ground truth is a whole solution with {SOLUTION_MARK!r}, not a final answer")
    num_words = len(_WORD.findall(ground_truth))
    if num_words > _MOST_WORDS:
        raise ValueError(f"the ground truth is a text of {num_words} words, not a final answer")


def load_verifier(name: str) -> Verifier:
    """Import a verifier by its registered name or by a dotted path.

    Args:
        name: A key of `VERIFIERS` or `package.module.function`.

    Raises:
        ConfigError: The name is neither registered nor the dotted path of a function.
    """
    known = (
        f"Known: {', '.join(sorted(VERIFIERS))}, or the dotted path of a function (response, truth) -> VerifierResult."
    )
    return cast(Verifier, import_dotted(VERIFIERS.get(name, name), ConfigError, f"verifier {name!r}", known))
