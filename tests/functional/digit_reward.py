"""A reward that a random model of characters can learn in a few steps."""

from typing import Any


def share_of_digits(answer: str, row: dict[str, Any]) -> float:
    """Return the share of digits among the characters of an answer."""
    return sum(character.isdigit() for character in answer) / max(1, len(answer))
