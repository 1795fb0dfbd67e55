"""Read what an agent of NeMo Gym returned for a row: the row, with `response`, `reward` and numbers of the verifier.

Invariant: a reward that is missing or not finite is an error, never 0.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_rl.agents.programs.results import AgentResult, finite_number

_COMPONENTS = "reward_components"


def read_rollout(result: Any, row: Mapping[str, Any]) -> AgentResult:
    """Read the result of a rollout.

    Args:
        result: the value that the agent returned.
        row: the row that it was given; its own numbers are no metrics.

    Raises:
        ValueError: it is no object, or has no finite reward.
    """
    if not isinstance(result, Mapping):
        raise ValueError(f"it is a {type(result).__name__}, not an object")
    if result.get("reward") is None:
        raise ValueError("it has no reward")
    texts = list(_texts(result.get("response")))
    components = extract_reward_components(result) or {}
    return AgentResult(
        reward=finite_number(result["reward"], "reward"),
        answer=texts[-1] if texts else None,
        metrics={**_numbers(result, row), **{f"{_COMPONENTS}/{name}": value for name, value in components.items()}},
    )


def extract_reward_components(nemo_gym_result: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the components of a result's reward by name; None if it has none.

    Raises:
        ValueError: they are no mapping of names to finite numbers.
    """
    given = nemo_gym_result.get(_COMPONENTS)
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ValueError(f"it has {_COMPONENTS} of type {type(given).__name__}, not a mapping of names to numbers")
    return {str(name): finite_number(value, f"{_COMPONENTS}.{name}") for name, value in given.items()}


def _numbers(result: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of the verifier, without those of the row."""
    return {
        str(name): float(value)
        for name, value in result.items()
        if name not in row and name != "reward" and isinstance(value, int | float) and math.isfinite(value)
    }


def _texts(response: Any) -> Iterator[str]:
    """Yield the texts of the answers in a response of the Responses API."""
    items = response.get("output") if isinstance(response, Mapping) else None
    for item in items if isinstance(items, list) else ():
        if isinstance(item, Mapping) and item.get("type") == "message" and item.get("role", "assistant") == "assistant":
            parts = item.get("content")
            for part in parts if isinstance(parts, list) else ():
                if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                    yield part["text"]
