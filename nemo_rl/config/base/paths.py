"""Find files that a configuration names by a relative path.

Invariant: a relative path is looked up in the current folder, and then in the folder with `examples/` (the repository
root, or the package in a wheel). A bare name, such as `tiny-chat`, may also name a file or model of the library.
"""

from pathlib import Path

from nemo_rl.utils.errors import did_you_mean

REPOSITORY_ROOT = Path(__file__).resolve().parents[3]

_PACKAGE = Path(__file__).resolve().parents[2]
FILES_ROOT = _PACKAGE if (_PACKAGE / "examples").is_dir() else REPOSITORY_ROOT
"""Folder with `examples/`, which a wheel has inside the package."""
_LIBRARY_FOLDERS = ("examples/configs", "examples/configs/evals", "examples/assets")

SMOLLM2_FOLDER = "models/SmolLM2-135M-Instruct"
"""Folder that `nemo_rl smollm2` makes in the current folder."""

_DATA_SUFFIXES = frozenset({".json", ".jsonl", ".parquet", ".arrow", ".csv", ".gz", ".zst", ".txt"})


def find_path(path: str | Path) -> Path | None:
    """Return the absolute path of an existing file or folder for `path`, or None if there is none.

    Args:
        path: absolute, starting with `~`, relative (see the module), or the name of a file or model of the library.
    """
    try:
        wanted = Path(path).expanduser()
        folders = [Path.cwd(), FILES_ROOT]
        places = [wanted] if wanted.is_absolute() else [folder / wanted for folder in folders]
        found = next((place.resolve() for place in places if place.exists()), None)
        return found or library_file(str(path))
    except (OSError, RuntimeError, ValueError):  # an impossible file name, or an unknown user
        return None


def library_file(name: str) -> Path | None:
    """Return the absolute path of a base configuration or a tiny model of the library, given its bare name."""
    if Path(name).name != name or name in ("", ".", ".."):
        return None
    places = [FILES_ROOT / folder / name for folder in _LIBRARY_FOLDERS]
    return next((place.resolve() for place in places if place.exists()), None)


def library_models() -> list[str]:
    """Return the names of the tiny models of the library."""
    return sorted(file.parent.name for file in (FILES_ROOT / _LIBRARY_FOLDERS[-1]).glob("*/config.json"))


def library_model_hint(name: str) -> str:
    """Return a sentence about the library's models for the error that a name is not a model, or "".

    Only a name without a slash can mean one of these models. A command makes the folder of SmolLM2.
    """
    if Path(name).name.lower() == Path(SMOLLM2_FOLDER).name.lower():
        return f" `nemo_rl smollm2` makes a folder of this model without a network: {SMOLLM2_FOLDER}."
    known = library_models()
    if "/" in name or not known:
        return ""
    return f"{did_you_mean(name, known)} Models of the library: {', '.join(known)}."


def looks_local(name: str) -> bool:
    """Return whether a model or data name can only be a path and not a hub id such as `owner/name`."""
    return (
        name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or Path(name).suffix.lower() in _DATA_SUFFIXES
    )
