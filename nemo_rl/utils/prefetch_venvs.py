"""Make the environments of workers ahead of a run: `python -m nemo_rl.utils.prefetch_venvs --config FILE [filters...]`.

For images and shared folders: a run with the same configuration, folder, uv and Python takes what is there. With
NRL_FORCE_REBUILD_VENVS=true each is made anew.
"""

import argparse
import logging
from collections.abc import Sequence

from omegaconf import OmegaConf

from nemo_rl.config import ClusterConfig, VenvConfig
from nemo_rl.config.loading.inheritance import merge_layers, read_layers
from nemo_rl.utils.venvs import create_local_venv, is_set

logger = logging.getLogger(__name__)


def prefetch_venvs(
    filters: Sequence[str] | None = None,
    negative_filters: Sequence[str] | None = None,
    cluster: ClusterConfig | None = None,
) -> dict[str, str]:
    """Make environments on this node.

    Args:
        filters: only kinds of workers whose name, or one of whose extras or packages, contains one of these texts.
        negative_filters: none whose do.
        cluster: the section with `venvs`; None has none, because every worker uses the driver's interpreter then.

    Returns:
        Path of the interpreter of each kind that was chosen.

    Raises:
        ConfigError, VenvError, DeadlineExceededError: as `create_local_venv`.
    """
    cluster = cluster or ClusterConfig()
    chosen = {name: venv for name, venv in cluster.venvs.items() if _is_meant(name, venv, filters, negative_filters)}
    if not chosen:
        logger.warning(
            "Nothing to make: %d environments are named in cluster.venvs, the filters choose none of them. Workers "
            "without one use the driver's interpreter.",
            len(cluster.venvs),
        )
    return {
        name: create_local_venv(venv, name, is_set("NRL_FORCE_REBUILD_VENVS"), timeout_s=cluster.timeouts.venv_s)
        for name, venv in chosen.items()
    }


def _is_meant(
    name: str, venv: VenvConfig, filters: Sequence[str] | None, negative_filters: Sequence[str] | None
) -> bool:
    texts = [name, *(venv.extras or ()), *venv.packages]

    def has_one(wanted: Sequence[str]) -> bool:
        return any(part in text for part in wanted for text in texts)

    return (not filters or has_one(filters)) and not has_one(negative_filters or ())


def _cluster_of(path: str) -> ClusterConfig:
    """The section `cluster` of a file and its parents, without what other sections would need."""
    section = merge_layers(read_layers(path)).get("cluster") or OmegaConf.create()
    return ClusterConfig.build(**OmegaConf.to_container(section, resolve=True))  # type: ignore[arg-type]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("filters", nargs="*", help="texts in the names, extras or packages to make")
    parser.add_argument("--negative-filters", nargs="*", default=[], help="texts in those to leave out")
    parser.add_argument("--config", help="YAML file whose cluster.venvs to make")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    made = prefetch_venvs(given.filters, given.negative_filters, _cluster_of(given.config) if given.config else None)
    for name, python in made.items():
        logger.info("%s: %s", name, python)


if __name__ == "__main__":
    main()
