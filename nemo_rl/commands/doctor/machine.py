"""Check one machine: its limits (shared memory, open files, temporary files, memory, ports), its processor, its GPUs.

GPUs are checked with `nvidia-smi`, without making a CUDA context or importing torch.
"""

import importlib.util
import platform
import re
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

from nemo_rl.commands.doctor.checks import Finding, NodeRequest, Status, ok, skipped
from nemo_rl.config import count_gpus
from nemo_rl.distributed.cluster.local_ray import object_store_bytes
from nemo_rl.distributed.cluster.start_checks import ray_folder, start_fault
from nemo_rl.distributed.ranks.rendezvous import bind_free_port
from nemo_rl.host.capacity import machine_bytes, readable_bytes, usable_cores
from nemo_rl.host.machine_load import query_gpus
from nemo_rl.sandbox import why_unavailable
from nemo_rl.sandbox.mechanisms import IN_ORDER
from nemo_rl.utils.errors import ResourceInsufficientError

FEATURES = {
    "x86_64": {
        "AVX2": "avx2",
        "AVX-512": "avx512_f",
        "AVX-512 for bfloat16": "avx512_bf16",
        "AMX": "amx_tile",
        "AMX for bfloat16": "amx_bf16",
    },
    "aarch64": {"NEON": "neon", "bfloat16": "bf16", "SVE": "sve"},
}
"""Features of each kind of machine: their names, and the names of `torch.cpu.get_capabilities`."""
_KINDS = {"amd64": "x86_64", "arm64": "aarch64"}


def check_processor(request: NodeRequest) -> Finding:
    """Name the processor's features, which have to include AVX2 on x86-64 for vLLM's build for CPUs."""
    import torch  # slow, and no other check of a machine needs torch in this process

    values = torch.cpu.get_capabilities()
    machine = platform.machine().lower()
    known = FEATURES.get(_KINDS.get(machine, machine))
    name = str(values.get("cpu_name") or "a processor without a name")
    if known is None:
        return ok(f"{name} ({machine})")
    present = [feature for feature, key in known.items() if values.get(key)]
    absent = [feature for feature in known if feature not in present]
    found = f"{name} with {_listed(present, 'and')}" if present else name
    found += f", without {_listed(absent, 'or')}" if absent else ""
    numbers = {key: float(bool(values.get(key))) for key in known.values()}
    if "AVX2" in absent and request.engine == "vllm" and request.uses_gpu is False:
        advice = "Use a processor with AVX2, or policy.generation.backend=hf."
        return Finding(Status.FAILED, f"{found}; vLLM's build for CPUs needs AVX2", advice, numbers=numbers)
    return ok(found, numbers=numbers)


def _listed(names: list[str], last: str) -> str:
    return f" {last} ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


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
    """Size of the GPU's memory."""
    used_bytes: int
    """Memory in use by processes."""
    index: str
    """Number of the GPU in `nvidia-smi`."""


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
    """List the GPUs that `nvidia-smi` shows and this process may use, or none if it does not answer."""
    rows = query_gpus(*_FIELDS, timeout_s=_ANSWER_S)
    try:
        return [Gpu(name, driver, int(total) << 20, int(used) << 20, n) for name, driver, total, used, n in rows]
    except ValueError:
        return []


def _is_in_use(gpu: Gpu) -> bool:
    return gpu.used_bytes > _NOTICED_SHARE * gpu.total_bytes


def _build_problem(driver: str) -> tuple[str, str] | None:
    """Return why torch cannot use this driver, and the fix, or None if it can or torch is missing."""
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


SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED_BYTES = 512 << 20
"""Containers start with 64 MB, with which NCCL and the tensors of data loaders end a process by SIGBUS."""
_RAY_SHARE, _RAY_MOST_BYTES = 0.3, 200 * 10**9
"""Size of the object store that Ray would choose: share of the machine's memory, and maximum (`ray_constants`)."""
_RAY_SHARED_SHARE, _RAY_LEAST_CAP_BYTES = 0.95, 10**10
"""Ray caps its choice at this share of free shared memory, but at no less than this size
(`ray._private.utils.resolve_object_store_memory`), so it never refuses a size that it chose itself."""
_RAY_FULL = 0.95
"""Share of a disk in use above which Ray does not spill objects to it."""
_LEAST_TEMPORARY_BYTES = 1 << 30
_RAY_FILES, _FEW_FILES = 65536, 4096
"""Limits of open files: the limit that Ray sets for itself, and the limit below which Ray warns."""
_LEAST_FILES = 1024
RAY_PORT = 6379
"""Default port of `ray start --head`."""


