"""Repeat a recorded step: reads the record, configuration and checkpoint, repeats, compares, writes."""

import argparse
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from nemo_rl.algorithms.recipe import Recipe
from nemo_rl.algorithms.rollout.batches import num_stale_tokens
from nemo_rl.algorithms.runtime.device_sharing import share_memory
from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.algorithms.runtime.step_record import code, environment, image_digests, samples_in_short, stage_tensors
from nemo_rl.algorithms.setup.preflight import check_added_models
from nemo_rl.algorithms.setup.roles import RankStarter, place_models, reserve, start_models
from nemo_rl.algorithms.start import layout_of
from nemo_rl.commands.replay.findings import Compared, Comparison, Difference
from nemo_rl.commands.replay.records import RecordedStep, Step
from nemo_rl.config import GRPOMasterConfig, busy_engines, load_config, public_values
from nemo_rl.config.rules.resume import changed_keys
from nemo_rl.data.datasets.setup import RunData
from nemo_rl.data.model_rows import ROW_INPUTS
from nemo_rl.distributed.virtual_cluster import init_ray
from nemo_rl.environments.interfaces import EnvironmentInterface
from nemo_rl.environments.registry import env_class_path
from nemo_rl.experience.rows import rows_per_update
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.update_records import start_recording, take_records
from nemo_rl.models.policy.workers.update_recorder import ROW_NUMBERS
from nemo_rl.optimizations.fork_server import start_fork_server
from nemo_rl.optimizations.switch import is_on
from nemo_rl.utils.errors import ConfigError, ReplayError
from nemo_rl.utils.imports import import_dotted

_CAUSE = "The data, the prompt file, the chat template, the tokenizer or the processor has changed since the run."
_NAME = "prompts in the data"


def compare_prompts(
    trajectories: Sequence[Trajectory], data: RunData, environments: Mapping[str, Any]
) -> tuple[Compared, list[str]]:
    """Compare the tokens of each prompt with its row, and return the comparison and the parts that it leaves out.

    Args:
        trajectories: the recorded rollouts.
        data: the training data, as the configuration describes it now.
        environments: the section `env`.
    """
    found, compared, opened = [], 0, set()
    firsts = {trajectory.group_index: trajectory for trajectory in reversed(trajectories)}
    for group, trajectory in sorted(firsts.items()):
        if _writes_prompts(trajectory.task_name, environments.get(trajectory.task_name)):
            opened.add(trajectory.task_name)
            continue
        compared += 1
        text = _difference(trajectory, data)
        if text is not None:
            name = f"prompt {group}"
            found.append(
                Difference(name, f"{name} (row {trajectory.idx} of the training data) differs from the record: {text}")
            )
    if not compared and opened:
        return Compared(_NAME, skipped=f"the environments {sorted(opened)} write the prompts themselves"), []
    notes = [f"prompts that the environments {sorted(opened)} write themselves are not compared"] if opened else []
    return Compared(_NAME, compared, differences=found, cause=_CAUSE), notes


def _writes_prompts(task_name: str, section: Any) -> bool:
    """Return whether an environment may write or change the prompt, so that it cannot be compared with the data."""
    try:
        environment: type[EnvironmentInterface[Any]] = import_dotted(
            env_class_path(task_name, section), ConfigError, task_name, ""
        )
    except ConfigError:
        return True
    is_written = environment.open_episode is not EnvironmentInterface.open_episode
    return is_written or environment.runs_agents


def _difference(trajectory: Trajectory, data: RunData) -> str | None:
    """Describe how a prompt differs from its row, or return None if it does not."""
    if trajectory.idx >= len(data.train):
        return f"the data has {len(data.train)} rows"
    recorded, row = _tokens(trajectory), data.train[trajectory.idx]
    prompt = torch.cat([message["token_ids"] for message in row["message_log"]])
    width = min(len(prompt), len(recorded))
    wrong = (prompt[:width] != recorded[:width]).nonzero()
    if len(wrong):
        place = int(wrong[0])
        return f"token {place} is {int(prompt[place])} in the data, and {int(recorded[place])} was recorded"
    if len(prompt) != trajectory.prompt_length:
        return f"it has {len(prompt)} tokens in the data, and {trajectory.prompt_length} were recorded"
    return _image_difference(trajectory, row)


