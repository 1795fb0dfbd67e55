"""Whether a run joins a Ray cluster or starts a Ray of its own, as RAY_ADDRESS says."""

import os

VARIABLE = "RAY_ADDRESS"


def cluster_address() -> str | None:
    """The value of RAY_ADDRESS; None where it is unset, empty, or `local`: a run then starts its own Ray."""
    address = os.environ.get(VARIABLE, "").strip()
    return None if address in ("", "local") else address
