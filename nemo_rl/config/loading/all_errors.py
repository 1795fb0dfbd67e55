"""Collect all errors of a configuration file, for users with configurations of NeMo RL.

`load_config` stops at the first stage with an error. Here every stage continues with the keys that the previous stage
accepted. Invariant: the errors are about keys and values. Files that they name need not exist on this machine.
"""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from nemo_rl.config.base.availability import NOT_BUILT
from nemo_rl.config.base.names import NOT_BUILT_ENVIRONMENTS
from nemo_rl.config.base.structure import value_at
from nemo_rl.config.loading.algorithms import ALGORITHMS
from nemo_rl.config.loading.inheritance import Layer, read_layers
from nemo_rl.config.loading.key_errors import unknown_keys
from nemo_rl.config.loading.load import layers_of, merged, validated, variables_in, without_removed
from nemo_rl.config.runs.run import RunConfig
from nemo_rl.utils.errors import ConfigError


def collect_errors(path: str | Path, algorithm: str, overrides: Sequence[str] = ()) -> list[str]:
    """Return the errors of a configuration, key by key, or an empty list if the configuration loads.

    Rules between keys are checked only if every single key is correct.

    Args:
        path: YAML file.
        overrides: as for `load_config`.
    """
    schema = ALGORITHMS[algorithm]
    found: list[str] = []
    try:
        layers, overrides = without_removed(schema, layers_of(schema, read_layers(path)), overrides)
        variables = variables_in(schema, layers)
        layers = [_known(schema, layer, found, variables) for layer in layers]
        tree, sources = merged(schema, layers, overrides)
        config, _ = validated(schema, tree, sources)
    except ConfigError as error:
        return found + str(error).split("\n  ")
    return found + [*_unbuilt_environments(config), *config.findings()]


def _known(schema: type[RunConfig], layer: Layer, found: list[str], variables: Collection[str]) -> Layer:
    """Return a file without its unknown keys, and add a message for each unknown key to `found`."""
    content: Any = OmegaConf.to_container(layer.content)
    for path, sentence in list(unknown_keys(schema, content)):
        if path[0] in variables:
            continue
        found.append(f"{layer.path}: {sentence}")
        del value_at(content, path[:-1])[path[-1]]
    return Layer(layer.path, OmegaConf.create(content))


def _unbuilt_environments(config: RunConfig) -> Iterator[str]:
    """Yield an error for each data entry whose environment exists in NeMo RL, but not here."""
    for name, environment in config.env_entries():
        if environment in NOT_BUILT_ENVIRONMENTS:
            yield f"{name}.env_name={environment}: {NOT_BUILT}, unless the name is registered for one of your own."
