"""Name the features of one machine's processor by which torch and vLLM choose their kernels."""

import platform

from nemo_rl.commands.doctor.checks import Finding, Status, ok
from nemo_rl.commands.doctor.requests import NodeRequest

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
    """Name the processor's features; vLLM's build for CPUs needs AVX2 on x86-64."""
    import torch  # slow, and no other check of a machine needs it in this process

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
