"""Make Python environments for workers with uv, once per node.

`distributed.ray_actor_environment_registry` makes environments on every node of a run. Invariant: a folder with the
name of a finished environment is complete and was made from exactly the inputs in its digest (`ingredients`), because
it is built in another folder and renamed.

        <folder>/<name>-<digest>/               finished; `venv.json` in it lists the inputs
        <folder>/.<name>.making-<host>-<pid>/   being made, or left by a process that died
        <folder>/.<name>.lock                   held while an environment is being made
"""

import argparse
import fcntl
import json
import logging
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from nemo_rl.compat.public_names import public_names
from nemo_rl.config import REPOSITORY_ROOT, VenvConfig
from nemo_rl.files.folders import is_shared, require_own
from nemo_rl.utils.errors import ConfigError, DeadlineExceededError, VenvError
from nemo_rl.utils.venvs.build import (
    Uv,
    build_venv,
    check_interpreter,
    digest,
    ingredients_of,
    update_lock,
    with_absolute_paths,
)

logger = logging.getLogger(__name__)

_REGISTRY = "nemo_rl.distributed.ray_actor_environment_registry"
__getattr__ = public_names(__name__, {"create_local_venv_on_each_node": _REGISTRY, "make_actor_runtime_env": _REGISTRY})

_IS_CHECKOUT = (REPOSITORY_ROOT / "pyproject.toml").exists()
DEFAULT_VENV_DIR = str(REPOSITORY_ROOT / "venvs" if _IS_CHECKOUT else Path.home() / ".cache" / "nemo_rl" / "venvs")
_STAMP = "venv.json"


class PY_EXECUTABLES:  # noqa: N801  (a name of NeMo RL)
    """Values that choose the Python of a kind of worker: a path, or `uv run` with options (`parse_py_executable`)."""

    SYSTEM = sys.executable
    """The driver's own interpreter."""
    BASE = "uv run"
    """An environment with the dependencies of nemo_rl."""
    FSDP = AUTOMODEL = BASE
    VLLM = "uv run --extra vllm"
    MCORE = "uv run --extra mcore"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse_py_executable(text: str) -> VenvConfig | None:
    """Parse one of `PY_EXECUTABLES` or a similar text into an environment, or None for the driver's interpreter.

    Args:
        text: path of an interpreter, or `uv run` with --extra EXTRA and --with REQUIREMENT, both repeatable.

    Raises:
        ConfigError: the text has another option.
    """
    if text == PY_EXECUTABLES.SYSTEM:
        return None
    words = shlex.split(text)
    if words[:2] != ["uv", "run"]:
        return VenvConfig.build(py_executable=text)
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--extra", action="append", default=[])
    parser.add_argument("--with", action="append", default=[], dest="packages")
    parser.add_argument("--directory")  # ignored: the project is always nemo_rl
    parser.add_argument("--locked", "--frozen", "--reinstall", action="store_true")
    try:
        given = parser.parse_args(words[2:])
    except ConfigError as error:
        raise ConfigError(f"py_executable {text!r}: {error}. Options of `uv run` here: --extra, --with.") from None
    return VenvConfig.build(extras=given.extra, packages=given.packages)


def venv_folder() -> Path:
    """Return the folder of the environments: NEMO_RL_VENV_DIR, or `DEFAULT_VENV_DIR`.

    NRL_FORCE_LOCAL_VENVS=true takes precedence and uses a folder below the node's temporary folder.
    """
    if is_set("NRL_FORCE_LOCAL_VENVS"):
        return Path(tempfile.gettempdir()) / _local_name()
    return Path(os.environ.get("NEMO_RL_VENV_DIR") or DEFAULT_VENV_DIR).expanduser().absolute()


def _local_name() -> str:
    return f"nemo_rl_venvs_{os.getuid()}"


def is_set(variable: str) -> bool:
    """Return whether an environment variable is `true` or `1`."""
    return os.environ.get(variable, "").lower() in ("1", "true")


