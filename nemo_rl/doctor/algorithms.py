"""Which algorithm a configuration is for, and what the algorithm makes of it without starting anything."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.config import (
    DistillationMasterConfig,
    DPOMasterConfig,
    EvalMasterConfig,
    GRPOMasterConfig,
    MasterConfig,
    RMMasterConfig,
    SFTMasterConfig,
)
from nemo_rl.config.loading.inheritance import load_config_with_inheritance
from nemo_rl.utils.errors import ConfigError

if TYPE_CHECKING:  # they take seconds to import
    from nemo_rl.algorithms.rollout.start import RolloutRecipe
    from nemo_rl.algorithms.runtime.roles import Role
    from nemo_rl.algorithms.supervised.start import SupervisedRecipe

SCHEMAS: dict[str, type[MasterConfig] | type[EvalMasterConfig]] = {
    "grpo": GRPOMasterConfig,
    "sft": SFTMasterConfig,
    "dpo": DPOMasterConfig,
    "rm": RMMasterConfig,
    "distillation": DistillationMasterConfig,
    "eval": EvalMasterConfig,
}
"""Algorithms by the section that only their configurations have, and the class of these."""


def algorithm_of(file: Path) -> str:
    """The algorithm that a configuration file is for, by its sections.

    Raises:
        ConfigError: there is no such file, or it has the section of no algorithm, or of several.
    """
    content = load_config_with_inheritance(file)
    found = [name for name in SCHEMAS if name in content]
    if len(found) != 1:
        sections = ", ".join(f"{name}:" for name in SCHEMAS)
        has = f"has the sections {', '.join(found)}" if found else f"has none of the sections {sections}"
        raise ConfigError(f"{file} {has}, so it is unclear which algorithm it is for. Say it with --algorithm.")
    return found[0]


def recipe_of(config: MasterConfig, *, with_data: bool = True) -> "RolloutRecipe | SupervisedRecipe":
    """What makes a run of a configuration; starts nothing.

    Args:
        config: a checked configuration.
        with_data: load the data too; else `recipe.data` must not be used.

    Raises:
        ConfigError, DataError: the configuration or the data cannot be used.
    """
    from nemo_rl.algorithms.runtime.handed_in import NOTHING, HandedIn

    @dataclass(frozen=True)
    class WithoutData(HandedIn):
        def data(self, config: MasterConfig, load: Callable[[], Any], *, sampled: bool = False) -> Any:
            return None

    name = next(name for name, schema in SCHEMAS.items() if type(config) is schema)
    made: RolloutRecipe | SupervisedRecipe = importlib.import_module(f"nemo_rl.algorithms.{name}").recipe(
        config, NOTHING if with_data else WithoutData()
    )
    return made


def roles_of(config: MasterConfig) -> "Mapping[str, Role]":
    """The models of a run by name.

    Raises:
        ConfigError: as `recipe_of`.
    """
    from nemo_rl.algorithms.rollout.start import RolloutRecipe
    from nemo_rl.algorithms.runtime.roles import Role

    recipe = recipe_of(config, with_data=False)
    if isinstance(recipe, RolloutRecipe):
        return recipe.roles
    return {"policy": Role(config.policy, keeps_reference=recipe.keeps_reference)}
