"""Make one environment with uv, on top of the driver's packages or from the project's extras.

Invariant: an environment without the driver's Python, the driver's Ray and this nemo_rl is refused.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement

from nemo_rl.config import REPOSITORY_ROOT, VenvConfig
from nemo_rl.utils.errors import ConfigError, DeadlineExceededError, VenvError

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
    """Return a hash of the parts of a pyproject.toml that decide the resolved versions."""
    content = tomllib.loads(project.read_text())
    parts = [content["project"].get(key) for key in _REQUIREMENTS]
    return _hash(json.dumps([*parts, content.get("tool", {}).get("uv")], sort_keys=True).encode())


def project_file() -> Path:
    """Return nemo_rl's pyproject.toml, from its checkout or from its installed wheel.

    Raises:
        VenvError: neither place has a pyproject.toml.
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
    """Return the version of each package by its normalized name, from the first folder that has the package."""
    versions: dict[str, str] = {}
    for found in importlib.metadata.distributions(path=[str(folder) for folder in folders]):
        versions.setdefault(normal_name(found.name), found.version)
    return versions


def normal_name(name: str) -> str:
    """Normalize a package's name as package indexes do."""
    return name.lower().replace("_", "-").replace(".", "-")


def _content(package: Path) -> str:
    """Hash a wheel or folder, so that a change makes another environment, or return "" for a package name."""
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


_LAST_LINES = 30
_ASK_VERSIONS = (
    "import importlib.metadata as m, importlib.util as u, json, platform; "
    "print(json.dumps([platform.python_version(), m.version('ray'), u.find_spec('nemo_rl') is not None]))"
)


