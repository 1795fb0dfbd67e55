"""Check that the tested release of megatron-core is installed, without importing it."""

import importlib.metadata

from nemo_rl.utils.errors import ConfigError

TESTED_VERSION = "0.19.2"
"""Release that `pyproject.toml` pins. Other releases may differ in default values or in code that assumes CUDA."""

FUSED_GRADIENTS = "fused_weight_gradient_mlp_cuda"
"""Extension of APEX that computes a weight's gradient and adds it to the gradient buffer in one kernel."""
MISSING_FUSED_GRADIENTS = (
    f"{{keys}}.gradient_accumulation_fusion=true needs the extension {FUSED_GRADIENTS} of NVIDIA's APEX, which is not "
    "installed. Build APEX with --cpp_ext and --cuda_ext (https://github.com/NVIDIA/apex), or set the key to false: "
    "the gradients are the same."
)


def missing_megatron_core() -> str | None:
    """Return a message if the tested release of megatron-core is not installed, or None."""
    try:
        found = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return f"megatron-core {TESTED_VERSION} is not installed"
    return None if found == TESTED_VERSION else f"megatron-core {found} is installed, and {TESTED_VERSION} is needed"


def missing_muon() -> str | None:
    """Return a message if the package is not installed by which Megatron Core computes Muon, or None."""
    try:
        found = importlib.metadata.version("emerging-optimizers")
    except importlib.metadata.PackageNotFoundError:
        return "emerging-optimizers is not installed"
    number = tuple(int(part) for part in found.split(".")[:2])
    return None if number >= (0, 2) else f"emerging-optimizers {found} is installed, and 0.2 or later is needed"


def require_megatron_core(asked_by: str = "policy.megatron_cfg.enabled=true") -> None:
    """Raise an error if the tested release of megatron-core is not installed.

    Args:
        asked_by: the setting that needs megatron-core, for the message.

    Raises:
        ConfigError: the message names the installed release and the command that installs the tested one.
    """
    missing = missing_megatron_core()
    if missing is None:
        return
    raise ConfigError(
        f"{asked_by}: {missing}. Install it together with the "
        "extra that you use, for example: uv sync --extra vllm --extra mcore (on CPUs: --extra cpu --extra mcore)."
    )
