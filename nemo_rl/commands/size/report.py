"""Write a proposal: a table with reasons, overrides to paste, and a YAML file.

Invariant: the overrides and the file set the same keys, and both contain the overrides that the user gave.
"""

import os
import shlex
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from nemo_rl.commands.dry_run import mesh_text
from nemo_rl.commands.size.machines import Gpu
from nemo_rl.commands.size.proposal import Proposal
from nemo_rl.commands.size.reasons import reasons
from nemo_rl.config import MasterConfig, RunConfig, load_config
from nemo_rl.config.loading.overrides import parse_override
from nemo_rl.utils.errors import ConfigError


def overrides_of(values: Mapping[str, Any]) -> list[str]:
    """Write values as overrides."""
    return [f"{key}={_text(value)}" for key, value in values.items()]


def changed_values(config: MasterConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a configuration does not have yet."""
    return {key: value for key, value in values.items() if _at(config, key) != value}


def proposal_lines(proposal: Proposal, gpu: Gpu, own: str) -> Iterator[str]:
    """Yield the table.

    Args:
        proposal: the sizes.
        gpu: the GPUs.
        own: the estimate for the configuration's own sizes.
    """
    cluster = proposal.config.cluster
    yield "Machines"
    yield _line(
        "GPUs", f"{cluster.num_nodes} x {cluster.gpus_per_node} of {gpu.memory_gib:g} GiB, speeds of {gpu.name}"
    )
    yield ""
    yield "Proposal"
    for name, role in proposal.config.models.items():
        yield _line(name, mesh_text(role.section, proposal.searches[name].job.ranks) or "1 rank")
    for reason in reasons(proposal):
        yield _line(reason.what, f"{reason.value}: {reason.sentence}")
    sampling = f"{proposal.engine.seconds:.3g} s of sampling and " if proposal.engine else ""
    yield _line("a step", f"about {sampling}{proposal.train_seconds:.3g} s of training, all rows at maximum length")
    yield _line("own sizes", own)
    if proposal.headroom == 1.0:
        yield _line("note", "this needs all usable memory; predictions were up to 6 % too low where they were measured")


def command_lines(config: Path, overrides: Sequence[str]) -> Iterator[str]:
    """Yield the overrides, ready to paste after a script."""
    yield "Overrides"
    yield " \\\n".join([f"  --config {shlex.quote(str(config))}", *(f"  {shlex.quote(text)}" for text in overrides)])


def needed_overrides(
    config: MasterConfig, values: Mapping[str, Any], load: Callable[[Sequence[str]], MasterConfig]
) -> dict[str, Any]:
    """Return the values to write so that a configuration has all of them, also where keys follow others.

    Args:
        config: the configuration.
        values: the proposal.
        load: loads the configuration with overrides.
    """
    needed = changed_values(config, values)
    while more := changed_values(load(overrides_of(needed)), values).keys() - needed.keys():
        needed = {key: value for key, value in values.items() if key in needed or key in more}
    return needed


def check_target(target: Path, given: Sequence[str]) -> None:
    """Check before a search that its result can be written.

    Raises:
        ConfigError: the file exists, its folder does not, or an override cannot be written as a key.
    """
    if target.exists():
        raise ConfigError(f"--write {target} exists already. Name a new file.")
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"--write {target}: there is no folder {target.absolute().parent}. Make it first.")
    for text in given:
        if text.startswith("~"):
            raise ConfigError(f"--write cannot write the override {text!r}, which removes a key. Leave it out.")


def write_file(
    target: Path, config: Path, given: Sequence[str], values: Mapping[str, Any], schema: type[RunConfig]
) -> None:
    """Write a YAML file that inherits from a configuration.

    Args:
        target: the file, which must not exist.
        config: the configuration.
        given: overrides of the user, written first.
        values: the proposal.
        schema: class of the configuration.

    Raises:
        ConfigError: the file exists, cannot be written, or does not load.
    """
    tree: dict[str, Any] = {"defaults": os.path.relpath(config.resolve(), target.resolve().parent)}
    for text in given:
        override = parse_override(text)
        _put(tree, override.key_or_group, override.value())
    for key, value in values.items():
        _put(tree, key, value)
    text = f"# Sizes proposed by `nemo_rl size`.\n{yaml.safe_dump(tree, sort_keys=False)}"
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"--write {target} cannot be written ({error.strerror}). Name a new file.") from error
    try:
        load_config(target, schema=schema, check=False)
    except ConfigError as error:
        raise ConfigError(f"--write {target}: the file was written, but does not load. {error}") from error


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for name in sections:
        below = tree.get(name)
        if not isinstance(below, dict):
            below = tree[name] = {}
        tree = below
    tree[last] = value


def _at(config: MasterConfig, key: str) -> Any:
    place: Any = config
    for name in key.split("."):
        place = getattr(place, name)
    return place


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _line(name: str, text: str) -> str:
    return textwrap.fill(
        f"{name:<23} {text}", 118, initial_indent="  ", subsequent_indent=" " * 26, break_on_hyphens=False
    )
