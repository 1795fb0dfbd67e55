"""Packages of the Megatron backend: the release that it was written for, and an extension; imports neither."""

import importlib.metadata

from nemo_rl.utils.errors import ConfigError

TESTED_VERSION = "0.19.2"
"""`pyproject.toml` pins it; in any other a place that takes CUDA for granted, or a default, may have moved."""

FUSED_GRADIENTS = "fused_weight_gradient_mlp_cuda"
"""The extension of APEX that adds a weight's gradient to the sum in its product."""
MISSING_FUSED_GRADIENTS = (
    f"{{keys}}.gradient_accumulation_fusion=true needs the extension {FUSED_GRADIENTS} of NVIDIA's APEX, which is not "
    "installed. Build APEX with --cpp_ext and --cuda_ext (https://github.com/NVIDIA/apex), or set the key to false: "
    "the gradients are the same."
)


def missing_megatron_core() -> str | None:
    """What this Python lacks: megatron-core, or the tested release of it; None if it is there."""
    try:
        found = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return f"megatron-core {TESTED_VERSION} is not installed"
    return None if found == TESTED_VERSION else f"megatron-core {found} is installed, and {TESTED_VERSION} is needed"


def require_megatron_core(asked_by: str = "policy.megatron_cfg.enabled=true") -> None:
    """Refuse a Python without megatron-core, or with another release than the tested one.

    Args:
        asked_by: the setting that needs it, for the message.

    Raises:
        ConfigError: names what is installed, and the command that installs what is needed.
    """
    missing = missing_megatron_core()
    if missing is None:
        return
    raise ConfigError(
        f"{asked_by}: {missing}. Install it beside the "
        "extra that you use, for example: uv sync --extra vllm --extra mcore (on CPUs: --extra cpu --extra mcore)."
    )
