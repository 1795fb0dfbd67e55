"""Choice of flash attention: the optional package `flash-attn`, and version 3 in place of torch's version 2."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from nemo_rl.utils.errors import ConfigError

_KEY = "policy.dtensor_cfg.flash_attention_version"
_PACKAGE_OF_3 = "flash_attn_interface"
_CAPABILITY_OF_3 = 9
"""First number of the compute capability that version 3 is written for (Hopper)."""


@cache
def flash_attn_varlen() -> Callable[..., Any] | None:
    """Return `flash_attn_varlen_func`; None if the package is not installed."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func


def why_not_3(device: torch.device) -> str:
    """Return why version 3 cannot run on a device; empty if it can."""
    if device.type == "cpu":
        return "it runs on GPUs only, and this rank computes on a CPU"
    major, minor = torch.cuda.get_device_capability(device)
    if major != _CAPABILITY_OF_3:
        return f"it needs a GPU of compute capability {_CAPABILITY_OF_3}.x (Hopper), and this one has {major}.{minor}"
    if importlib.util.find_spec(_PACKAGE_OF_3) is None:
        return f"the package {_PACKAGE_OF_3} (flash-attn-3) is not installed"
    return ""


def use_flash_attention(version: int, device: torch.device) -> None:
    """Make all flash attention of this process that of a version; 2 is torch's own, and changes nothing.

    Raises:
        ConfigError: version 3 cannot run here.
    """
    if version == 2:
        return
    refusal = why_not_3(device)
    if refusal:
        raise ConfigError(f"{_KEY}=3 cannot be used: {refusal}. Set {_KEY}=2.")
    from torch.nn.attention import activate_flash_attention_impl

    activate_flash_attention_impl("FA3")


@contextmanager
def flash_attention(version: int, device: torch.device) -> Iterator[None]:
    """Run a block with the flash attention of a version, and then with torch's own again.

    Raises:
        ConfigError: version 3 cannot run here.
    """
    use_flash_attention(version, device)
    try:
        yield
    finally:
        if version != 2:
            from torch.nn.attention import restore_flash_attention_impl

            restore_flash_attention_impl()