def _image_difference(trajectory: Trajectory, row: Mapping[str, Any]) -> str | None:
    """Describe how the images of a prompt differ from those of its row, which has the same tokens."""
    # A sample has the images of its prompt first, and then those of observations.
    pairs = zip(image_digests(row.get(ROW_INPUTS)), image_digests(trajectory.row_inputs), strict=False)
    wrong = next((number for number, (now, before) in enumerate(pairs, 1) if now != before), None)
    return None if wrong is None else f"image {wrong} has another content or size in the data"


def _tokens(trajectory: Trajectory) -> Tensor:
    return torch.cat([message["token_ids"] for message in trajectory.message_log])[: trajectory.prompt_length]


_FILE_WIDTH = 140
"""Width in characters if the output is not a terminal."""
_SHOWN = 3


def write_text(result: Comparison, output: TextIO) -> None:
    """Write a table with a line for each part of the step, then the differences, the notes and the verdict."""
    is_file = not output.isatty() and "COLUMNS" not in os.environ
    console = Console(file=output, width=_FILE_WIDTH if is_file else None)
    table = Table(box=SIMPLE_HEAD)
    for title in ("part of the step", "compared", "differ", "largest difference", "tolerance"):
        table.add_column(title, overflow="fold")
    for stage in result.stages:
        table.add_row(*map(Text, _line(stage)))
    console.print(table)
    for line in _details(result):
        console.print(Text(line))
    console.print(Text(result.verdict))


def _line(stage: Compared) -> tuple[str, ...]:
    if stage.skipped is not None:
        return stage.name, "-", "-", stage.skipped, "-"
    if not stage.unit:
        return stage.name, str(stage.compared), str(len(stage.differences)), "-", "-"
    size = f"{stage.largest:.1e} {stage.unit}" if stage.largest else "0"
    return stage.name, str(stage.compared), str(len(stage.differences)), size, f"{stage.tolerance:g}"


def _details(result: Comparison) -> Iterator[str]:
    for stage in result.stages:
        shown = _SHOWN if stage is result.first else 1
        for difference in stage.differences[:shown]:
            yield difference.text if difference.text.startswith(stage.name) else f"{stage.name}: {difference.text}"
        if len(stage.differences) > shown:
            yield f"{stage.name}: and {len(stage.differences) - shown} more"
    for note in result.notes:
        yield f"note: {note}"


def repeat(
    config: GRPOMasterConfig, recipe: Recipe, recorded: RecordedStep, checkpoint: Path | None, of_modules: bool
) -> Step:
    """Repeat a step.

    Args:
        config: the configuration of the run, perhaps with changes.
        recipe: the choices of its algorithm.
        checkpoint: step folder of the step before, or None for the initial weights.
        of_modules: whether to record the output of each module.

    Raises:
        ConfigError, CheckpointError, ResourceInsufficientError: as at the start of a run.
    """
    with ExitStack() as resources:
        models = _start_models(config, recipe, checkpoint, resources)
        policy = models["policy"]
        policy.weight_version = recorded.summary["weight_version"]
        batch = _batch(config, recipe, recorded, policy.weight_version)
        memory = share_memory(config.cluster, recipe.roles, models)
        for stage in recipe.stages(models):
            memory.hand_to(stage.roles)
            stage.apply(batch)
        memory.hand_to(("policy",))
        batch.tensors[ROW_NUMBERS] = torch.arange(batch.tensors.size)
        start_recording(policy, of_modules=of_modules)
        policy.train(batch.tensors, recipe.loss_fn, gbs=batch.rows_per_update)
        updates = take_records(policy)
        summary: dict[str, Any] = {
            "config": public_values(config),
            "samples": samples_in_short(batch),
            "environment": environment(),
            "code": dict(code()),
            "layout": asdict(policy.layout),
        }
        return Step(summary, stage_tensors(batch), updates)


