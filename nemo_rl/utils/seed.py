"""Derive every seed from the run's seed, by name.

Invariant: a seed depends only on the run's seed and the path that names its use, never on time, process, host or call
order.
"""

import hashlib
import random
from functools import lru_cache

import numpy as np
import torch

_SEED_BITS = 63


def derive_seed(run_seed: int, *path: int | str) -> int:
    """Derive a seed for one use from the run's seed.

    The seed is the first 63 bits of BLAKE2b over the run seed and the path, so it fits a signed
    64-bit integer and is the same in every process and on every platform. Integers and strings are
    distinguished: `derive_seed(0, 1)` differs from `derive_seed(0, "1")`.

    Args:
        run_seed: the seed of the run, for example `grpo.seed`.
        *path: use of the seed, for example `("rollout", step, prompt, sample, turn)`.

    Returns:
        An integer in [0, 2**63).

    Raises:
        TypeError: a part of the path is neither an integer nor a string.

    Example:
        >>> derive_seed(42, "rollout", 3, 0) == derive_seed(42, "rollout", 3, 0)
        True
    """
    digest = hashlib.blake2b(b"".join(map(_encode, (run_seed, *path))), digest_size=8)
    return int.from_bytes(digest.digest(), "big") >> (64 - _SEED_BITS)


def set_seed(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch (all devices) of this process.

    Args:
        seed: any integer; NumPy receives its low 32 bits.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@lru_cache(maxsize=4096, typed=True)
def _encode(part: int | str) -> bytes:
    """Encode one part with its kind and length, so that no two paths share an encoding."""
    if isinstance(part, bool) or not isinstance(part, int | str):
        raise TypeError(f"a seed's path holds integers and strings, not {part!r}")
    kind = "i" if isinstance(part, int) else "s"
    text = str(part).encode()
    return f"{kind}{len(text)}:".encode() + text
