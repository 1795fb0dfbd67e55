"""Note in the folder of a service on which base model its files were made, and refuse another one.

    service.json    name of the base, and a digest of its configuration and of samples of its weights

Invariant: what reads a folder writes nothing into it, so the checks of a service that runs do not disturb it.
"""

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.utils import CONFIG_NAME

from nemo_rl.config import PolicyConfig
from nemo_rl.files.folders import LOCK_FILE, FolderLock
from nemo_rl.files.regular_file import read_text
from nemo_rl.models.huggingface.tensor_files import cached_folder
from nemo_rl.serving.store.journal import read_json_file, write_json
from nemo_rl.utils.errors import ConfigError

BASE_FILE = "service.json"
_SAMPLES = 64
"""Number of places of each weight file that are compared."""
_SAMPLE_BYTES = 4096
_OF_LIBRARIES = ("transformers_version", "_name_or_path")
"""Keys of a model's configuration that do not change the model."""


def note_base(folder: Path, policy: PolicyConfig) -> None:
    """Write the base of a new folder, whose lock the caller holds or is about to take."""
    if (folder / BASE_FILE).exists():
        return
    digest = base_digest(policy)
    if digest is not None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(folder / BASE_FILE, {"base_model": policy.model_name, "digest": digest})


def check_unused(folder: Path, wait_s: float = 0.0) -> None:
    """Refuse a folder that another service uses.

    Args:
        folder: of the service. It may be missing.
        wait_s: time in seconds to wait for a process that is ending and holds the folder still.

    Raises:
        ConfigError: another process holds the folder.
    """
    if (folder / LOCK_FILE).exists():
        lock = FolderLock(folder)
        acquire_folder(lock, folder, wait_s)
        lock.release()


def check_folder(folder: Path, policy: PolicyConfig, max_rank: int) -> None:
    """Refuse a folder that another service uses, or whose adapters do not fit.

    Args:
        folder: of the service. It may be missing.
        policy: the base model.
        max_rank: largest rank of an adapter.

    Raises:
        ConfigError: the folder cannot be used.
        CheckpointError: a file of the folder is damaged.
    """
    check_unused(folder)
    if (folder / BASE_FILE).exists():
        stored, digest = read_json_file(folder / BASE_FILE), base_digest(policy)
        if digest is not None and stored["digest"] != digest:
            raise ConfigError(
                f"service.state_dir: the models in {folder} were trained on another base, "
                f"{stored['base_model']!r}, than policy.model_name={policy.model_name!r}. Serve that base, or choose "
                "another folder."
            )
    for file, rank in _ranks(folder):
        if rank > max_rank:
            raise ConfigError(
                f"service.state_dir: {file} describes an adapter of rank {rank}, and service.max_rank={max_rank}. Set "
                f"service.max_rank to at least {rank}, or choose another folder."
            )


def acquire_folder(lock: FolderLock, folder: Path, wait_s: float) -> None:
    """Take the lock of a folder.

    Raises:
        ConfigError: another process holds it.
    """
    end = time.monotonic() + wait_s
    while not lock.acquire():
        if time.monotonic() > end:
            raise ConfigError(
                f"service.state_dir: {folder} is used by another service, or cannot be written to. End that service, "
                "or choose another folder."
            )
        time.sleep(0.1)


def base_digest(policy: PolicyConfig) -> str | None:
    """Return a digest of a base model, or None if its files are not on this machine yet.

    It contains the configuration, and names, sizes and samples of the weight files.
    """
    local = Path(policy.model_name).expanduser()
    folder = local if local.is_dir() else cached_folder(policy.model_name)
    if folder is None:
        return None
    config: dict[str, Any] = json.loads(read_text(folder / CONFIG_NAME))
    kept = {key: value for key, value in config.items() if key not in _OF_LIBRARIES}
    described = json.dumps([kept, policy.hf_config_overrides], sort_keys=True, default=str)
    digest = hashlib.blake2b(described.encode(), digest_size=16)
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as content:
            for number in range(_SAMPLES):
                content.seek(size * number // _SAMPLES)
                digest.update(content.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _ranks(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield the files that describe adapters of a folder, with their ranks."""
    for pattern in ("models/*/model.json", "models/*/state.json", "checkpoints/*/*/*/checkpoint.json"):
        for file in sorted(folder.glob(pattern)):
            yield file, read_json_file(file)["spec"]["rank"]
