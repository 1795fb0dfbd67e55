"""Repeat a recorded step and compare it: read the record, configuration and checkpoint, repeat, compare, write."""

import argparse
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from nemo_rl.config import GRPOMasterConfig, load_config
from nemo_rl.config.rules.resume import changed_keys
from nemo_rl.optimizations.fork_server import start_fork_server
from nemo_rl.optimizations.switch import is_on
from nemo_rl.utils.errors import ReplayError

if TYPE_CHECKING:  # torch is imported after the configuration is accepted, as in a run
    from nemo_rl.commands.replay.findings import Comparison
    from nemo_rl.commands.replay.records import RecordedStep, Step

logger = logging.getLogger(__name__)

_CONFIG_FILE = "config.yaml"


def replay(arguments: argparse.Namespace, output: TextIO) -> int:
    """Run the command; return 0 if the step is equal, 1 if it differs.

    Args:
        arguments: arguments of the command line, as `replay.command` defines them.
        output: stream to write the result to.

    Raises:
        ReplayError: the step cannot be repeated.
        NemoRLError: the configuration, the data, the checkpoint or the machine cannot be used.
    """
    from nemo_rl.commands.replay.folders import find_folder

    folder = find_folder(arguments.folder, arguments.step)
    # The file of a run has all keys, so each key without effect would be told.
    logging.getLogger(load_config.__module__).setLevel(logging.WARNING)
    config = load_config(folder / _CONFIG_FILE, arguments.overrides, schema=GRPOMasterConfig)
    if not config.cluster.uses_gpu and is_on("fork_server", config.cluster.optimizations):
        start_fork_server()

    from nemo_rl.commands.replay.records import add_modules, read_step
    from nemo_rl.commands.replay.report import write_text

    recorded = read_step(folder, arguments.step)
    result, repeated = _repeated(arguments, config, recorded)
    if arguments.json:
        output.write(json.dumps(result.as_json(), indent=1) + "\n")
    else:
        write_text(result, output)
    if arguments.add_modules and result.first is None and result.is_exact:
        add_modules(recorded, repeated)
        logger.info("The outputs of modules are in %s now.", recorded.file)
    elif arguments.add_modules:
        logger.warning("The step is not equal bit for bit, so the outputs of its modules are not added to the record.")
    return 0 if result.first is None else 1


def _repeated(
    arguments: argparse.Namespace, config: GRPOMasterConfig, recorded: "RecordedStep"
) -> "tuple[Comparison, Step]":
    """Repeat a step; return the comparison, and the step as it is now."""
    from nemo_rl.algorithms.grpo import recipe
    from nemo_rl.commands.replay.compare import compare
    from nemo_rl.commands.replay.configuration import configuration_notes
    from nemo_rl.commands.replay.findings import Comparison
    from nemo_rl.commands.replay.prompts import compare_prompts
    from nemo_rl.commands.replay.repeat import repeat
    from nemo_rl.commands.replay.tolerances import chosen, code_notes, factor_of

    factor = factor_of(arguments.tolerance)
    checkpoint = _checkpoint(recorded, arguments.step, arguments.checkpoint, config)
    changed = changed_keys(config, recorded.summary["config"])
    parts = recipe(config)
    _check_loss(recorded, parts.loss_fn, [key.key for key in changed])
    data, notes_of_data = compare_prompts(recorded.trajectories, parts.data)
    of_modules = arguments.add_modules or any(any(update.modules) for update in recorded.updates)
    repeated = repeat(config, parts, recorded, checkpoint, of_modules)
    limits, notes = chosen(factor, recorded, repeated, changed)
    notes += configuration_notes(changed, recorded.summary["config"], repeated.summary["config"])
    stages = compare(recorded, repeated, changed, data, limits)
    notes += [*notes_of_data, *code_notes(recorded, repeated)]
    return Comparison(arguments.step, stages, limits.is_exact, notes), repeated


def _checkpoint(recorded: "RecordedStep", step: int, given: Path | None, config: GRPOMasterConfig) -> Path | None:
    """Return the step folder of the checkpoint before a step; None for the first step.

    Raises:
        ReplayError: there is none.
    """
    if step == 1:
        if given is not None:
            raise ReplayError("step 1 begins with the initial weights. Leave --checkpoint out.")
        return None
    name = f"step_{step - 1}"
    places = (
        [given] if given else [Path(recorded.summary["checkpoint"]), Path(config.checkpointing.checkpoint_dir) / name]
    )
    found = next((place for place in places if (place / "policy" / "weights").is_dir()), None)
    if found is None:
        raise ReplayError(
            f"step {step} needs the checkpoint of step {step - 1}, and {' and '.join(map(str, dict.fromkeys(places)))} "
            f"{'is' if given else 'are'} no step folder of a checkpoint. It may have been removed "
            "(checkpointing.keep_top_k). Name its folder with --checkpoint, or repeat a step whose checkpoint exists."
        )
    if not (found / "policy" / "optimizer").is_dir():
        raise ReplayError(
            f"{found} has no state of the optimizer (checkpointing.save_optimizer), so the step would differ."
        )
    return found


def _check_loss(recorded: "RecordedStep", loss_fn: object, changed: list[str]) -> None:
    """Refuse a run whose program passed a loss that the configuration does not describe."""
    from nemo_rl.algorithms.runtime.step_record import name_of

    before, now = recorded.summary["loss_fn"], name_of(loss_fn)  # type: ignore[arg-type]
    if before != now and not any(key.startswith("loss_fn") for key in changed):
        raise ReplayError(
            f"the run was trained with the loss {before}, which its program gave to setup(); the configuration "
            f"describes {now}. Name the loss in loss_fn.name, so that a replay can build it."
        )
