"""The optimizations, each with the libraries that it reaches into and what it saves.

Invariant: only the standard library is imported, so that the configuration can read the names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Optimization:
    """One speed-up that can be switched off without changing any result."""

    name: str
    """Key in `cluster.optimizations`."""
    does: str
    """Sentence on what happens in place of what, for the table in the documentation."""
    saves: str
    """Cost of a run without it."""
    modules: tuple[str, ...]
    """Files that implement it, below `nemo_rl/optimizations`."""
    written_for: Mapping[str, str] = field(default_factory=dict)
    """Version of each library whose internals it relies on; `python` by major and minor version."""


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
        "engine_threads",
        "An engine with a small model computes on a second thread while a core is free.",
        "43 % more seconds per step at 25 million parameters, none at 1 and 3 million",
        ("vllm/threads.py",),
        {"vllm": "0.32.0", "torch": "2.13.0"},
    ),
    Optimization(
        "host_allocator",
        "glibc keeps freed memory in processes that repeat their work.",
        "8 % and 38 % more seconds per step at 3 and 25 million parameters, none at 1 million",
        ("host_allocator.py",),
    ),
    Optimization(
        "garbage_collection",
        "Python searches all objects a hundred times less often in runs with many samples a step.",
        "a third of the controller's time from 4,096 samples a step",
        ("garbage_collection.py",),
    ),
)
OPTIMIZATIONS: Mapping[str, Optimization] = {each.name: each for each in _ALL}
"""By name, in the order of a run: start of Ray, start of the engine, steps."""
