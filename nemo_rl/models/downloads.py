"""Download models before the processes start that read them, so that this process can show the progress.

Invariant: a model whose files are in the hub's cache is not asked for at the hub.
"""

from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from nemo_rl.models.huggingface.tensor_files import model_folder, weight_files
from nemo_rl.utils.cluster_address import cluster_address
from nemo_rl.utils.errors import CheckpointError


def download_models(names: Iterable[str]) -> None:
    """Download models from the hub into this machine's cache, if the run has this machine only.

    On the machines of a joined cluster the processes download what they need themselves.

    Args:
        names: folders, which are left alone, or hub ids.

    Raises:
        DownloadError: the files of a model do not arrive.
    """
    if cluster_address() is not None:
        return
    for name in dict.fromkeys(names):
        if not Path(name).expanduser().is_dir() and not _is_in_cache(name):
            model_folder(name)


def _is_in_cache(name: str) -> bool:
    """Return whether configuration and weights of a hub id are in the cache."""
    config = try_to_load_from_cache(name, "config.json")
    if not isinstance(config, str):
        return False
    try:
        weight_files(Path(config).parent)
    except CheckpointError:
        return False
    return True
