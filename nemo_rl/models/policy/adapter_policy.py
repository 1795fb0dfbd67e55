"""Control the ranks of a frozen base with many adapters through one object in the controller.

Calls block until a deadline at most. A request that cannot be served raises a `DataError` and changes nothing. All
other errors end the ranks.

Invariant: the microbatches of a pass depend on its rows only, so that results do not depend on other adapters, unless
their passes share the base.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.distributed.workers.builder import plan_places
from nemo_rl.models.adapters.tensors import AdapterShape, AdapterTensors
from nemo_rl.models.adapters.training import AdamParams
from nemo_rl.models.policy.batching import ShardedBatch, shard_batch, training_strategy
from nemo_rl.models.policy.lm_policy import rank_environment, warn_of_slow_precision
from nemo_rl.models.policy.rank_calls import RankCalls
from nemo_rl.models.policy.workers.adapter_rank import ADAPTER_OF_ROW, LOSS_INPUTS, NamedLoss, PassPart, Refusal
from nemo_rl.models.policy.workers.rank import WorkerSettings
from nemo_rl.utils.errors import ConfigError, DataError

_WORKER = "nemo_rl.models.policy.workers.adapter_rank.AdapterRank"
_BACKEND = "nemo_rl.models.dtensor.backend.SlotBackend"


def check_adapter_policy(config: PolicyConfig) -> None:
    """Refuse settings that adapters on one base do not support."""
    section = config.dtensor_cfg
    if config.backend_key != "dtensor_cfg":
        raise ConfigError(f"Adapters on one base need policy.dtensor_cfg, and policy.{config.backend_key} is enabled.")
    for key in ("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size", "expert_parallel_size"):
        if (size := getattr(section, key)) > 1:
            raise ConfigError(
                f"policy.dtensor_cfg.{key}={size}, but ranks with adapters divide rows only. Set it to 1. More ranks "
                "divide the rows of a request, and shard the base."
            )
    given = {
        "dtensor_cfg.lora_cfg.enabled": section.lora_cfg.enabled,
        "dtensor_cfg.compile_layers": section.compile_layers,
        "reward_model_cfg.enabled": config.reward_model_cfg.enabled,
        "draft.enabled": config.draft.enabled,
        "router_replay.enabled": config.router_replay.enabled,
        "is_vlm": config.is_vlm,
    }
    for key, value in given.items():
        if value:
            raise ConfigError(f"policy.{key}=true does not go with adapters on one base. Set it to false.")


class AdapterPolicy:
    """A frozen base with many adapters, each with its optimizer.

    Args:
        places: Bundles in which the ranks run, one in each.
        config: The section `policy`.
        cluster: The section `cluster`, with time limits, threads and environments.
        name_prefix: Prefix of the names of the worker processes.
        seed: Seed of the ranks.
    """

    def __init__(
        self,
        places: RayVirtualCluster,
        config: PolicyConfig,
        cluster: ClusterConfig,
        *,
        name_prefix: str = "adapter_policy",
        seed: int = 0,
    ) -> None:
        check_adapter_policy(config)
        warn_of_slow_precision(config, uses_gpu=places.use_gpus)
        timeouts, venv = cluster.timeouts, cluster.venvs.get("policy")
        self._config, self._timeouts = config, timeouts
        ranks_of_node = Counter(place.node_idx for place in plan_places(places.bundle_counts, None, None))
        self._layout = ParallelLayout.of(config, ranks_of_node.total())
        settings = WorkerSettings(
            backend=_BACKEND,
            layout=self._layout,
            uses_gpu=places.use_gpus,
            num_threads=cluster.threads_per_rank,
            ranks_per_node=max(ranks_of_node.values()),
            collective_timeout_s=timeouts.train_s,
            seed=seed,
            init_optimizer=False,
            init_reference_model=False,
            optimizations=cluster.optimizations,
        )
        self._workers = RayWorkerGroup(
            places,
            RayWorkerBuilder(_WORKER, config, settings).in_environment(venv, "policy", timeouts.venv_s),
            name_prefix=name_prefix,
            sharding_annotations=self._layout.sharding,
            env_vars=rank_environment(config, uses_gpu=places.use_gpus),
            setup_timeout_s=timeouts.setup_s,
            call_timeout_s=timeouts.train_s,
        )
        self._ranks = RankCalls(self._workers, self._layout, timeouts)

    def create(self, adapter: str, shape: AdapterShape) -> None:
        """Add an adapter that has no effect."""
        _accepted(self._everywhere("create_adapter", name=adapter, shape=shape))

    def run_passes(
        self, rows: Mapping[str, BatchedDataDict[Any]], loss: NamedLoss, *, backward: bool
    ) -> dict[str, tuple[float, Tensor] | Refusal]:
        """Compute a loss of some rows of each adapter, and add its gradient to the adapter's if wanted.

        Rows of several adapters share one pass over the base. One adapter alone gets the bits that it always gets.

        Args:
            rows: For each adapter `input_ids [B, T]` right padded, `input_lengths [B]`, `target_tokens [B, T, k]` and
                the inputs of the loss `[B, T, k]` (`padded_rows`).

        Returns:
            For each adapter the sum of the loss, and the log-probabilities `[B, T, k]` of the targets, where T and k
            are those of the widest rows. A refusal if its loss or gradient is not finite; nothing was added then.
        """
        sharded = self._sharded(joined_rows(list(rows.values())))
        call = {"adapters": list(rows), "loss": loss, "backward": backward}
        parts: list[PassPart] = self._ranks.with_rows("run_passes", sharded, **call)
        logprobs = sharded.restore([part.logprobs for part in parts]).split(
            [len(own["input_ids"]) for own in rows.values()]
        )
        found: dict[str, tuple[float, Tensor] | Refusal] = {}
        for number, (name, own) in enumerate(zip(rows, logprobs, strict=True)):
            of_ranks = [part.losses[number] for part in parts]
            refused = next((loss for loss in of_ranks if isinstance(loss, Refusal)), None)
            found[name] = refused or (sum(loss for loss in of_ranks if not isinstance(loss, Refusal)), own)
        if len(rows) > 1 and any(isinstance(result, Refusal) for result in found.values()):
            # Values that are not finite reach the gradients of other adapters, so each adapter gets a pass of its own.
            return {name: self.run_passes({name: own}, loss, backward=backward)[name] for name, own in rows.items()}
        return found

    def update(self, adapter: str, params: AdamParams) -> float:
        """Make an AdamW update, and return the norm of the gradient before clipping."""
        norm: float = _accepted(self._everywhere("update_adapter", name=adapter, params=params))
        return norm

    def save(self, adapter: str, folder: Path, *, with_optimizer: bool) -> None:
        """Write an adapter into a new folder."""
        arguments = {"name": adapter, "folder": str(folder.absolute()), "with_optimizer": with_optimizer}
        self._of_one("save_adapter", **arguments)

    def load(self, adapter: str, folder: Path, *, with_optimizer: bool) -> AdapterShape:
        """Add the adapter of a folder, with its optimizer or a new one, and return its shape."""
        arguments = {"name": adapter, "folder": str(folder.absolute()), "with_optimizer": with_optimizer}
        shape: AdapterShape = _accepted(self._everywhere("load_adapter", **arguments))
        return shape

    def drop(self, adapter: str) -> None:
        """Forget an adapter."""
        self._everywhere("drop_adapter", name=adapter)

    def keep_sampler(self, sampler: str, adapter: str) -> AdapterTensors:
        """Keep the current weights of an adapter as a sampler, and return them."""
        self._everywhere("keep_sampler", sampler=sampler, adapter=adapter)
        return self.sampler_tensors(sampler)

    def load_sampler(self, sampler: str, folder: Path) -> AdapterTensors:
        """Keep the adapter of a folder as a sampler, and return it."""
        _accepted(self._everywhere("load_sampler", sampler=sampler, folder=str(folder.absolute())))
        return self.sampler_tensors(sampler)

    def sampler_tensors(self, sampler: str) -> AdapterTensors:
        """Return the adapter of a sampler, on the CPU."""
        tensors: AdapterTensors = self._of_one("sampler_tensors", sampler=sampler)
        return tensors

    def save_sampler(self, sampler: str, folder: Path) -> None:
        """Write the adapter of a sampler into a new folder."""
        self._of_one("save_sampler", sampler=sampler, folder=str(folder.absolute()))

    def drop_sampler(self, sampler: str) -> None:
        """Forget a sampler."""
        self._everywhere("drop_sampler", sampler=sampler)

    def score(self, sampler: str | None, rows: BatchedDataDict[Any]) -> Tensor:
        """Return the log-probabilities `[B, T, k]` of the targets of rows, under a sampler or the base."""
        sharded = self._sharded(rows)
        return sharded.restore(self._ranks.with_rows("score_given", sharded, sampler=sampler))

    def most_likely(self, sampler: str | None, rows: BatchedDataDict[Any], top_k: int) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and ids of the most likely tokens after every token, each `[B, T, top_k]`."""
        sharded = self._sharded(rows)
        parts = self._ranks.with_rows("score_most_likely", sharded, sampler=sampler, top_k=top_k)
        logprobs, ids = (sharded.restore(tensors) for tensors in zip(*parts, strict=True))
        return logprobs, ids

    def shutdown(self) -> bool:
        """Stop the ranks, and return whether all of them stopped cleanly."""
        return self._workers.shutdown("shutdown", timeout=self._timeouts.shutdown_s)

    def _sharded(self, rows: BatchedDataDict[Any]) -> ShardedBatch:
        return shard_batch(rows, self._layout.data_parallel_size, training_strategy(self._config))

    def _everywhere(self, method: str, **kwargs: Any) -> list[Any]:
        return self._ranks.everywhere(method, method.replace("_", " "), **kwargs)

    def _of_one(self, method: str, **kwargs: Any) -> Any:
        """Call a method of the first rank, because the adapters of all ranks are equal."""
        with self._ranks.held():
            call = self._workers.run_single_worker_single_data(method, 0, **kwargs)
            phase = method.replace("_", " ")
            return _accepted([self._workers.get_worker_result(call, 0, self._timeouts.checkpoint_s, phase)])


