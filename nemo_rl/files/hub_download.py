"""Download files of a repository of the Hugging Face hub, with a bar or log lines that show the progress.

A name of a model or tokenizer is a folder, a hub id, or a hub id with a commit: `owner/name@COMMIT` (`pinned`).

`huggingface_hub` does the work: its cache, its locks between processes, its attempts (a broken connection is continued
where it broke), and its deadlines (`HF_HUB_DOWNLOAD_TIMEOUT` seconds without a byte). Invariant: files of a commit that
are in the cache cause no request to the hub.
"""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import DryRunFileInfo, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import DryRunError, HFValidationError
from huggingface_hub.utils import WeakFileLock
from tqdm import tqdm

from nemo_rl.host.boundary import raised_as
from nemo_rl.host.waiting_log import StillWaiting
from nemo_rl.utils.errors import DownloadError

_MEGABYTE = 10**6
_PINNED = re.compile(r"([\w.-]+(?:/[\w.-]+)?)@([0-9a-f]{40})")
DESCRIBING_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
"""Patterns of the files of a hub model with its configuration and tokenizer."""
_CODE_FILES = ("*.py",)
SUBFOLDERS = ("*/*",)


def pinned(name: str) -> tuple[str, str] | None:
    """Return hub id and commit of a name `owner/name@COMMIT` with 40 hexadecimal digits, or None for other names."""
    found = None if Path(name).expanduser().is_dir() else _PINNED.fullmatch(name)
    return None if found is None else (found[1], found[2])


def cached_file(name: str, file: str) -> Path | None:
    """Return a file of a repository, of the commit in the name or the newest one, if it is in the hub's cache."""
    repository, commit = pinned(name) or (name, None)
    try:
        found = try_to_load_from_cache(repository, file, revision=commit)
    except HFValidationError:  # the name is a path
        return None
    return Path(found) if isinstance(found, str) else None


@lru_cache(maxsize=32)
def described_source(name: str) -> str:
    """Return what transformers loads a configuration or tokenizer from.

    For `owner/name@COMMIT`, that is the folder of the commit in the hub's cache, after all of its files except the
    weights have been downloaded. Every other name is returned unchanged.

    Raises:
        DownloadError: the files of the commit cannot be downloaded.
    """
    found = pinned(name)
    if found is None:
        return name
    repository, commit = found
    with one_download(repository):
        patterns = (*DESCRIBING_FILES, *_CODE_FILES)
        return str(download(repository, patterns, ignored=SUBFOLDERS, revision=commit))


def download(
    name: str,
    patterns: Sequence[str],
    *,
    ignored: Sequence[str] = (),
    kind: Literal["model", "dataset"] = "model",
    revision: str | None = None,
) -> Path:
    """Download files of a repository into the hub's cache, or find them there.

    Args:
        name: id of the repository.
        patterns: names of files, or patterns for them; a file that none matches is left out.
        ignored: names or patterns of files that are left out even if a pattern matches.
        kind: kind of the repository.
        revision: branch, tag or commit, or None for the newest commit.

    Returns:
        Folder of the commit in the cache.

    Raises:
        DownloadError: the hub has no such repository, or a file did not arrive.
    """
    wanted: dict[str, Any] = {
        "repo_type": kind,
        "revision": revision,
        "allow_patterns": list(patterns),
        "ignore_patterns": list(ignored) or None,
    }
    what = f"the download of the {kind} {name}"

    def failed(error: Exception) -> DownloadError:
        return DownloadError(
            f"{what[0].upper()}{what[1:]} from {constants.ENDPOINT} failed: {type(error).__name__}: {error}. What has "
            "arrived is kept, and the same command continues. A private or gated repository needs a login (`hf auth "
            "login`); without a network, use a folder with the files."
        )

    with raised_as(failed):  # the hub's HTTP library differs from version to version
        files = _files(name, wanted)
        missing = [file.file_size for file in files or () if file.will_download]
        if files and not missing:
            # The name of a file may have folders.
            return Path(files[0].local_path).parents[len(Path(files[0].filename).parts) - 1]
        sizes = [size for size in missing if size is not None]
        return _download(name, wanted, what, sum(sizes) if sizes and len(sizes) == len(missing) else None)


@contextmanager
def one_download(name: str) -> Iterator[None]:
    """Run a block while no other process that uses the same cache runs it for the same repository or folder.

    The ranks of a machine start at the same time. One of them downloads, and the others then find the files in the
    cache. Without the lock, thousands of ranks would ask the hub within seconds, and the hub limits requests. The wait
    ends when the process that has the lock ends; a worker's start has the deadline `cluster.timeouts.setup_s`.

    Args:
        name: id of the repository, or name of the folder.
    """
    lock = Path(constants.HF_HUB_CACHE) / ".locks" / f"nemo_rl--{name.replace('/', '--')}.lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError:  # no file can be stored in a cache that cannot be written
        yield
        return
    with WeakFileLock(lock):
        yield


def _files(name: str, wanted: dict[str, Any]) -> list[DryRunFileInfo] | None:
    """Return the hub's and the cache's answers about the wanted files, or None if the hub cannot be asked."""
    try:
        return snapshot_download(name, **wanted, dry_run=True, tqdm_class=_bars_of([]))
    except DryRunError:
        return None


def _download(name: str, wanted: dict[str, Any], what: str, num_bytes: int | None) -> Path:
    """Download in a thread, and meanwhile show how many megabytes have arrived."""
    bars: list[tqdm] = []
    # Received bytes and written bytes each have a bar.
    total = None if num_bytes is None else -(-num_bytes // _MEGABYTE)
    with StillWaiting(what, "MB have arrived", lambda: _arrived_megabytes(bars), total, "MB") as progress:
        return Path(progress.during(lambda: snapshot_download(name, **wanted, tqdm_class=_bars_of(bars))))


def _arrived_megabytes(bars: Sequence[tqdm]) -> int:
    return -(-int(max((bar.n for bar in bars), default=0)) // _MEGABYTE)


def _bars_of(bars: list[tqdm]) -> type[tqdm]:
    """Return a class of bars that show nothing, and that add themselves to `bars` if they count bytes."""

    class Silent(tqdm):
        """Bar that only counts."""

        monitor_interval = 0

        def __init__(self, *values: Any, **options: Any) -> None:
            super().__init__(*values, **options | {"file": io.StringIO(), "disable": False})
            if options.get("unit") == "B":
                bars.append(self)

        def display(self, *values: Any, **options: Any) -> bool:
            """Show nothing."""
            return True

    return Silent
