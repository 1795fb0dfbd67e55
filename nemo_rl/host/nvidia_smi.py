"""What `nvidia-smi` knows of the GPUs that this process may use; no CUDA context is made."""

import os
import subprocess


def query_gpus(*fields: str, timeout_s: float = 5.0) -> list[list[str]]:
    """Values of each GPU in the order of `fields` (`nvidia-smi --help-query-gpu`); none where the tool is silent.

    With `CUDA_VISIBLE_DEVICES` only the GPUs that it names; all of them where the tool does not know the names, such as
    those of parts of a GPU (MIG).

    Args:
        fields: what to ask for; only the first one may have commas in its values.
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
