"""Make workers' environments before a run: `python -m nemo_rl.utils.prefetch_venvs --config FILE [filters...]`.

Use it for images and shared folders: a run with the same configuration, folder, uv and Python reuses the environments.
NRL_FORCE_REBUILD_VENVS=true makes each environment again.
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
        filters: choose only workers whose name, extra or package contains one of these texts.
        negative_filters: exclude workers whose name, extra or package contains one of these texts.
        cluster: the section with `venvs`; if None, every worker uses the driver's interpreter.

    Returns:
        Kind of worker -> path of its interpreter, for the chosen kinds.

    Raises:
        ConfigError, VenvError, DeadlineExceededError: as in `create_local_venv`.
    """
    cluster = cluster or ClusterConfig()
    chosen = {name: venv for name, venv in cluster.venvs.items() if _is_meant(name, venv, filters, negative_filters)}
    if not chosen:
        logger.warning(
            "Nothing to make: cluster.venvs has %d environments, and the filters choose none of them. Workers "
            "without an environment use the driver's interpreter.",
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
    """Read the section `cluster` of a file and its parents, ignoring other sections."""
    section = merge_layers(read_layers(path)).get("cluster") or OmegaConf.create()
    return ClusterConfig.build(**OmegaConf.to_container(section, resolve=True))  # type: ignore[arg-type]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("filters", nargs="*", help="make environments whose name, extras or packages contain a text")
    parser.add_argument("--negative-filters", nargs="*", default=[], help="skip environments that contain a text")
    parser.add_argument("--config", help="YAML file with the environments in cluster.venvs")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    made = prefetch_venvs(given.filters, given.negative_filters, _cluster_of(given.config) if given.config else None)
    for name, python in made.items():
        logger.info("%s: %s", name, python)


if __name__ == "__main__":
    main()
