"""Build the recipe of any algorithm from a configuration; start nothing."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_rl.config import MasterConfig
from nemo_rl.config.loading.algorithms import ALGORITHMS

if TYPE_CHECKING:  # they take seconds to import
    from nemo_rl.algorithms.rollout.start import RolloutRecipe
    from nemo_rl.algorithms.supervised.start import SupervisedRecipe


def recipe_of(config: MasterConfig, *, with_data: bool = True) -> "RolloutRecipe | SupervisedRecipe":
    """Build the recipe of a configuration's run; start nothing.

    Args:
        config: a checked configuration.
        with_data: load the data too; otherwise `recipe.data` must not be used.

    Raises:
        ConfigError, DataError: the configuration or the data cannot be used.
    """
    from nemo_rl.algorithms.setup.user_parts import NOTHING, UserParts

    @dataclass(frozen=True)
    class WithoutData(UserParts):
        def data(self, config: MasterConfig, load: Callable[[], Any], *, sampled: bool = False) -> Any:
            return None

    name = next(name for name, schema in ALGORITHMS.items() if isinstance(config, schema))
    made: RolloutRecipe | SupervisedRecipe = importlib.import_module(f"nemo_rl.algorithms.{name}").recipe(
        config, NOTHING if with_data else WithoutData()
    )
    return made
