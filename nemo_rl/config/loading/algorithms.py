"""Find the algorithm of a configuration file."""

from collections.abc import Mapping
from pathlib import Path

from nemo_rl.config.loading.inheritance import load_config_with_inheritance
from nemo_rl.config.runs.eval import EvalMasterConfig
from nemo_rl.config.runs.rollouts import DistillationMasterConfig, GRPOMasterConfig, PPOMasterConfig
from nemo_rl.config.runs.run import RunConfig
from nemo_rl.config.runs.service import ServiceMasterConfig
from nemo_rl.config.runs.supervised import DPOMasterConfig, RMMasterConfig, SFTMasterConfig
from nemo_rl.utils.errors import ConfigError

ALGORITHMS: Mapping[str, type[RunConfig]] = {
    "grpo": GRPOMasterConfig,
    "ppo": PPOMasterConfig,
    "sft": SFTMasterConfig,
    "dpo": DPOMasterConfig,
    "rm": RMMasterConfig,
    "distillation": DistillationMasterConfig,
    "eval": EvalMasterConfig,
}
"""Master configuration of each algorithm, by the name of the section that only this algorithm has."""
PROGRAMS: Mapping[str, type[RunConfig]] = {**ALGORITHMS, "service": ServiceMasterConfig}
"""Master configuration of each algorithm, and of the training service."""


def algorithm_of(path: str | Path, among: Mapping[str, type[RunConfig]] = ALGORITHMS) -> str:
    """Return the algorithm of a file, by the sections of the file and of its parents.

    Args:
        path: YAML file.
        among: names that are looked for.

    Raises:
        ConfigError: the file cannot be read, or its sections belong to no algorithm or to several.
    """
    content = load_config_with_inheritance(path)
    found = [name for name in among if name in content]
    if len(found) != 1:
        sections = ", ".join(f"{name}:" for name in among)
        has = f"has the sections {', '.join(found)}" if found else f"has none of the sections {sections}"
        raise ConfigError(f"{path} {has}, so it is unclear which algorithm it is for. Give --algorithm.")
    return found[0]
