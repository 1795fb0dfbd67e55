"""Hold the port of a process group's store from its choice until the store listens on it.

This file imports neither torch nor Ray, because `worker_process` imports it. `process_group.open_store` takes over the
port. Invariant: no other process on the machine gets a held port, so equal runs that start at the same time do not
collide.
"""

import random
import socket

from nemo_rl.utils.errors import ResourceInsufficientError

_held: dict[int, socket.socket] = {}


def bind_free_port(address: str, low: int | None, high: int | None) -> socket.socket:
    """Bind a free port.

    Args:
        address: an address of this node.
        low: lowest port to try; if None, the operating system chooses.
        high: highest port to try.

    Returns:
        The bound socket. It does not listen yet.

    Raises:
        ResourceInsufficientError: no port of the range is free.
    """
    candidates = [0]
    if low is not None and high is not None:
        # Python's global generator is not used, because a run seeds it and equal runs would try the same ports.
        candidates = random.SystemRandom().sample(range(low, high + 1), high + 1 - low)
    for port in candidates:
        bound = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            bound.bind((address, port))
        except OSError:
            bound.close()
            continue
        return bound
    raise ResourceInsufficientError(
        f"No port of {low}..{high} is free on {address} (cluster.master_port_range_low and _high). Widen the range, "
        "or set both to null to let the operating system choose."
    )


def hold_port(address: str, low: int | None, high: int | None) -> tuple[str, int]:
    """Bind a free port and return it with its address. It is kept until this process calls `take_port`."""
    bound = bind_free_port(address, low, high)
    # # On Linux, a store that binds the port itself (torch's `env://`) can still do so, because both sides allow reuse.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port = bound.getsockname()[1]
    _held[port] = bound
    return address, port


def take_port(port: int) -> int | None:
    """Return the file descriptor of a held port, now owned by the caller, or None if this process does not hold it."""
    bound = _held.pop(port, None)
    return None if bound is None else bound.detach()
