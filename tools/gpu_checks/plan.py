"""List the checks, the most important ones first."""

from collections.abc import Sequence

from gpu_checks.runner import Check

EXPANDABLE_SEGMENTS = (("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),)
"""Makes torch's allocator grow its memory in place; memory of that kind has no CUDA IPC handle."""
SHORT_HEARTBEAT = (("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "5"),)
"""Makes torch end a process 5 s, not 8 minutes, after it has noticed a failed collective."""
CHECKS = (
    Check("attention", "correctness", "gpu_checks.attention:kernels", 60),
    Check("policy", "correctness", "gpu_checks.numerics:against_hugging_face", 120),
    Check("shared prefixes", "correctness", "gpu_checks.shared_prefixes:kernels", 60),
    Check("shared prefixes of a policy", "correctness", "gpu_checks.shared_prefixes:policy", 90),
    Check("vocabulary", "correctness", "gpu_checks.vocabulary:statistics", 90),
    Check("weight sync", "correctness", "gpu_checks.weight_sync:between_processes", 90),
    Check("collective", "correctness", "gpu_checks.weight_sync:group_of_one", 60),
    Check("late broadcast", "correctness", "gpu_checks.weight_sync:late_broadcast", 60, SHORT_HEARTBEAT),
    Check("expandable segments", "correctness", "gpu_checks.weight_sync:between_processes", 90, EXPANDABLE_SEGMENTS),
    Check("memory", "correctness", "gpu_checks.memory:predicted", 120),
    Check("checkpoint", "correctness", "gpu_checks.persistence:checkpoint", 60),
    Check("offload", "correctness", "gpu_checks.persistence:offload", 60),
    Check("trained model in turns", "correctness", "gpu_checks.persistence:trained_turns", 60),
    Check("adamw", "correctness", "gpu_checks.optimizers:adamw", 60),
    Check("training step", "speed", "gpu_checks.speed:training", 150),
    Check("sync bandwidth", "speed", "gpu_checks.weight_sync:bandwidth", 90),
    Check("one microbatch", "speed", "gpu_checks.speed:microbatch", 90),
    Check("log-prob pass", "speed", "gpu_checks.speed:scoring", 60),
    Check("shared prompts", "speed", "gpu_checks.speed:shared_prompts", 60),
    Check("long rows", "speed", "gpu_checks.speed:long_rows", 60),
    Check("compiled training step", "speed", "gpu_checks.speed:compiled", 180),
    Check("compiled layers", "correctness", "gpu_checks.numerics:compiled", 150),
    Check("flash attention 3", "correctness", "gpu_checks.attention:version_3", 60),
    Check("flash attention 3 speed", "speed", "gpu_checks.speed:flash_attention_3", 60),
    Check("offload seconds", "speed", "gpu_checks.speed:offload", 60),
    Check("large model", "correctness", "gpu_checks.numerics:at_full_size", 120),
    Check("lora", "correctness", "gpu_checks.numerics:lora", 60),
    Check("cached tokens", "correctness", "gpu_checks.attention:cached", 60),
    Check("batch invariance", "correctness", "gpu_checks.batch_invariance:engine", 240),
    Check("float8", "correctness", "gpu_checks.float8.products:blocks", 60),
    Check("vocabulary chunk", "speed", "gpu_checks.speed:chunks", 120),
    Check("gathered weights", "speed", "gpu_checks.speed:gathered", 90),
    Check("checkpoint seconds", "speed", "gpu_checks.speed:checkpoint", 90),
    Check("matrix product", "speed", "gpu_checks.speed:matrix_product", 30),
)
"""Small models come first: if their results are wrong, the figures of the large model are meaningless. The first speeds
follow before the slow comparisons, so that a short budget ends with both."""


def chosen(only: Sequence[str]) -> list[Check]:
    """Return the checks whose name contains one of the texts, or all checks.

    Raises:
        SystemExit: no check matches.
    """
    found = [check for check in CHECKS if not only or any(text in check.name for text in only)]
    if not found:
        raise SystemExit(f"--only {' '.join(only)}: no check has that in its name. Names: " + ", ".join(_names()))
    return found


def _names() -> list[str]:
    return [check.name for check in CHECKS]
