"""Compute the results of a mesh of ranks: the training backend in forked processes that communicate through gloo."""

import os
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.distributed.ranks.placements import whole
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.build import Built, build_model
from nemo_rl.models.dtensor.pipeline.stages import stage_of
from nemo_rl.models.dtensor.proof.numbers import in_float64
from nemo_rl.models.policy.batching import count_valid, logprob_strategy, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker
from parity.reference import LEARNING_RATE, STEPS, Numbers, WeightedLikelihood, random_batches

_TIMEOUT = timedelta(seconds=300)


def policy_config(model_name: str, mesh: Mapping[str, Any], *, packed: bool, **values: Any) -> PolicyConfig:
    """Build the policy section of a parity run; `mesh` has keys of `dtensor_cfg`."""
    settings: dict[str, Any] = {
        "model_name": model_name,
        "precision": "float32",
        "max_total_sequence_length": 64,
        "train_global_batch_size": 8,
        "train_micro_batch_size": 2,
        "optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": LEARNING_RATE}},
        "generation": None,
        "sequence_packing": {"enabled": packed, "train_mb_tokens": 80, "logprob_mb_tokens": 80},
        "max_grad_norm": None,
        "dtensor_cfg": dict(mesh),
    }
    return PolicyConfig.build(**settings | values)


def on_ranks[T](work: Callable[..., T], num_ranks: int, *arguments: Any) -> list[T]:
    """Run `work(*arguments)` in forked processes with a gloo group; return the results by rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork while torch has idle threads
        given = (work, num_ranks, port, folder, arguments)
        mp.start_processes(_rank, given, nprocs=num_ranks, start_method="fork")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def _rank(rank: int, work: Callable[..., Any], num_ranks: int, port: int, folder: str, arguments: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_ranks, timeout=_TIMEOUT)
        torch.save(work(*arguments), Path(folder) / f"{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        sys.stderr.write(f"[rank {rank}] {traceback.format_exc()}\n")
        sys.stderr.flush()
        raise


def mesh_numbers(
    model_name: str,
    mesh: Mapping[str, Any],
    num_ranks: int,
    *,
    packed: bool,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float32,
    batches: Sequence[BatchedDataDict[Any]] | None = None,
    **values: Any,
) -> Numbers:
    """Compute `reference.one_process` with the training backend, on `num_ranks` ranks in a given dtype."""
    config, batches = policy_config(model_name, mesh, packed=packed, **values), batches or random_batches(steps)
    parts = on_ranks(_train, num_ranks, config, batches, dtype)
    layout, (shards, rows) = parts[0]["layout"], parts[0]["rows"]
    givers = layout.result_ranks
    joined = Numbers()
    for step in range(len(batches)):
        joined.losses.append(sum(parts[rank]["losses"][step] for rank in givers))
        joined.norms.append(parts[0]["norms"][step])
        joined.gradients.append(_sum_of([parts[rank]["gradients"][step] for rank in layout.stage_ranks]))
        scored = torch.cat([parts[rank]["logprobs"][step] for rank in givers])
        order = [row for shard in shards[step] for row in shard]
        joined.logprobs.append(torch.stack([scored[order.index(row)] for row in range(rows)]))
    return joined


def _sum_of(stages: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join the gradients of all stages; a weight that two stages hold gets the sum."""
    total: dict[str, Tensor] = {}
    for gradients in stages:
        for name, gradient in gradients.items():
            total[name] = total[name] + gradient if name in total else gradient
    return total


def _train(config: PolicyConfig, batches: Sequence[BatchedDataDict[Any]], dtype: torch.dtype) -> dict[str, Any]:
    """Run one rank's part of some updates."""
    layout = ParallelLayout.of(config, dist.get_world_size())
    build = partial(_build_in, dtype)
    backend = DTensorBackend(config, torch.device("cpu"), layout, init_reference_model=False, build=build)
    with in_float64() if dtype == torch.float64 else nullcontext():
        return _updates(backend, config, layout, batches)


def _updates(
    backend: DTensorBackend, config: PolicyConfig, layout: ParallelLayout, batches: Sequence[BatchedDataDict[Any]]
) -> dict[str, Any]:
    worker = PolicyWorker(backend, config, gives_scores=dist.get_rank() in layout.result_ranks)
    mine, shares = layout.data_parallel_rank(dist.get_rank()), {"shares_prompts": worker.shares_prompts()}
    out: dict[str, Any] = {"layout": layout, "losses": [], "norms": [], "gradients": [], "logprobs": []}
    step_of, shards = backend.clip_and_step, []

    def keep_gradients() -> tuple[float, bool]:
        out["gradients"].append(_whole_gradients(backend))
        return step_of()

    backend.clip_and_step = keep_gradients  # type: ignore[method-assign]
    for data in batches:
        scoring = shard_batch(data, layout.data_parallel_size, logprob_strategy(config), **shares)
        out["logprobs"].append(worker.get_logprobs(scoring.data[mine], scoring.sizes[mine]))
        shards.append([[row for microbatch in shard for row in microbatch] for shard in scoring.plan.shards])
        sharded = shard_batch(data, layout.data_parallel_size, training_strategy(config), **shares)
        result = worker.train(sharded.data[mine], sharded.sizes[mine], WeightedLikelihood(), count_valid(data))
        out["losses"].append(result.loss)
        out["norms"].append(result.grad_norm)
    return out | {"rows": (shards, batches[0].size)}


def _build_in(dtype: torch.dtype, config: PolicyConfig, seed: int) -> Built:
    """Build the model in a dtype; its weights are loaded from the files later."""
    built = build_model(config, seed)
    built.model.to(dtype)
    if dtype == torch.float64:
        built.model.hf.set_experts_implementation("eager")  # grouped products do not support float64
    return built


def _whole_gradients(backend: DTensorBackend) -> dict[str, Tensor]:
    """Return every gradient of this rank's stage, gathered, by its name in checkpoints; collective."""
    gradients, stage = {}, stage_of(backend.model.hf)
    for name, parameter in backend.model.hf.named_parameters():
        if parameter.grad is not None:
            gradients[name if stage is None else stage.known_as(name)] = whole(parameter.grad).clone()
    return gradients
