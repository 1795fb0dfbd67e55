"""Save and restore the state of this process's random-number generators, in one file for each rank."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def rng_state() -> dict[str, Any]:
    """Return the state of this process's generators, in types that load without executing code."""
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    inner = numpy_state["state"]
    return {
        "python": random.getstate(),
        "numpy": {
            **numpy_state,
            "state": {"key": torch.from_numpy(inner["key"].astype(np.int64)), "pos": inner["pos"]},
        },
        "torch": torch.get_rng_state(),
        "accelerator": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def rng_file(folder: Path) -> Path:
    """Return the file in an optimizer folder that holds this rank's state."""
    return folder / "rng" / f"rank_{dist.get_rank():05d}.pt"


def restore_rng_state(state: dict[str, Any]) -> None:
    """Restore the state that `rng_state` returned."""
    random.setstate(state["python"])
    numpy_state = state["numpy"]
    key, position = numpy_state["state"]["key"], numpy_state["state"]["pos"]
    inner = {"key": key.numpy().astype(np.uint32), "pos": position}
    np.random.set_state({**numpy_state, "state": inner})
    torch.set_rng_state(state["torch"])
    if state["accelerator"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["accelerator"])
