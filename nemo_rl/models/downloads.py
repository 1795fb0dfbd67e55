"""Download models before the processes start that read them, so that this process can show the progress."""

import logging
from collections.abc import Iterable
from pathlib import Path

from nemo_rl.models.huggingface.tensor_files import cached_folder, model_folder
from nemo_rl.utils.addresses import cluster_address

logger = logging.getLogger(__name__)


def download_models(names: Iterable[str]) -> None:
    """Download models from the hub into this machine's cache, if the run has this machine only.

    On the machines of a joined cluster the ranks download what they need, because this machine may be none of them.

    Args:
        names: folders, which are left alone, or hub ids.

    Raises:
        DownloadError: the files of a model do not arrive.
    """
    hub_ids = [name for name in dict.fromkeys(names) if not Path(name).expanduser().is_dir()]
    address = cluster_address()
    if address is None:
        for name in hub_ids:
            model_folder(name)
        return
    absent = [name for name in hub_ids if cached_folder(name) is None]
    if absent:
        logger.info(
            "Machines of the cluster at %s that do not have %s download it by themselves; the logs of their ranks "
            "count the megabytes.",
            address,
            " and ".join(absent),
        )
