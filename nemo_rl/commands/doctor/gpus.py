"""Check the GPUs of one machine with `nvidia-smi`, without making a CUDA context or importing torch."""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from nemo_rl.commands.doctor.checks import Finding, Status, ok, skipped
from nemo_rl.commands.doctor.requests import NodeRequest
from nemo_rl.config import count_gpus
from nemo_rl.host.capacity import readable_bytes
from nemo_rl.host.machine_load import query_gpus

_FIELDS = ("name", "driver_version", "memory.total", "memory.used", "index")
_ANSWER_S = 20.0
_LEAST_DRIVER = {13: 580, 12: 525, 11: 450}
"""Oldest driver for each CUDA release, by major version (CUDA's release notes, minor version compatibility)."""
_NOTICED_SHARE = 0.02
"""Share of a GPU's memory that may be in use on an idle GPU."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver reports it."""

    name: str
    """Name of the product."""
    driver: str
    """Version of the driver."""
    total_bytes: int
    """Size of its memory."""
    used_bytes: int
    """Memory in use by processes."""
    index: str
    """Its number in `nvidia-smi`."""


def check_gpus(request: NodeRequest) -> Finding:
    """Check that the machine has the expected GPUs, and that the driver fits torch's build."""
    if request.uses_gpu is False:
        return skipped("the configuration uses none (cluster.device=cpu)")
    gpus = list_gpus() if count_gpus() else []
    if request.gpus is not None and len(gpus) < request.gpus:
        return Finding(
            Status.FAILED,
            f"Ray was told that this machine has {request.gpus} GPUs, its driver shows {len(gpus)}",
            "Start Ray with the GPUs that nvidia-smi shows there, or fix the driver.",
        )
    if not gpus:
        return skipped("no GPU here" if request.uses_gpu else "no GPU here; configurations with cluster.device=cpu run")
    numbers = {"gpus": float(len(gpus)), "gpu_bytes": float(min(gpu.total_bytes for gpu in gpus))}
    names = ", ".join(f"{sum(g.name == name for g in gpus)} x {name}" for name in dict.fromkeys(g.name for g in gpus))
    found = f"{names}, {readable_bytes(int(numbers['gpu_bytes']))} each, driver {gpus[0].driver}"
    failure = _build_problem(gpus[0].driver)
    if failure is not None:
        return Finding(Status.FAILED, f"{found}; {failure[0]}", failure[1], numbers=numbers)
    used = [f"{readable_bytes(g.used_bytes)} of GPU {g.index}" for g in gpus if _is_in_use(g)]
    if used:
        advice = "End the processes that nvidia-smi lists, unless they are this run's own."
        return Finding(Status.WARNING, f"{found}; in use: {', '.join(used)}", advice, numbers=numbers)
    return ok(found, numbers=numbers)


def list_gpus() -> list[Gpu]:
    """List the GPUs that `nvidia-smi` shows and this process may use; [] if it does not answer."""
    rows = query_gpus(*_FIELDS, timeout_s=_ANSWER_S)
    try:
        return [Gpu(name, driver, int(total) << 20, int(used) << 20, n) for name, driver, total, used, n in rows]
    except ValueError:
        return []


def _is_in_use(gpu: Gpu) -> bool:
    return gpu.used_bytes > _NOTICED_SHARE * gpu.total_bytes


def _build_problem(driver: str) -> tuple[str, str] | None:
    """Return why torch cannot use this driver, and the fix; None if it can, or torch is missing."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    release = re.search(r"^cuda\b[^=]*= *'(\d+)[.\d]*'", text, flags=re.MULTILINE)
    if release is None:
        return "torch is a build without CUDA", "Install the build for GPUs: uv sync --extra vllm."
    major, least = int(release[1]), _LEAST_DRIVER.get(int(release[1]), 0)
    if int(driver.split(".")[0]) >= least:
        return None
    advice = "Install a newer driver, or torch's build for an older CUDA (uv pip install --torch-backend=auto)."
    return f"torch is built for CUDA {major}, which needs driver {least} or newer", advice
