"""Control the policy's ranks through one object in the controller.

Algorithms call `train`, `get_logprobs` and the checkpoint methods of this object. `workers` compute, with one process
per rank. `ParallelLayout` defines which rows a rank gets, and which ranks return results. Flow of a call:

    batch ─► global batches ─► plan (data.packing) ─► each data-parallel rank its rows ─► workers ─► gather, reorder

Every call blocks until a deadline at most, and one thread calls at a time (`rank_calls`). If a worker raises or dies,
the call raises its error and the whole group stops.

Invariant: results do not depend on the number of ranks or on how microbatches are formed.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from nemo_rl.config import PolicyConfig, TimeoutsConfig, VenvConfig, report_findings
from nemo_rl.config.rules.models import check_backend
from nemo_rl.data.model_rows import ROW_INPUTS, completed
from nemo_rl.data.packing import MicrobatchStrategy
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.distributed.workers.builder import plan_places
from nemo_rl.host.device import exact_page_locking, has_no_bfloat16
from nemo_rl.losses.loss_function import AnyLossFunction
from nemo_rl.models.policy.batching import (
    ShardedBatch,
    count_valid,
    global_batches,
    logprob_strategy,
    require_keys,
    scoring_rows,
    shard_batch,
    training_strategy,
)
from nemo_rl.models.policy.interfaces import (
    KeptScores,
    LogprobOutputSpec,
    PolicyInterface,
    ReferenceLogprobOutputSpec,
    ScoreOutputSpec,
    TopkLogitsOutputSpec,
    TrainResult,
    ValueOutputSpec,
)
from nemo_rl.models.policy.rank_calls import RankCalls, join_layers, join_ranks, make_portable, of_rows, train_result
from nemo_rl.models.policy.workers.loss_calls import check_loss, extra_keys, something_counts
from nemo_rl.models.policy.workers.rank import WorkerSettings
from nemo_rl.models.training.backends import training_backend
from nemo_rl.optimizations.switch import Choice

logger = logging.getLogger(__name__)

_WORKER = "nemo_rl.models.policy.workers.rank.PolicyRank"
# # By default, OpenMP threads spin so long at a barrier that one busy core delays a step by seconds. A short spin costs
# nothing on an idle machine.
_WORKER_ENVIRONMENT = {"GOMP_SPINCOUNT": "20000"}
# # torch's compiler would start up to 32 helper processes per rank, which is 256 with eight ranks. The variable is not
# set on CPUs, where it would prevent forks of ranks (`optimizations.fork_server`), which save five seconds of the
# start.
_GPU_ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "4"}
TRAINING_KEYS = ("input_ids", "input_lengths", "token_mask", "sample_mask")


def warn_of_slow_precision(config: PolicyConfig, *, uses_gpu: bool) -> None:
    """Log a warning if the processor has no instructions for the precision of a policy without GPUs."""
    if not uses_gpu and config.precision == "bfloat16" and has_no_bfloat16():
        logger.warning(
            "policy.precision=bfloat16, but this processor has no instructions for bfloat16 (AVX-512 or AMX). A pass "
            "can take 10 times as long as in float32. Set policy.precision=float32, unless memory is short."
        )


def rank_environment(config: PolicyConfig, *, uses_gpu: bool) -> dict[str, str]:
    """Return the environment variables of the ranks of a model."""
    common = _WORKER_ENVIRONMENT | (_GPU_ENVIRONMENT if uses_gpu else {})
    own = config.backend_section.env_vars or {}
    variables = common | training_backend(config).environment(config) | own
    return variables | (exact_page_locking(variables) if uses_gpu else {})


class Policy(PolicyInterface):
    """The model under training.

    Args:
        cluster: Cluster on which the ranks run, with one rank per bundle unless `workers_per_node` is given.
        config: The section `policy`. A dict is checked, and missing values get their defaults.
        tokenizer: Tokenizer that is saved next to the weights.
        name_prefix: Prefix of the names of the worker processes.
        workers_per_node: Number of ranks on each node of the cluster.
        weights_path: Checkpoint folder to resume weights from.
        optimizer_path: Checkpoint folder to resume optimizer, schedule and random numbers from.
        init_reference_model: Whether to keep the weights of `config.model_name` for reference log-probabilities, even
            if training resumes from a checkpoint.
        threads_per_rank: CPU threads of a rank. If None, the machine's cores divided by its ranks and busy engines.
        busy_engines: Number of engine workers on each machine that compute at the same time as the ranks.
        seed: Seed of the run, for dropout.
        venv: Python environment of the ranks (`cluster.venvs.policy`). If None, that of the registry.

    Raises:
        ConfigError: No training backend is enabled, the ranks do not divide into the parallel sizes, or a worker
            refuses the configuration.
        ResourceInsufficientError, DeadlineExceededError, WorkerDiedError: The ranks did not start.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        config: PolicyConfig | Mapping[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        name_prefix: str = "lm_policy",
        workers_per_node: int | list[int] | None = None,
        init_optimizer: bool = True,
        weights_path: str | PathLike[str] | None = None,
        optimizer_path: str | PathLike[str] | None = None,
        init_reference_model: bool = True,
        *,
        timeouts: TimeoutsConfig | None = None,
        threads_per_rank: int | None = None,
        busy_engines: int = 0,
        seed: int = 0,
        venv: VenvConfig | None = None,
        optimizations: Choice = "auto",
    ) -> None:
        config = PolicyConfig.of(config)
        report_findings(check_backend("policy", config))
        warn_of_slow_precision(config, uses_gpu=cluster.use_gpus)
        self.config = config
        self.tokenizer = tokenizer
        self.weight_version = 0
        """Number of training calls. `weight_stream` and the engines use it as the version of the weights."""
        self._complete_checkpoint: Callable[[], None] | None = None
        self._timeouts = timeouts or TimeoutsConfig()
        self._backend = training_backend(config)
        self._accepted = self._backend.accepted_rows(config)
        ranks_of_node = Counter(place.node_idx for place in plan_places(cluster.bundle_counts, workers_per_node, None))
        self.layout = ParallelLayout.of(config, ranks_of_node.total())
        """Position of each rank on the parallel axes."""
        settings = WorkerSettings(
            backend=self._backend.rank_class,
            layout=self.layout,
            uses_gpu=cluster.use_gpus,
            num_threads=threads_per_rank,
            busy_engines=busy_engines,
            ranks_per_node=max(ranks_of_node.values()),
            collective_timeout_s=self._timeouts.train_s,
            seed=seed,
            init_optimizer=init_optimizer,
            init_reference_model=init_reference_model,
            optimizations=optimizations,
        )
        self.worker_group = RayWorkerGroup(
            cluster,
            RayWorkerBuilder(_WORKER, config, settings).in_environment(venv, "policy", self._timeouts.venv_s),
            workers_per_node=workers_per_node,
            name_prefix=name_prefix,
            sharding_annotations=self.layout.sharding,
            env_vars=rank_environment(config, uses_gpu=cluster.use_gpus),
            setup_timeout_s=self._timeouts.setup_s,
            call_timeout_s=self._timeouts.train_s,
        )
        self.ranks = RankCalls(self.worker_group, self.layout, self._timeouts)
        """Object that calls the ranks."""
        self.work = self.ranks.work
        """Counter of the passes over rows, without validations."""
        packing = config.sequence_packing
        asks = packing.enabled and packing.share_prompts and not config.invariant_gradients
        self._shares_prompts = asks and all(self.ranks.everywhere("shares_prompts", "starting the policy"))
        if weights_path is not None:
            self._load_checkpoint(weights_path, optimizer_path)

    @property
    def data_parallel_size(self) -> int:
        """The number of groups of ranks that process different rows."""
        return self.layout.data_parallel_size

    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: AnyLossFunction,
        eval_mode: bool = False,
        gbs: int | Sequence[int] | None = None,
        mbs: int | None = None,
    ) -> TrainResult:
        """Make one optimizer update per global batch, in the order of the rows.

        The learning-rate schedule advances once per call, for any number of updates. A global batch without a counted
        token makes no update, because momentum and weight decay would still change the weights. If no global batch
        makes an update, nothing changes, including the schedule and `weight_version`.

        Args:
            data: A training batch: `input_ids`, `input_lengths`, `token_mask`, `sample_mask` and the keys that the loss
                needs.
            loss_fn: Loss that every rank calls on each microbatch, with global denominators.
            eval_mode: Whether to compute only loss and metrics. The last global batch may then be partial.
            gbs: Number of rows of one update, or a list of these numbers. If None, `train_global_batch_size`.
            mbs: Number of rows of one microbatch, padded or packed. If None, microbatches are formed as configured.

        Raises:
            DataError: Keys are missing, the rows do not divide into global batches, or a row is too long.
            ConfigError: The loss needs an input that policies do not prepare, or the training backend does not accept
                the rows' further inputs.
        """
        check_loss(loss_fn, self.config)
        require_keys(data, (*TRAINING_KEYS, *extra_keys(loss_fn)), "Policy.train")
        make_portable(loss_fn)
        size = gbs or self.config.train_global_batch_size
        counted = [(batch, count_valid(batch)) for batch in global_batches(data, size, allow_partial=eval_mode)]
        wanted = [n for n, (_, valid) in enumerate(counted) if eval_mode or something_counts(valid, loss_fn)]
        group_size = getattr(loss_fn, "rows_per_unit", 1)
        strategy = training_strategy(self.config, mbs, group_size)
        updates: list[dict[str, float]] = [{} for _ in counted]
        with self.held():
            if self.config.offload_optimizer_for_logprob and wanted and not eval_mode:
                self.onload_optimizer()
            for number in wanted:
                batch, valid = counted[number]
                sharded = self._shard(batch, strategy, group_size)
                parts = self.ranks.with_rows(
                    "train",
                    sharded,
                    loss_fn=loss_fn,
                    global_valid=valid,
                    eval_mode=eval_mode,
                    last_update=number == wanted[-1],
                )
                updates[number] = join_ranks(parts, valid, eval_mode)
            if wanted and not eval_mode:
                self.weight_version += 1
        return train_result(updates, loss_fn)

    def get_logprobs(self, data: BatchedDataDict[Any]) -> BatchedDataDict[LogprobOutputSpec]:
        """Score all tokens under the current weights, at the temperature of the sampler.

        Args:
            data: `input_ids [B, T]` right padded, `input_lengths [B]`; any number of rows.

        Returns:
            `logprobs [B, T]` float32; 0 at position 0 and on padding.
        """
        return BatchedDataDict({"logprobs": self._score("get_logprobs", data)})

    def keep_logprobs(self, data: BatchedDataDict[Any], *, of_reference: bool = False) -> KeptScores:
        """Score stored rows like the methods for log-probabilities, and keep the scores in the object store."""
        return of_rows(*self._run_scoring("keep_logprobs", data, None, of_reference=of_reference))

    def layer_outputs(self, token_ids: list[int]) -> tuple[list[str], list[torch.Tensor]]:
        """Return the names of the decoder layers, and one sequence's hidden states `[T, D]` float32 after each."""
        reports: list[tuple[list[str], list[torch.Tensor]]] = self.ranks.everywhere(
            "layer_outputs", "comparing layers", token_ids=token_ids
        )
        return join_layers([reports[rank] for rank in self.layout.stage_ranks])

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """Return `reference_logprobs [B, T]`, scored as in `get_logprobs` with the weights of `config.model_name`.

        Raises:
            ConfigError: the policy was made with `init_reference_model=False`.
        """
        scores = self._score("get_reference_policy_logprobs", data, micro_batch_size)
        return BatchedDataDict({"reference_logprobs": scores})

    def get_topk_logits(
        self,
        data: BatchedDataDict[Any],
        k: int,
        micro_batch_size: int | None = None,
        *,
        vocab_size: int | None = None,
        temperature: float | None = None,
    ) -> BatchedDataDict[TopkLogitsOutputSpec]:
        """Return the k largest logits after every token, for distillation, at temperature 1 and unfiltered.

        Args:
            data: `input_ids [B, T]` right padded, `input_lengths [B]`; any number of rows.
            micro_batch_size: Number of rows of a rank's microbatch. If None, as configured.
            vocab_size: Only token ids below this number are considered (an output head may have more rows than tokens).
            temperature: If given, return log-probabilities at this temperature, over the considered ids, in place of
                logits.

        Returns:
            `topk_logits [B, T, k]` float32, largest first, and `topk_indices [B, T, k]` int64, in the order of the
            rows. Position t has the logits for the token after token t, also at the last real position. Padding has 0.
        """
        rows, width = scoring_rows("get_topk_logits", data, self.config)["input_ids"].shape
        if rows == 0:
            empty = torch.zeros((0, width, k))
            return BatchedDataDict({"topk_logits": empty, "topk_indices": empty.long()})
        which = {"k": k, "vocab_size": vocab_size, "temperature": temperature}
        sharded, parts = self._run_scoring("get_topk_logits", data, micro_batch_size, **which)
        logits, indices = (sharded.restore(tensors) for tensors in zip(*parts, strict=True))
        return BatchedDataDict({"topk_logits": logits, "topk_indices": indices})

    def score(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[ScoreOutputSpec]:
        """Score whole sequences with a reward model.

        Args:
            data: `input_ids [B, T]` right padded, `input_lengths [B]`; any number of rows.
            micro_batch_size: Number of rows of a rank's microbatch. If None, as configured.

        Returns:
            `scores [B]` float32: the output of the head after the last token of each row. A head with N > 1 outputs
            gives `scores [B, N]`.

        Raises:
            ConfigError: The policy is a language model.
        """
        return BatchedDataDict({"scores": self._score("score", data, micro_batch_size)})

    def get_values(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[ValueOutputSpec]:
        """Return the output of a critic's scalar head before each token.

        Args:
            data: `input_ids [B, T]` right padded, `input_lengths [B]`, or stored rows; any number of rows.
            micro_batch_size: Number of rows of a rank's microbatch. If None, as configured.

        Returns:
            `values [B, T]` float32. Position t has the value of the state before token t, that is, of the tokens before
            t. Position 0 and padding have 0. `score` returns the value after the last token.

        Raises:
            ConfigError: The policy is a language model.
        """
        return BatchedDataDict({"values": self._score("get_values", data, micro_batch_size)})

    def save_checkpoint(
        self,
        weights_path: str | PathLike[str],
        optimizer_path: str | PathLike[str] | None = None,
        tokenizer_path: str | PathLike[str] | None = None,
        consolidated: bool = False,
        *,
        background: bool = False,
    ) -> None:
        """Write a checkpoint. The training backend decides what its folders contain.

        Args:
            weights_path: New or empty folder, on storage that is visible to all ranks and to this process.
            optimizer_path: Folder for the state of optimizer, schedule and random numbers. If None, it is not written.
            tokenizer_path: Folder for an additional copy of the tokenizer.
            consolidated: Whether to write an additional copy of the model in `precision`, for other programs.
            background: Whether to return when the ranks have copied their state. `finalize_async_save` then completes
                the checkpoint.
        """
        self.finalize_async_save()
        self.ranks.everywhere(
            "save_checkpoint",
            "writing a checkpoint",
            weights_path=_absolute(weights_path),
            optimizer_path=_absolute(optimizer_path),
            background=background,
        )
        precision = self.config.precision if consolidated else None

        def complete() -> None:
            self._backend.complete_checkpoint(Path(weights_path), self.tokenizer, precision)
            if tokenizer_path is not None:
                self.tokenizer.save_pretrained(str(tokenizer_path))

        if background:
            self._complete_checkpoint = complete
        else:
            complete()

    def checkpoint_is_written(self) -> bool:
        """Return whether the ranks have finished their background writes. The call does not wait."""
        return self._complete_checkpoint is None or all(
            self.ranks.everywhere("checkpoint_is_written", "asking for the checkpoint")
        )

    def finalize_async_save(self) -> None:
        """Wait until a checkpoint that is written in the background is complete.

        Raises:
            CheckpointError: a rank could not write its files.
            DeadlineExceededError: writing took longer than `cluster.timeouts.checkpoint_s`.
        """
        complete, self._complete_checkpoint = self._complete_checkpoint, None
        if complete is not None:
            self.ranks.everywhere("finish_checkpoint", "writing a checkpoint in the background")
            complete()

    def offload_optimizer(self) -> None:
        """Move optimizer state to host memory, to free GPU memory for colocated engines."""
        self.ranks.everywhere("move_optimizer_state", "offloading the optimizer", to_host=True)

    def onload_optimizer(self) -> None:
        """Move optimizer state back to the GPUs before training."""
        self.ranks.everywhere("move_optimizer_state", "onloading the optimizer", to_host=False)

    def offload_weights(self) -> None:
        """Move the weights of a frozen model to host memory, to free GPU memory for other models."""
        self.ranks.everywhere("move_weights", "offloading the weights", to_host=True)

    def onload_weights(self) -> None:
        """Move the weights back to the GPUs before the model is used."""
        self.ranks.everywhere("move_weights", "onloading the weights", to_host=False)

    def held(self) -> AbstractContextManager[None]:
        """Keep other threads from calling the ranks, for example in a weight stream. The same thread may enter again.

        Raises:
            DeadlineExceededError: another thread holds the policy for too long (`RankCalls.held`).
        """
        return self.ranks.held()

    def find_loss(self, *, silence_is_loss: bool) -> str | None:
        """Return a one-line reason to replace the ranks, or None (`RayWorkerGroup.find_loss`)."""
        return self.worker_group.find_loss(silence_is_loss=silence_is_loss)

    def restart(
        self, weights_path: str | PathLike[str] | None = None, optimizer_path: str | PathLike[str] | None = None
    ) -> None:
        """Replace all ranks, including dead and hanging ones, with new ranks in the same places.

        Afterwards this object equals a new one, with `weight_version` 0. Running calls of other threads fail. Arguments
        and errors are those of the constructor.
        """
        self.worker_group.end("it is being restarted")
        with self.held():
            self._complete_checkpoint = None
            self.weight_version = 0
            self.worker_group.restart_all(self._timeouts.setup_s)
            if weights_path is not None:
                self._load_checkpoint(weights_path, optimizer_path)

    def shutdown(self) -> bool:
        """Stop the ranks, and return whether all of them stopped cleanly."""
        return self.worker_group.shutdown("shutdown", timeout=self._timeouts.shutdown_s)

    def _score(self, method: str, data: BatchedDataDict[Any], micro_batch_size: int | None = None) -> torch.Tensor:
        rows = self._scoring_rows(method, data)
        if rows.size == 0:
            width = rows["input_ids"].shape[1] if "input_ids" in rows else 0
            return torch.zeros((0,) if method == "score" else (0, width), dtype=torch.float32)
        sharded, parts = self._run_scoring(method, data, micro_batch_size)
        return sharded.restore(parts)

    def _scoring_rows(self, method: str, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        return scoring_rows(method, data, self.config)

    def _run_scoring(
        self, method: str, data: BatchedDataDict[Any], micro_batch_size: int | None, **common: Any
    ) -> tuple[ShardedBatch, list[Any]]:
        """Score at least one row on all ranks. Return the sharded batch (to restore the order) and the results."""
        strategy = logprob_strategy(self.config, micro_batch_size)
        sharded = self._shard(self._scoring_rows(method, data), strategy)
        if self.config.offload_optimizer_for_logprob:
            self.offload_optimizer()  # until the next update
        return sharded, self.ranks.with_rows(method, sharded, **common)

    def _shard(self, rows: BatchedDataDict[Any], strategy: MicrobatchStrategy, group_size: int = 1) -> ShardedBatch:
        """Divide rows over the ranks."""
        if ROW_INPUTS in rows:
            rows = BatchedDataDict(rows.data | {ROW_INPUTS: completed(rows[ROW_INPUTS])})
            self._accepted.require(rows[ROW_INPUTS])
        return shard_batch(rows, self.data_parallel_size, strategy, group_size, shares_prompts=self._shares_prompts)

    def _load_checkpoint(self, weights_path: str | PathLike[str], optimizer_path: str | PathLike[str] | None) -> None:
        """Restore the ranks from a checkpoint. On failure, stop them, because the caller has no policy to shut down."""
        with ExitStack() as undo:
            undo.callback(self.worker_group.shutdown, force=True)
            self.ranks.everywhere(
                "load_checkpoint",
                "reading a checkpoint",
                weights_path=_absolute(weights_path),
                optimizer_path=_absolute(optimizer_path),
            )
            undo.pop_all()


def _absolute(path: str | PathLike[str] | None) -> str | None:
    """Make a path absolute, because workers run in other folders than the controller."""
    return None if path is None else str(Path(path).absolute())
