"""Query `nvidia-smi` about the GPUs this process may use, without making a CUDA context."""

import os
import subprocess


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
        try:
            done = subprocess.run([*command, *chosen], capture_output=True, text=True, timeout=timeout_s, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        return [[cell.strip() for cell in line.rsplit(",", len(fields) - 1)] for line in done.stdout.splitlines()]
    return []
