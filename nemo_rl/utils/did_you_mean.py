"""Suggest the probably intended name in errors about unknown names."""

import difflib
from collections.abc import Iterable

_OTHER_WORDS = {"learning_rate": "lr", "beta1": "betas", "beta2": "betas", "epsilon": "eps", "decay": "weight_decay"}
"""Words of other libraries for arguments that have names of little similarity here."""


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ` Did you mean '<nearest>'?`, or an empty text if no known name is similar.

    Args:
        name: the given name.
        known: the allowed names.
        cutoff: minimum similarity of two names, from 0 to 1.
    """
    names = list(known)
    near = [other for other in (_OTHER_WORDS.get(name),) if other in names]
    near += difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return f" Did you mean {near[0]!r}?" if near else ""