def create_local_venv(
    py_executable: str | VenvConfig,
    venv_name: str,
    force_rebuild: bool = False,
    *,
    folder: Path | None = None,
    timeout_s: float = 1800.0,
) -> str:
    """Return the interpreter of an environment on this node, which is made first if none has the same inputs.

    If several processes request the same environment, one makes it and the others wait.

    Args:
        py_executable: the requested environment; a text as for `parse_py_executable`.
        venv_name: start of the folder's name.
        force_rebuild: make it again even if it exists.
        folder: folder of the environments; if None, `venv_folder()`.
        timeout_s: time limit in seconds, including the wait for another process that makes the environment.

    Returns:
        Path of its `python`.

    Raises:
        ConfigError: the text cannot be parsed, or there is no such extra.
        VenvError: uv is missing or fails; the environment's Python, Ray or nemo_rl differ from the driver's; or other
            users may change files in the folder.
        DeadlineExceededError: it took longer than `timeout_s`.
    """
    wanted = parse_py_executable(py_executable) if isinstance(py_executable, str) else py_executable
    if wanted is None:
        return sys.executable
    if wanted.py_executable is not None:
        check_interpreter(shlex.split(wanted.py_executable))
        return wanted.py_executable
    start, name = time.time(), re.sub(r"[^\w.-]", "_", venv_name)
    uv = Uv(time.monotonic() + timeout_s, f"Making the environment {venv_name!r}")
    folder = _usable(folder or venv_folder())
    if wanted.extras is not None:
        update_lock(uv)
    found = ingredients_of(with_absolute_paths(wanted), uv.version())
    final = folder / f"{name}-{digest(found)}"
    newer_than = start if force_rebuild else 0.0
    if not _is_there(final, newer_than):
        with _locked(folder / f".{name}.lock", uv):
            if not _is_there(final, newer_than):
                logger.info("Making the environment %r in %s (%s)", venv_name, final, _reason(folder, name, found))
                _make(final, name, with_absolute_paths(wanted), found, uv)
                logger.info("The environment %r took %.1f s", venv_name, time.time() - start)
    return str(final / "bin" / "python")


def _usable(folder: Path) -> Path:
    """Create the folder of the environments, which must be private if all users share the place.

    Others can guess its path and the names in it, and workers run the interpreters that it holds.
    """
    if folder.name != _local_name() and not is_shared(folder):
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    try:
        return require_own(folder, "Or set NEMO_RL_VENV_DIR to a folder of your own and NRL_FORCE_LOCAL_VENVS=false.")
    except ConfigError as error:
        raise VenvError(f"Environments of workers cannot be kept in {error}") from error


def _is_there(final: Path, newer_than: float) -> bool:
    try:
        return (final / _STAMP).stat().st_mtime >= newer_than
    except FileNotFoundError:
        return False


def _reason(folder: Path, name: str, found: Mapping[str, str]) -> str:
    """Explain why an environment is made, by the changes since the last environment of its name."""
    stamps = sorted(folder.glob(f"{name}-*/{_STAMP}"), key=lambda stamp: stamp.stat().st_mtime)
    if not stamps:
        return "there is none yet"
    last = json.loads(stamps[-1].read_text())
    changed = sorted(key for key in found.keys() | last.keys() if found.get(key) != last.get(key))
    place = stamps[-1].parent.name
    return f"{place} was made with another {', '.join(changed)}" if changed else f"{place} is made again"


def _make(final: Path, name: str, wanted: VenvConfig, found: Mapping[str, str], uv: Uv) -> None:
    mine = f".{name}.making-{os.uname().nodename}-"
    for left in final.parent.glob(f"{mine}*"):  # the process that made it has died: a living one would hold the lock
        shutil.rmtree(left, ignore_errors=True)  # its uv may still write; the next call removes the rest
    making = final.parent / f"{mine}{os.getpid()}"
    try:
        build_venv(making, wanted, uv)
        (making / _STAMP).write_text(json.dumps(found, indent=1))
        if final.exists():
            final.rename(making / "replaced")
        making.rename(final)
        shutil.rmtree(final / "replaced", ignore_errors=True)
    finally:
        shutil.rmtree(making, ignore_errors=True)


@contextmanager
def _locked(file: Path, uv: Uv) -> Iterator[None]:
    """Hold a lock among threads and processes, which the kernel releases when the process ends."""
    with file.open("a") as opened:
        while True:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if uv.seconds_left() <= 0:
                    raise DeadlineExceededError(
                        f"{uv.task} took too long: another process holds {file} (cluster.timeouts.venv_s)."
                    ) from None
                time.sleep(0.1)
            except OSError as error:
                raise VenvError(
                    f"{uv.task}: {file} cannot be locked ({error.strerror}). Set NEMO_RL_VENV_DIR to a file system "
                    "with locks (NFS 4, Lustre with flock), or NRL_FORCE_LOCAL_VENVS=true."
                ) from error
        yield