def _start_models(
    config: GRPOMasterConfig, recipe: Recipe, checkpoint: Path | None, resources: ExitStack
) -> Mapping[str, Policy]:
    """Start Ray and the ranks of all models, as `algorithms.start` does, without engines and environments."""
    check_added_models(config, recipe.roles)
    init_ray(optimizations=config.cluster.optimizations)
    places = place_models(config.model_cluster, recipe.roles)
    reserve([places[name] for name in recipe.roles], config.checkpointing, recipe.roles, resources)
    busy, seed = busy_engines(config.algorithm.overlap, config.cluster, config.policy), config.algorithm.seed
    starter = RankStarter(config.cluster, recipe.tokenizer, seed, checkpoint, busy)
    starts: dict[str, Callable[[], Policy]] = {
        name: partial(starter.start, name, role, places[name]) for name, role in recipe.roles.items()
    }
    return start_models(config.model_cluster, recipe.roles, starts, resources)


def _batch(config: GRPOMasterConfig, recipe: Recipe, recorded: RecordedStep, version: int) -> StepBatch:
    trajectories = recorded.trajectories
    tensors = layout_of(config, recipe)(trajectories)
    return StepBatch(
        tensors,
        trajectories,
        rows_per_update=rows_per_update(trajectories, config.policy.train_global_batch_size or len(trajectories)),
        num_stale_B=num_stale_tokens(trajectories, version, mixes_weights=config.policy.mixes_weights),
    )


logger = logging.getLogger(__name__)

_CONFIG_FILE = "config.yaml"


def replay(arguments: argparse.Namespace, output: TextIO) -> int:
    """Run the command, and return 0 if the step is equal or 1 if it differs.

    Args:
        arguments: arguments of the command line, as `replay.command` defines them.
        output: stream to write the result to.

    Raises:
        ReplayError: the step cannot be repeated.
        NemoRLError: the configuration, the data, the checkpoint or the machine cannot be used.
    """
    from nemo_rl.commands.replay.folders import find_folder

    folder = find_folder(arguments.folder, arguments.step)
    # A stored configuration contains every key, so load_config would log all keys that have no effect.
    logging.getLogger(load_config.__module__).setLevel(logging.WARNING)
    config = load_config(folder / _CONFIG_FILE, arguments.overrides, schema=GRPOMasterConfig)
    if not config.cluster.uses_gpu and is_on("fork_server", config.cluster.optimizations):
        start_fork_server()

    from nemo_rl.commands.replay.records import add_modules, read_step

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
    """Repeat a step, and return the comparison and the repeated step."""
    from nemo_rl.algorithms.grpo import recipe
    from nemo_rl.commands.replay.compare import compare, configuration_notes
    from nemo_rl.commands.replay.findings import Comparison, chosen, code_notes, factor_of

    factor = factor_of(arguments.tolerance)
    checkpoint = _checkpoint(recorded, arguments.step, arguments.checkpoint, config)
    changed = changed_keys(config, recorded.summary["config"])
    parts = recipe(config)
    _check_loss(recorded, parts.loss_fn, [key.key for key in changed])
    data, notes_of_data = compare_prompts(recorded.trajectories, parts.data, config.env)
    of_modules = arguments.add_modules or any(any(update.modules) for update in recorded.updates)
    repeated = repeat(config, parts, recorded, checkpoint, of_modules)
    limits, notes = chosen(factor, recorded, repeated, changed)
    notes += configuration_notes(changed, recorded.summary["config"], repeated.summary["config"])
    stages = compare(recorded, repeated, changed, data, limits)
    notes += [*notes_of_data, *code_notes(recorded, repeated)]
    return Comparison(arguments.step, stages, limits.is_exact, notes), repeated


def _checkpoint(recorded: "RecordedStep", step: int, given: Path | None, config: GRPOMasterConfig) -> Path | None:
    """Return the step folder of the checkpoint before a step, or None for the first step."""
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
