"""The checks, the most important ones first."""

from collections.abc import Sequence

from gpu_checks.runner import Check

CHECKS = (
    Check("attention", "correctness", "attention:kernels", 60),
    Check("policy", "correctness", "numerics:against_hugging_face", 60),
    Check("weight sync", "correctness", "weight_sync:between_processes", 60),
    Check("checkpoint", "correctness", "persistence:checkpoint", 60),
    Check("offload", "correctness", "persistence:offload", 60),
    Check("lora", "correctness", "numerics:lora", 60),
    Check("collective", "correctness", "weight_sync:group_of_one", 60),
    Check("adamw", "correctness", "optimizers:adamw", 60),
    Check("training step", "speed", "speed:training", 120),
    Check("log-prob pass", "speed", "speed:scoring", 60),
    Check("offload seconds", "speed", "speed:offload", 60),
    Check("sync bandwidth", "speed", "weight_sync:bandwidth", 90),
    Check("matrix product", "speed", "speed:matrix_product", 30),
    Check("checkpoint seconds", "speed", "speed:checkpoint", 90),
    Check("vocabulary chunk", "speed", "speed:chunks", 90),
)
"""Small models first: figures of the large one, which the later checks share, are worth nothing if those are wrong."""


def chosen(only: Sequence[str]) -> list[Check]:
    """The checks whose name holds one of the texts, or all.

    Raises:
        SystemExit: there is none.
    """
    found = [check for check in CHECKS if not only or any(text in check.name for text in only)]
    if not found:
        raise SystemExit(f"--only {' '.join(only)}: no check has that in its name. Names: " + ", ".join(_names()))
    return found


def _names() -> list[str]:
    return [check.name for check in CHECKS]
