"""Find and load the raw rows of a named data set from the hub, a mirror or a file.

Invariant: a data set has the same columns for every source of its rows.
"""

from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl.config import DatasetConfig
from nemo_rl.data.datasets.arithmetic import VALIDATION
from nemo_rl.data.datasets.rows.readers import RowTable, is_file_path, read_file, table_of
from nemo_rl.files.hub_download import download
from nemo_rl.host.boundary import raised_as
from nemo_rl.utils.errors import DataError, DownloadError

if TYPE_CHECKING:
    # The library is imported only when a data set is loaded.
    import datasets


_HUB = "hf://"


@dataclass(frozen=True)
class HubSource:
    """Location of a named data set and the names of its columns."""

    path: str | None
    """Id of the data set on the hub."""
    input_key: str = "problem"
    """Column of the question."""
    output_key: str = "answer"
    """Column of the answer."""
    subsets: tuple[str | None, ...] = (None,)
    """Names of the hub configurations to join. None if the data set has only one configuration."""
    split: str = "train"
    """Split used for training."""
    validation_split: str | None = None
    """Split used for validation. If None, the split for training."""
    section: str | None = None
    """Configuration section that names the data set, for messages. If None, `data.<role>`."""


def load_table(config: DatasetConfig, role: str, source: HubSource) -> RowTable:
    """Load the raw rows of a configured data set from its file, a mirror or the hub.

    Raises:
        DataError: There is nothing to read, or it cannot be read.
    """
    path = config.data_path or source.path
    section = source.section or f"data.{role}"
    if path is None:
        raise DataError(f"{section}.dataset_name={config.dataset_name!r} needs data_path: a local file or a hub id.")
    if is_file_path(path):
        return read_file(path)
    split = config.split or (source.validation_split if role == VALIDATION else None)
    subsets = (config.subset,) if config.subset else source.subsets
    parts = [_load_hub(path, subset, split or source.split, section) for subset in subsets]
    import datasets

    return table_of(path, parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts))


def _load_hub(path: str, subset: str | None, split: str, section: str) -> "datasets.Dataset":
    import datasets

    folder = Path(path).expanduser()
    key = "data_path" if section.partition(".")[0] == "data" else "dataset_name"

    def unloadable(error: Exception) -> DataError:
        hint = "The files of the folder must belong together as in a hub repository."
        if not folder.is_dir():
            hint = f"Without network, set {section}.{key} to a local copy: a file, or a folder with the files of the "
            hint += "hub repository."
        cause = f" ({error.__cause__})" if error.__cause__ and not isinstance(error, DownloadError) else ""
        return DataError(
            f"data set {path!r} (subset {subset}, split {split!r}) cannot be loaded: "
            f"{type(error).__name__}: {error}{cause}. {hint}"
        )

    with raised_as(unloadable):  # `datasets` raises errors of an HTTP library for a broken connection
        if (folder / "dataset_dict.json").is_file():
            return datasets.load_from_disk(str(folder))[split]
        if (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file():
            return datasets.load_from_disk(str(folder))
        if folder.is_dir():
            return datasets.load_dataset(str(folder), subset, split=split)
        builder = datasets.load_dataset_builder(path, subset)
        _download_files(builder)
        builder.download_and_prepare()
        return builder.as_dataset(split=split)


def _download_files(builder: "datasets.DatasetBuilder") -> None:
    """Download the files of all splits for `datasets`, unless the data set is already prepared."""
    files = [file for split in (builder.config.data_files or {}).values() for file in split]
    if Path(builder.cache_dir).is_dir() or not all(str(file).startswith(_HUB) for file in files):
        return
    import datasets
    from huggingface_hub.hf_file_system import HfFileSystem, HfFileSystemResolvedRepositoryPath

    hub = HfFileSystem(endpoint=datasets.config.HF_ENDPOINT)
    resolved = [hub.resolve_path(file) for file in files]
    places = [place for place in resolved if isinstance(place, HfFileSystemResolvedRepositoryPath)]
    for name, revision in {(place.repo_id, place.revision) for place in places}:
        patterns = [escape(place.path_in_repo) for place in places if place.repo_id == name]
        download(name, patterns, kind="dataset", revision=revision)