def check_shared_memory(request: NodeRequest) -> Finding:
    """Compare the free part of /dev/shm with the needs of Ray's object store and other users of shared memory.

    Weights do not count: their transport maps unnamed memory files (`weight_sync.transport`), which are limited
    only by the machine's memory. If the object store does not fit into shared memory, Ray starts with it on the disk.
    Ray refuses only explicit sizes above 10 GB, and runs request 1 GiB at most.
    """
    if not SHARED_MEMORY.is_dir():
        return skipped(f"{SHARED_MEMORY} does not exist here")
    free = shutil.disk_usage(SHARED_MEMORY).free
    told = object_store_bytes()
    wanted = told or min(int(_RAY_SHARE * machine_bytes()), _RAY_MOST_BYTES)
    store = told or min(wanted, max(int(_RAY_SHARED_SHARE * free), _RAY_LEAST_CAP_BYTES))
    found = f"{readable_bytes(free)} free in {SHARED_MEMORY}"
    advice = (
        f"Give it more (docker run --shm-size={-(-2 * wanted // 2**30)}g or --ipc=host; in Kubernetes an "
        f"emptyDir with medium: Memory at {SHARED_MEMORY}), or delete files of ended runs there."
    )
    if free < _LEAST_SHARED_BYTES:
        need = f"less than the {readable_bytes(_LEAST_SHARED_BYTES)} that NCCL and data loaders may take"
        return Finding(_severity(request), f"{found}, {need}", advice)
    if not request.starts_ray or free >= wanted:
        return ok(found)
    takes = f"{found}; Ray's object store takes {readable_bytes(store)}"
    if free < store:
        return Finding(Status.WARNING, f"{takes} and will be on the disk, which is slow", advice)
    return Finding(Status.WARNING, f"{takes} instead of {readable_bytes(wanted)}; more goes to the disk", advice)


def check_sandbox(request: NodeRequest) -> Finding:
    """Run a small program in each sandbox that `env.code.sandbox` can choose."""
    reasons = {f"{one.name} (namespaces: {one.namespaces})": why_unavailable(one) for one in IN_ORDER}
    works = [name for name, reason in reasons.items() if reason is None]
    details = "\n".join(f"{name}: {reason or 'works'}" for name, reason in reasons.items())
    if works:
        return ok(f"programs of a model run in {works[0]}", details=details)
    advice = (
        "Install bubblewrap and allow user namespaces, or use a kernel with Landlock (Linux 6.2 or later; 5.13 where "
        "namespaces are allowed)."
    )
    return Finding(Status.WARNING, "no sandbox works, so the environment code is refused", advice, details)


def _severity(request: NodeRequest) -> Status:
    """Return the severity of a shortage that small CPU runs can tolerate."""
    uses_gpu = count_gpus() > 0 if request.uses_gpu is None else request.uses_gpu
    return Status.FAILED if uses_gpu else Status.WARNING


def check_open_files(request: NodeRequest) -> Finding:
    """Compare the limit of open files, after Ray has raised it, with what its sockets and workers need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reachable = max(soft, min(hard, _RAY_FILES)) if hard != resource.RLIM_INFINITY else max(soft, _RAY_FILES)
    found = f"{soft} open files for a process (ulimit -n), up to {reachable} for Ray"
    advice = f"ulimit -n {_RAY_FILES} before the start, or raise nofile in /etc/security/limits.conf."
    if reachable < _LEAST_FILES:
        need = f"a run on GPUs or with many samples needs {_LEAST_FILES} at least"
        return Finding(_severity(request), f"{found}; {need}", advice)
    return Finding(Status.WARNING, found, advice) if reachable < _FEW_FILES else ok(found)


def check_ray_start(request: NodeRequest) -> Finding:
    """Find reasons why Ray cannot start for a run: too long socket paths, no loopback, unwritable folders."""
    if not request.starts_ray:
        return skipped("the run joins a running Ray")
    fault = start_fault()
    return ok(f"no problem found; Ray can start in {ray_folder()}") if fault is None else Finding(Status.FAILED, *fault)


def check_temporary_files(request: NodeRequest) -> Finding:
    """Check the disk on which Ray keeps its logs, sockets and spilled objects."""
    chosen = ray_folder()
    folder = next(place for place in (chosen, *chosen.parents) if place.is_dir())  # Ray creates missing folders
    disk = shutil.disk_usage(folder)
    found = f"{readable_bytes(disk.free)} free in {folder}"
    advice = f"Delete old folders in {chosen}, or set RAY_TMPDIR to a folder on a larger disk."
    if disk.free < _LEAST_TEMPORARY_BYTES:
        return Finding(
            Status.FAILED, f"{found}; Ray's logs alone need {readable_bytes(_LEAST_TEMPORARY_BYTES)}", advice
        )
    if disk.used > _RAY_FULL * (disk.used + disk.free):
        return Finding(Status.WARNING, f"{found}: too full for Ray to spill objects there", advice)
    return ok(found)


def check_host_memory(request: NodeRequest) -> Finding:
    """Measure the machine's memory, or the control group's limit."""
    size = machine_bytes()
    return ok(f"{size / 2**30:.3g} GiB, {usable_cores()} cores", numbers={"host_bytes": size})


def check_ports(request: NodeRequest) -> Finding:
    """Check the ports configured for the stores of worker groups."""
    low, high = request.ports
    if low is None or high is None:
        return ok("the operating system chooses (cluster.master_port_range_low and _high are null)")
    free = sum(_is_free(request.address, port) for port in range(low, high + 1))
    found = f"{free} of the ports {low}..{high} are free on {request.address}"
    if free < request.port_count:
        return Finding(
            Status.FAILED,
            f"{found}, and the run needs {request.port_count} (cluster.master_port_range_low and _high)",
            "Widen the range, end the processes that listen there (ss -ltnp), or set both keys to null.",
        )
    if request.starts_ray and not _is_free(request.address, RAY_PORT):
        return Finding(
            Status.WARNING,
            f"{found}; port {RAY_PORT} is taken",
            "If it is your Ray, join it with RAY_ADDRESS=auto; otherwise start another head with ray start "
            "--head --port=... A run without RAY_ADDRESS does not need the port.",
        )
    return ok(found)


def _is_free(address: str, port: int) -> bool:
    try:
        bind_free_port(address, port, port).close()
    except ResourceInsufficientError:
        return False
    return True
