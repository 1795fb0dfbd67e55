"""Import of the optional `flash-attn` package."""

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def flash_attn_varlen() -> Callable[..., Any] | None:
    """Return `flash_attn_varlen_func`; None if the package is not installed."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func
