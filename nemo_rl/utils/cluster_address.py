"""Read from RAY_ADDRESS whether a run joins a Ray cluster or starts its own Ray."""

import os

VARIABLE = "RAY_ADDRESS"


def cluster_address() -> str | None:
    """Return RAY_ADDRESS; None if it is unset, empty, or `local`: the run then starts its own Ray."""
    address = os.environ.get(VARIABLE, "").strip()
    return None if address in ("", "local") else address
