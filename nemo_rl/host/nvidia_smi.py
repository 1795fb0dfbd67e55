"""Query `nvidia-smi` about the GPUs this process may use, without making a CUDA context."""

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress

_END_S = 1.0
"""Seconds that the tool may take to end after SIGKILL; a driver that hangs may keep it for ever."""


def query_gpus(*fields: str, timeout_s: float = 5.0) -> list[list[str]]:
    """Return each GPU's values in the order of `fields` (`nvidia-smi --help-query-gpu`); [] if the tool fails.

    `CUDA_VISIBLE_DEVICES` selects the GPUs. If the tool does not know the names in it, such as those of MIG instances,
    all GPUs are returned.

    Args:
        fields: names of the values; only the first one may contain commas.
        timeout_s: seconds to wait for an answer.
    """
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "")
    for chosen in (["-i", visible], []) if visible else ([],):
        answer = _answer([*command, *chosen], timeout_s)
        if answer is not None:
            return [[cell.strip() for cell in line.rsplit(",", len(fields) - 1)] for line in answer.splitlines()]
    return []


def _answer(command: Sequence[str], timeout_s: float) -> str | None:
    """Return what a command prints; None if it fails, or does not end in time."""
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return None
    assert process.stdout is not None
    try:
        printed, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        process.stdout.close()
        return None
    return printed if process.returncode == 0 else None
