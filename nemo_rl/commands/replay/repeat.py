"""Repeat a recorded step with the models of the run's checkpoint, the recorded rollouts, and the run's own code.

    recipe of the algorithm ─► Ray, ranks of the models ─► [B, T] tensors of the rollouts ─► stages ─► policy.train

Invariant: each part is the one that the run used. Only engines and environments are left out, because the rollouts are
recorded.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nemo_rl.algorithms.rollout.batches import mark_stale
from nemo_rl.algorithms.rollout.start import RolloutRecipe, layout_of
from nemo_rl.algorithms.runtime.device_sharing import share_memory
from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.algorithms.runtime.step_record import code, environment, samples_in_short, stage_tensors
from nemo_rl.algorithms.setup.placement import place_models
from nemo_rl.algorithms.setup.preflight import check_added_models
from nemo_rl.algorithms.setup.roles import reserve, start_models, start_role
from nemo_rl.commands.replay.records import RecordedStep, Step
from nemo_rl.config import GRPOMasterConfig, busy_engines, public_values
from nemo_rl.distributed.virtual_cluster import init_ray
from nemo_rl.experience.rows import rows_per_update
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.update_records import start_recording, take_records
from nemo_rl.models.policy.workers.update_recorder import ROW_NUMBERS


def repeat(
    config: GRPOMasterConfig, recipe: RolloutRecipe, recorded: RecordedStep, checkpoint: Path | None, of_modules: bool
) -> Step:
    """Repeat a step.

    Args:
        config: the configuration of the run, perhaps with changes.
        recipe: the choices of its algorithm.
        recorded: the step as the run recorded it.
        checkpoint: step folder of the step before; None: the initial weights.
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
    config: GRPOMasterConfig, recipe: RolloutRecipe, checkpoint: Path | None, resources: ExitStack
) -> Mapping[str, Policy]:
    """Start Ray and the ranks of all models, as `rollout.start` does, without engines and environments."""
    check_added_models(config, recipe.roles)
    init_ray(optimizations=config.cluster.optimizations)
    places = place_models(config.model_cluster, recipe.roles)
    reserve([places[name] for name in recipe.roles], config, recipe.roles, resources)
    busy, seed = busy_engines(config.algorithm.overlap, config.cluster, config.policy), config.algorithm.seed
    starts: dict[str, Callable[[], Policy]] = {
        name: partial(start_role, name, role, places[name], config.cluster, recipe.tokenizer, seed, checkpoint, busy)
        for name, role in recipe.roles.items()
    }
    return start_models(config.model_cluster, recipe.roles, starts, resources)


def _batch(config: GRPOMasterConfig, recipe: RolloutRecipe, recorded: RecordedStep, version: int) -> StepBatch:
    trajectories = recorded.trajectories
    tensors = layout_of(config, recipe)(trajectories)
    return StepBatch(
        tensors,
        trajectories,
        rows_per_update=rows_per_update(trajectories, config.policy.train_global_batch_size or len(trajectories)),
        stale_BT=mark_stale(tensors, trajectories, version, mixes_weights=config.policy.mixes_weights),
    )
