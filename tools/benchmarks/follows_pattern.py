"""The reward of the workload `instructions`, which both sides of a comparison import."""

import re
from collections.abc import Mapping


def follows(answer: str, row: Mapping[str, str]) -> float:
    """Return 1 if the whole answer matches the regular expression of its row, else 0."""
    return float(re.fullmatch(row["answer"], answer.strip()) is not None)
