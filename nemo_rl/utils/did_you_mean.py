"""A hint at what was probably meant, for errors about unknown names."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """` Did you mean '<nearest>'?`, or nothing where no known name is near.

    Args:
        name: what was given.
        known: what is allowed.
        cutoff: how alike two names must be, from 0 to 1.
    """
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {near[0]!r}?" if near else ""
