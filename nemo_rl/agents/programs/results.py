"""Read what a program returned.

Invariant: a value that is not understood is an error, never a reward of 0.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

_KEYS = ("reward", "answer", "metrics", "call_rewards")
_SHOWN_CHARS = 65536
"""Characters of a value in an error; `environment` cuts it to fewer after it has replaced the key."""


@dataclass(frozen=True)
class AgentResult:
    """Result of one program."""

    reward: float | None = None
    """Its reward; None if it returned none."""
    answer: str | None = None
    """Its final text; None if it returned none."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to average over samples, by name."""
    call_rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards of single calls, by the id of the endpoint's response."""


def read_result(value: Any) -> AgentResult:
    """Read a returned value: a number or bool, the reward; a text, the answer; a mapping of both and more; or None.

    Raises:
        ValueError: the value is something else, or a number in it is not finite.
    """
    if value is None:
        return AgentResult()
    if isinstance(value, str):
        return AgentResult(answer=value)
    if not isinstance(value, Mapping):
        return AgentResult(reward=finite_number(value, "reward"))
    unknown = [key for key in value if key not in _KEYS]
    if unknown:
        raise ValueError(f"it returned the keys {_shown(unknown)}, but only {', '.join(_KEYS)} have a meaning")
    reward, answer = value.get("reward"), value.get("answer")
    if answer is not None and not isinstance(answer, str):
        raise ValueError(f"it returned the answer {_shown(answer)}, which is no text")
    return AgentResult(
        reward=None if reward is None else finite_number(reward, "reward"),
        answer=answer,
        metrics=_numbers(value.get("metrics"), "metrics"),
        call_rewards=_numbers(value.get("call_rewards"), "call_rewards"),
    )


def _numbers(values: Any, key: str) -> dict[str, float]:
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ValueError(f"it returned {key}={_shown(values)}, which is no mapping of names to numbers")
    return {str(name): finite_number(number, f"{key}.{name}") for name, number in values.items()}


def finite_number(value: Any, key: str) -> float:
    """Return a returned number.

    Args:
        value: the value.
        key: its name, for the error.

    Raises:
        ValueError: it is no finite number.
    """
    if not isinstance(value, Real):
        raise ValueError(f"it returned {key}={_shown(value)}, which is no number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"it returned {key}={_shown(value)}, which is not finite")
    return number


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # boundary: the class may be the user's own
        return f"a {type(value).__name__} whose text raises {type(error).__name__}"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]} ..."
