"""List the inputs of an environment and their digest, and the packages that exist already.

Invariant: two environments with the same inputs are interchangeable.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import site
import sys
import sysconfig
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from nemo_rl.config import REPOSITORY_ROOT, VenvConfig
from nemo_rl.utils.errors import VenvError

_REQUIREMENTS = ("requires-python", "dependencies", "optional-dependencies")


def ingredients_of(wanted: VenvConfig, uv_version: str) -> dict[str, str]:
    """Return every input that decides the content of an environment, by name."""
    found = {
        "python": f"{platform.python_version()} {os.path.realpath(sys.executable)}",
        "uv": uv_version,
        "nemo_rl": str(REPOSITORY_ROOT),
        "packages": " ".join(f"{package}{_content(Path(package))}" for package in wanted.packages),
    }
    if wanted.extras is None:
        versions = sorted(packages_in(driver_sites()).items())
        return found | {"driver": f"{sys.prefix} {_hash(json.dumps(versions).encode())}"}
    project = project_file()
    lock = project.with_name("uv.lock")
    return found | {
        "extras": " ".join(sorted(wanted.extras)),
        "ray": importlib.metadata.version("ray"),
        "pyproject.toml": requirements_digest(project),
        "uv.lock": _hash(lock.read_bytes()) if lock.exists() else "none",
    }


def digest(found: Mapping[str, str]) -> str:
    """Return a short hash of the inputs."""
    return _hash(json.dumps(sorted(found.items())).encode())[:12]


def requirements_digest(project: Path) -> str:
    """Return a hash of the parts of a pyproject.toml that decide what is resolved."""
    content = tomllib.loads(project.read_text())
    parts = [content["project"].get(key) for key in _REQUIREMENTS]
    return _hash(json.dumps([*parts, content.get("tool", {}).get("uv")], sort_keys=True).encode())


def project_file() -> Path:
    """Return nemo_rl's pyproject.toml, from its checkout or from its installed wheel.

    Raises:
        VenvError: neither has one.
    """
    brought = Path(sysconfig.get_path("data"), "share", "nemo_rl", "pyproject.toml")
    for place in (REPOSITORY_ROOT / "pyproject.toml", brought):
        if place.exists():
            return place
    raise VenvError(
        f"an environment with extras of nemo_rl needs its pyproject.toml, which is neither in {REPOSITORY_ROOT} nor "
        f"at {brought}. Run from a checkout, or leave extras out and list packages."
    )


def with_absolute_paths(wanted: VenvConfig) -> VenvConfig:
    """Return the configuration with absolute paths for wheels and folders among its packages."""
    absolute = [str(Path(name).absolute()) if "/" in name and Path(name).exists() else name for name in wanted.packages]
    return wanted.model_copy(update={"packages": absolute})


def driver_sites() -> list[str]:
    """Return the folders with the packages of this process's interpreter."""
    users = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [*site.getsitepackages(), *users]


def packages_in(folders: Iterable[str | Path]) -> dict[str, str]:
    """Return the version of each package by its normalized name; the first folder that has it counts."""
    versions: dict[str, str] = {}
    for found in importlib.metadata.distributions(path=[str(folder) for folder in folders]):
        versions.setdefault(normal_name(found.name), found.version)
    return versions


def normal_name(name: str) -> str:
    """Normalize a package's name as package indexes do."""
    return name.lower().replace("_", "-").replace(".", "-")


def _content(package: Path) -> str:
    """Hash a wheel or folder, so that a change in it makes another environment; empty for a package name."""
    if not package.is_absolute():
        return ""
    files = [package] if package.is_file() else sorted(_sources(package))
    return ":" + _hash(b"".join(str(file).encode() + b"\0" + file.read_bytes() for file in files))


def _sources(folder: Path) -> Iterator[Path]:
    for parent, folders, names in folder.walk():
        made = ("__pycache__", "build", "dist") if parent == folder else ("__pycache__",)
        folders[:] = [
            name for name in folders if name not in made and not name.startswith(".") and not name.endswith(".egg-info")
        ]
        yield from (parent / name for name in names)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