def _accepted(answers: Sequence[Any]) -> Any:
    """Return the first rank's answer."""
    if isinstance(answers[0], Refusal):
        raise DataError(answers[0].reason)
    return answers[0]


def padded_rows(
    token_ids: Sequence[Tensor], targets: Sequence[Tensor], inputs: Sequence[Mapping[str, Tensor]] = ()
) -> BatchedDataDict[Any]:
    """Make the rows of a pass.

    Args:
        token_ids: `[N]` tokens of each row.
        targets: `[N, K]` targets of each row.
        inputs: inputs of the loss of each row by name, each `[N, K]`. Empty for scores without a loss.
    """
    batch: dict[str, Any] = {
        "input_ids": torch.nn.utils.rnn.pad_sequence(list(token_ids), batch_first=True),
        "input_lengths": torch.tensor([len(ids) for ids in token_ids]),
        "sample_mask": torch.ones(len(token_ids)),
        "target_tokens": _padded(targets),
    }
    for name in inputs[0] if inputs else ():
        batch[f"{LOSS_INPUTS}.{name}"] = _padded([given[name] for given in inputs])
    return BatchedDataDict(batch)


def joined_rows(requests: Sequence[BatchedDataDict[Any]]) -> BatchedDataDict[Any]:
    """Join the rows of several adapters to those of one pass, and number the adapters in `ADAPTER_OF_ROW`."""
    columns = {key: _joined([rows[key] for rows in requests]) for key in requests[0]}
    numbers = torch.arange(len(requests))
    columns[ADAPTER_OF_ROW] = numbers.repeat_interleave(torch.tensor([len(rows["input_ids"]) for rows in requests]))
    return BatchedDataDict(columns)


def _joined(columns: Sequence[Tensor]) -> Tensor:
    """Join tensors of different sizes by their rows, with zeros at the ends of the others."""
    sizes = [max(lengths) for lengths in zip(*(column.shape[1:] for column in columns), strict=True)]
    padded = []
    for column in columns:
        missing = [size - length for size, length in zip(sizes, column.shape[1:], strict=True)]
        padded.append(torch.nn.functional.pad(column, [end for size in reversed(missing) for end in (0, size)]))
    return torch.cat(padded)


def _padded(parts: Sequence[Tensor]) -> Tensor:
    """Join tensors `[N, K]` of different sizes to `[B, T, k]`, with zeros at the ends."""
    length, width = (max(part.shape[axis] for part in parts) for axis in (0, 1))
    return torch.stack(
        [torch.nn.functional.pad(part, (0, width - part.shape[1], 0, length - part.shape[0])) for part in parts]
    )