class Uv:
    """Calls of uv for one task, with one deadline.

    Args:
        deadline: end of the task on the clock of `time.monotonic()`.
        task: start of the error messages.
    """

    def __init__(self, deadline: float, task: str) -> None:
        self.task = task
        self._deadline = deadline
        found = os.environ.get("UV") or shutil.which("uv")
        if found is None:
            raise VenvError(f"{task} needs uv, which is not on PATH. Install it with `pip install uv`.")
        self._binary = found

    def seconds_left(self) -> float:
        """Return the seconds until the deadline."""
        return self._deadline - time.monotonic()

    def version(self) -> str:
        """Return the version of uv."""
        return self.run("--version").strip()

    def run(self, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
        """Run uv and return its stdout.

        Raises:
            VenvError: uv fails; with the last lines of its stderr.
            DeadlineExceededError: uv takes too long; it is ended with all processes that it started.
        """
        kept = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONHOME")}
        process = subprocess.Popen(
            [self._binary, *arguments],
            env=kept | {"UV_NO_PROGRESS": "1", **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            output, said = process.communicate(timeout=max(self.seconds_left(), 0.0))
        except subprocess.TimeoutExpired:
            raise DeadlineExceededError(
                f"{self.task} took too long (cluster.timeouts.venv_s), in `uv {' '.join(arguments)}`."
            ) from None
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode:
            lines = "\n".join(f"  {line}" for line in said.splitlines()[-_LAST_LINES:])
            raise VenvError(f"{self.task} failed in `uv {' '.join(arguments)}`:\n{lines}")
        return output


def build_venv(folder: Path, wanted: VenvConfig, uv: Uv) -> None:
    """Make an environment in a new folder that may be moved afterwards. If this fails, leave the folder unchanged.

    Raises:
        ConfigError: there is no such extra.
        VenvError, DeadlineExceededError: as in `Uv.run`; VenvError also if packages conflict.
    """
    uv.run("venv", "--relocatable", "--python", sys.executable, str(folder))
    python = folder / "bin" / "python"
    own = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (own / "nemo_rl").symlink_to(REPOSITORY_ROOT / "nemo_rl")
    if wanted.extras is None:
        lines = [f"import site; site.addsitedir({place!r})\n" for place in driver_sites()]
        (own / "_driver_packages.pth").write_text("".join(lines))
        present = packages_in(driver_sites())
    else:
        _sync(folder, wanted.extras, uv)
        library = packages_in(driver_sites()).get("nemo-rl", "0")
        present = {**packages_in([own]), "nemo-rl": library}
    if wanted.packages:
        _add(python, own, wanted.packages, present, uv)
    check_interpreter([str(python)])


def check_interpreter(command: Sequence[str]) -> None:
    """Refuse an interpreter that cannot work with this process's Ray, or that has no nemo_rl.

    Raises:
        VenvError: names the interpreter and the difference.
    """
    place = " ".join(command)
    try:
        answer = subprocess.run(
            [*command, "-c", _ASK_VERSIONS], check=True, capture_output=True, text=True, timeout=120.0, cwd="/"
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", "") or error).strip().splitlines()[-1]
        raise VenvError(f"the interpreter {place} cannot be used: {said}") from error
    python, ray, has_library = json.loads(answer.stdout)
    own_python, own_ray = platform.python_version(), importlib.metadata.version("ray")
    if (python, ray) != (own_python, own_ray):
        raise VenvError(
            f"the interpreter {place} has Python {python} and Ray {ray}, but the driver has Python {own_python} and "
            f"Ray {own_ray}, and all processes of a Ray cluster must have the same. Remove the package that requires "
            "another Ray, or use another interpreter."
        )
    if not has_library:
        raise VenvError(f"the interpreter {place} does not find nemo_rl. Install it there.")


def update_lock(uv: Uv) -> None:
    """Update the project's lock file if it is missing or older than its requirements. Use no network otherwise."""
    uv.run("lock", "--project", str(project_file().parent), "--python", sys.executable)


def _sync(folder: Path, extras: Sequence[str], uv: Uv) -> None:
    """Install the locked packages of some extras of the project."""
    project = project_file()
    known = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    unknown = [name for name in extras if name not in known]
    if unknown:
        raise ConfigError(f"nemo_rl has no extra {', '.join(unknown)}; it has {', '.join(sorted(known))}.")
    flags = [flag for extra in extras for flag in ("--extra", extra)]
    common = ["--project", str(project.parent), "--python", sys.executable, "--frozen", "--no-install-project"]
    uv.run("sync", *common, *flags, environment={"UV_PROJECT_ENVIRONMENT": str(folder)})


def _add(python: Path, own: Path, packages: Sequence[str], present: Mapping[str, str], uv: Uv) -> None:
    """Install packages and their missing dependencies without changing packages in `present`."""
    named = {_name_of(package) for package in packages}
    excludes = python.parent.with_name("present.txt")
    excludes.write_text("".join(f"{name}\n" for name in present if name not in named))
    # `--directory /` keeps settings files of this or another project from having an effect.
    uv.run("pip", "install", "--directory", "/", "--python", str(python), "--excludes", str(excludes), *packages)
    wrong = list(_unmet(own, present))
    if wrong:
        raise VenvError(
            f"{uv.task} failed: {'; '.join(wrong)}. Name a version that fits in `packages`, or make a separate "
            "environment with `extras`."
        )


def _name_of(package: str) -> str:
    """Return the normalized name of a requirement, a wheel or a folder."""
    path = Path(package)
    if path.suffix == ".whl":
        return normal_name(path.name.partition("-")[0])
    if path.is_dir():
        project = path / "pyproject.toml"
        table = tomllib.loads(project.read_text()).get("project", {}) if project.exists() else {}
        return normal_name(table.get("name", path.name))
    name = re.match(r"[\w.-]+", package)
    return normal_name(name[0]) if name else package


def _unmet(own: Path, present: Mapping[str, str]) -> Iterator[str]:
    """Describe requirements of packages in `own` that are missing or present in another version."""
    versions = {**present, **packages_in([own])}
    for found in importlib.metadata.distributions(path=[str(own)]):
        if present.get(normal_name(found.name)) == found.version:
            continue
        for text in found.requires or ():
            need = Requirement(text)
            if need.marker is not None and not need.marker.evaluate({"extra": ""}):
                continue
            version = versions.get(normal_name(need.name))
            if version is None:
                yield f"{found.name} {found.version} needs {text}, which is not installed"
            elif not need.specifier.contains(version, prereleases=True):
                yield f"{found.name} {found.version} needs {text}, but {version} is installed"
