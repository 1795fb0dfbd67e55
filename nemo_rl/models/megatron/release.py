"""The release of megatron-core that the backend was written for; imports nothing of megatron."""

import importlib.metadata

from nemo_rl.utils.errors import ConfigError

TESTED_VERSION = "0.19.2"
"""`pyproject.toml` pins it; in any other a place that takes CUDA for granted, or a default, may have moved."""


def require_megatron_core(section: str = "policy") -> None:
    """Refuse a machine without megatron-core, or with another release than the tested one.

    Args:
        section: name of the model's section, for the message.

    Raises:
        ConfigError: names what is installed, and the command that installs what is needed.
    """
    try:
        found = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        found = None
    if found == TESTED_VERSION:
        return
    what = "megatron-core is not installed" if found is None else f"megatron-core {found} is installed"
    raise ConfigError(
        f"{section}.megatron_cfg.enabled=true needs megatron-core {TESTED_VERSION}, and {what}. Install it beside the "
        "extra that you use, for example: uv sync --extra vllm --extra mcore (on CPUs: --extra cpu --extra mcore)."
    )
