"""Finds files that a configuration names by a relative path.

Invariant: a relative path means the current folder first, then the repository root (the folder that holds `examples/`
and `nemo_rl/`).
"""

from pathlib import Path

REPOSITORY_ROOT = Path(__file__).resolve().parents[3]

_DATA_SUFFIXES = frozenset({".json", ".jsonl", ".parquet", ".arrow", ".csv", ".gz", ".zst", ".txt"})


def find_path(path: str | Path) -> Path | None:
    """Return the absolute path of the existing file or folder that `path` means, or None if there is none.

    Args:
        path: absolute, starting with `~`, or relative to the current folder or the repository root.
    """
    try:
        wanted = Path(path).expanduser()
        folders = [Path.cwd(), REPOSITORY_ROOT]
        places = [wanted] if wanted.is_absolute() else [folder / wanted for folder in folders]
        return next((place.resolve() for place in places if place.exists()), None)
    except (OSError, RuntimeError, ValueError):  # a name that no file can have, or a user that does not exist
        return None


def looks_local(name: str) -> bool:
    """Return whether a model or data name can only be a path, never a hub id such as `owner/name`."""
    return (
        name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or Path(name).suffix.lower() in _DATA_SUFFIXES
    )
