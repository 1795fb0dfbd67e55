"""Find and load the raw rows of a named data set from the hub, a mirror or a file.

`AnsweredDataset` is the base of data sets of questions with answers.

Invariant: a data set has the same columns for every source of its rows.
"""

from abc import abstractmethod
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.config import DatasetConfig
from nemo_rl.data.datasets.arithmetic import TRAIN, VALIDATION
from nemo_rl.data.datasets.raw_dataset import FormattedRows, RawDataset
from nemo_rl.data.datasets.rows.readers import Row, RowTable, is_file_path, read_file, table_of
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


class AnsweredDataset(RawDataset):
    """Questions and answers from a local file, a mirror or the hub. A subclass reads the rows.

    Args:
        config: A data set of `data.train` or `data.validation`. `data_path` is a file, a folder (a copy of the hub
            repository, or one saved with `save_to_disk`) or a hub id. `input_key` and `output_key` override the
            columns. `split` and `subset` do not apply to single files.
        role: "train" or "validation", which determines the default split.
        source: Location of a named data set, or None for any file or hub id.

    Raises:
        DataError: There is nothing to read, or it cannot be read.
    """

    def __init__(self, config: DatasetConfig, role: str = TRAIN, source: HubSource | None = None) -> None:
        source = source or HubSource(None, "input", "output")
        self.input_key = config.input_key or source.input_key
        self.output_key = config.output_key or source.output_key
        table = load_table(config, role, source)
        self.take_rows(table, FormattedRows(table, self.columns(), self.to_messages, config.env_name))

    @abstractmethod
    def columns(self) -> list[str]:
        """Return the columns that `to_messages` reads."""

    @abstractmethod
    def to_messages(self, row: Row) -> list[dict[str, Any]]:
        """Return the conversation of a raw row, with the answer as the last message.

        Raises:
            RowError: The row cannot be used. The message gives the reason.
        """


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
