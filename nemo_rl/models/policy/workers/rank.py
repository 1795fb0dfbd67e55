"""Run the worker of one policy rank, for every training backend, and start its process.

`models.policy.lm_policy` calls one worker per rank. Flow of an update on one rank:

    rows + microbatch sizes ─► ModelInputs ─► backend.run ─► forward_step: scatter, loss, metrics ─► step

Invariant: all ranks make the same sequence of backend calls, because each call is collective. So the number of
microbatches is the same on every rank, and a rank without counted tokens runs its microbatches too.

A worker process builds `PolicyRank` by name. `PolicyRank` only assembles settings, process group and the configured
backend. `PolicyWorker` has the methods of a worker.
"""

import logging
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.utils import logging as transformers_logging

from nemo_rl.config import PolicyConfig, row_length_multiple
from nemo_rl.data.routed_experts import ROUTED_EXPERTS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.distributed.ranks.process_group import destroy_process_group, init_process_group
from nemo_rl.distributed.workers.start_phases import start_phase
from nemo_rl.host.boundary import in_background
from nemo_rl.host.capacity import usable_cores
from nemo_rl.host.device import device_for
from nemo_rl.host.row_invariance import compute_rows_alike
from nemo_rl.losses.loss_function import AnyLossFunction, LossMetrics
from nemo_rl.models.batch_rows import BatchRows
from nemo_rl.models.policy.workers.costs import PassCosts, pass_costs
from nemo_rl.models.policy.workers.loss_calls import call_loss, input_builder, reduce_metrics
from nemo_rl.models.policy.workers.scoring import ScoringWorker
from nemo_rl.models.policy.workers.update_recorder import RankUpdate, UpdateRecorder
from nemo_rl.models.training.inputs import InputLayout, ModelInputs, split_rows
from nemo_rl.models.training.interfaces import CheckpointPaths, PolicyBackend
from nemo_rl.models.training.tensor_checks import ANOTHER_COPY, listed, not_finite, on_all_ranks, require_finite
from nemo_rl.optimizations.process_tuning import keep_freed_memory
from nemo_rl.optimizations.switch import Choice, is_on
from nemo_rl.utils.errors import CheckpointError, ConfigError, NonFiniteError, WeightSyncError
from nemo_rl.utils.imports import import_dotted
from nemo_rl.utils.seed import derive_seed, set_seed
from nemo_rl.weight_sync.buckets import Bucket
from nemo_rl.weight_sync.endpoints import WeightSender
from nemo_rl.weight_sync.exchange import Encoding
from nemo_rl.weight_sync.lanes import Lane

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of a worker besides the section `policy`."""

    backend: str
    """Dotted name of the `PolicyBackend`."""
    layout: ParallelLayout
    """Position of each rank on the parallel axes."""
    uses_gpu: bool
    """Whether each rank owns a GPU."""
    num_threads: int | None
    """Number of CPU threads of the process. If None, the cores divided by the number of processes that share them."""
    ranks_per_node: int
    """Number of workers that share the machine."""
    collective_timeout_s: float
    """Seconds after which a collective raises if a peer does not join."""
    seed: int
    """Seed of the run. Each rank derives its own seed from it (dropout)."""
    init_optimizer: bool
    """Whether to make optimizer and schedule."""
    init_reference_model: bool
    """Keep the initial weights for reference log-probabilities."""
    busy_engines: int = 0
    """Number of engine workers on the machine that compute at the same time as this process."""
    optimizations: Choice = "auto"
    """Value of `cluster.optimizations`."""

    def threads(self, *, invariant: bool = False) -> int:
        """Return the number of CPU threads of this process. It is equal at every start on the same machine.

        Args:
            invariant: whether it must not depend on the number of processes. Then it is 1 unless it is configured.
        """
        if self.num_threads is not None:
            return self.num_threads
        if invariant:
            return 1
        return max(1, usable_cores() // (self.ranks_per_node + self.busy_engines))


@dataclass
class UpdateResult:
    """One rank's contribution to one optimizer update."""

    loss: float
    """This rank's part of the loss. The global loss is the sum over ranks."""
    metrics: dict[str, float] = field(default_factory=dict)
    """This rank's part of each metric. Parts are summed over ranks, or reduced as extremes, depending on the name."""
    grad_norm: float = 0.0
    """Gradient norm of the whole model, equal on all ranks."""
    lr: float = 0.0
    """Learning rate of the update."""
    skipped: bool = False
    """Whether the update was dropped because its gradient or the learning rate was not finite."""
    not_finite: list[str] = field(default_factory=list)
    """Names of non-finite weights on any rank or, if there are none, of gradients, if the update was dropped."""
    model_metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the model itself, equal on all ranks."""


class PolicyWorker(ScoringWorker):
    """One rank of the policy.

    Args:
        backend: backend with model, optimizer and mesh.
        gives_scores: whether this rank returns scores (`ParallelLayout.result_ranks`).
    """

    def __init__(self, backend: PolicyBackend, config: PolicyConfig, *, gives_scores: bool = True) -> None:
        super().__init__(backend, input_layout(config), gives_scores=gives_scores)
        self._sender: WeightSender | None = None
        self._sends_adapters = config.sends_adapters
        self._saving: Future[None] | None = None
        self.recorder: UpdateRecorder | None = None

    def train(
        self,
        data: BatchedDataDict[Any],
        sizes: Sequence[int],
        loss_fn: AnyLossFunction,
        global_valid: tuple[float, float],
        eval_mode: bool = False,
        last_update: bool = True,
    ) -> UpdateResult:
        """Make one optimizer update from this rank's rows of one global batch.

        Args:
            data: The rows, in microbatch order, with the keys of a training batch, or stored rows.
            sizes: Number of rows of each microbatch.
            loss_fn: Loss that is called on each microbatch. It divides by the global counts.
            global_valid: Numbers of valid sequences and valid tokens of the global batch.
            eval_mode: Whether to compute only loss and metrics.
            last_update: Whether this update ends the training step, which advances the schedule.
        """
        microbatches, inputs = self._laid_out(data, sizes, loss_fn)
        seqs, toks = (torch.tensor(count, device=self.backend.device) for count in global_valid)
        valid = (seqs, toks)
        losses: list[Tensor] = []
        metrics: list[LossMetrics] = []
        recorder = None if eval_mode else self.recorder

        def forward_step(index: int, logprobs_K: Tensor, entropy_K: Tensor) -> Tensor:
            rows = microbatches[index].to(self.backend.device)
            loss, values = call_loss(loss_fn, inputs[index], logprobs_K, entropy_K, rows, valid)
            losses.append(loss.detach())
            metrics.append(values)
            if recorder is not None:
                recorder.note(rows, inputs[index], logprobs_K, losses[-1])
            return _differentiable(loss, logprobs_K)

        with nullcontext() if recorder is None else recorder.passes():
            self.backend.run(inputs, forward_step, backward=not eval_mode)
        if recorder is not None:
            recorder.passes_end(metrics)
        result = UpdateResult(loss=sum(loss.item() for loss in losses), metrics=reduce_metrics(metrics))
        if not eval_mode:
            self._update(result, last_update)
        if recorder is not None:
            recorder.end(result.grad_norm, result.lr, result.model_metrics)
        return result

    def _laid_out(
        self, data: BatchedDataDict[Any], sizes: Sequence[int], loss_fn: AnyLossFunction
    ) -> tuple[list[BatchedDataDict[Any]], list[ModelInputs]]:
        """Return the microbatches with their inputs in the form that the loss needs."""
        microbatches = list(split_rows(BatchRows.of(data).whole(), sizes))
        build = input_builder(loss_fn)
        inputs = [build(rows, self._layout, self.backend.device) for rows in microbatches]
        for rows in microbatches:
            rows.pop(ROUTED_EXPERTS, None)  # the loss does not need them
        return microbatches, inputs

    def _update(self, result: UpdateResult, last_update: bool) -> None:
        result.model_metrics = self.backend.update_metrics()
        result.lr = self.backend.learning_rate()
        result.grad_norm, stepped = self.backend.clip_and_step()
        result.skipped = not stepped
        if result.skipped:
            result.not_finite = self.non_finite_weights() or on_all_ranks(list(self.backend.dropped_for))
        if last_update:
            self.backend.advance_schedule()

    def non_finite_weights(self) -> list[str]:
        """Return the names of weights with NaN or infinity on any rank. The call is collective."""
        return on_all_ranks(not_finite(self.backend.weights_here()))

    def iterate_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Call `PolicyBackend.iterate_weights`. All ranks must exhaust the iterator together."""
        return self.backend.iterate_weights(dtype)

    def move_optimizer_state(self, to_host: bool) -> None:
        """Move optimizer state to host memory, to free device memory for a colocated engine, or back."""
        self.backend.move_optimizer_state(to_host)

    def move_weights(self, to_host: bool) -> None:
        """Move the weights of a frozen model to host memory or back."""
        self.backend.move_weights(to_host)

    def begin_weight_stream(self, lanes: list[Lane], dtype: str, encoding: Encoding | None = None) -> None:
        """Start streaming the weights to the engines.

        Args:
            lanes: Lanes to the engines. If they differ from those of the last stream, a new sender is made.
            dtype: Name of the torch dtype in which the engines compute, for example "bfloat16".
            encoding: Encoding of weights that are not sent in `dtype`.

        Raises:
            NonFiniteError: A weight is not finite on any of the ranks.
            WeightSyncError: A rank that sends could not connect to the engines.
        """
        spoilt = self.non_finite_weights()
        if spoilt:
            raise NonFiniteError(
                f"The policy's weights are not finite: {listed(spoilt)}. They are not sent to engines."
            )
        if self._sender is None or (self._sender.lanes, self._sender.encoding) != (lanes, encoding):
            self._close_sender()
            self._sender = self._new_sender(lanes, encoding)
        engine_dtype = getattr(torch, dtype)
        backend = self.backend
        weights = backend.held_adapters(engine_dtype) if self._sends_adapters else backend.held_weights(engine_dtype)
        self._sender.begin(weights)

    def _new_sender(self, lanes: list[Lane], encoding: Encoding | None) -> WeightSender:
        """Make this rank's sender, in a collective call. If one rank fails, all do, so none waits for its blocks."""
        rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
        group = dist.group.WORLD if dist.is_initialized() else None
        sender, failures = None, []
        try:
            sender = WeightSender(lanes, rank, is_node_leader=local_rank == 0, group=group, encoding=encoding)
        except (OSError, RuntimeError) as error:
            failures = [f"rank {rank}: {type(error).__name__}: {error}"]
        failures = on_all_ranks(failures)
        if sender is not None and not failures:
            return sender
        if sender is not None:
            sender.close()
        raise WeightSyncError(f"Trainer ranks did not meet the engines: {'; '.join(failures)}")

    def _close_sender(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def next_weight_buckets(self) -> list[Bucket]:
        """Exchange blocks of the next tensors, and pack a bucket for each lane. The call is collective."""
        assert self._sender is not None, "begin_weight_stream comes first"
        return self._sender.next_buckets()

    def send_weight_bucket(self, bucket: Bucket) -> None:
        """Send a packed bucket through a sending transport."""
        assert self._sender is not None, "begin_weight_stream comes first"
        self._sender.send(bucket)

    def save_checkpoint(self, weights_path: str, optimizer_path: str | None = None, background: bool = False) -> None:
        """Write this rank's part of a checkpoint. With `background`, return when the state is copied.

        Raises:
            CheckpointError: A weight is not finite on any of the ranks. Nothing is written.
        """
        spoilt = self.non_finite_weights()
        if spoilt:
            raise CheckpointError(f"The weights are not finite and are not saved: {listed(spoilt)}.")
        paths = _paths(weights_path, optimizer_path)
        if background:
            self.finish_checkpoint()
            self._saving = in_background(self.backend.stage_save(paths), "checkpoint")
        else:
            self.backend.save(paths)

    def checkpoint_is_written(self) -> bool:
        """Return whether no background write is running."""
        return self._saving is None or self._saving.done()

    def finish_checkpoint(self) -> None:
        """Wait for the background write.

        Raises:
            CheckpointError: a rank could not write its files.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        """Restore a checkpoint. The reference weights are still those of `policy.model_name`.

        Raises:
            CheckpointError: a rank cannot read the checkpoint.
            NonFiniteError: the checkpoint holds weights that are not finite.
        """
        self.backend.load(_paths(weights_path, optimizer_path))
        require_finite(self.backend.weights_here(), f"the checkpoint {weights_path}", "Resume from an earlier one.")

    def shutdown(self) -> bool:
        """Free the weight transport, and leave the process group."""
        self._close_sender()
        destroy_process_group()
        return True


def input_layout(config: PolicyConfig) -> InputLayout:
    """Read the layout of microbatches from the configuration."""
    if config.invariant_gradients:
        return InputLayout(packed=False)
    round_to = row_length_multiple(config)
    if config.dynamic_batching.enabled:
        round_to = math.lcm(round_to, config.dynamic_batching.sequence_length_round)
    if config.sequence_packing.enabled:
        round_to = math.lcm(round_to, config.sequence_packing.sequence_length_round or 1)
    return InputLayout(packed=config.sequence_packing.enabled, round_to=round_to)


def _paths(weights_path: str, optimizer_path: str | None) -> CheckpointPaths:
    return CheckpointPaths(Path(weights_path), Path(optimizer_path) if optimizer_path else None)


def _differentiable(loss: Tensor, logprobs_K: Tensor) -> Tensor:
    """Return a loss with a backward pass, even if the loss is constant because no token counts."""
    return loss if loss.requires_grad else loss + 0.0 * logprobs_K.sum()


class PolicyRank(PolicyWorker):
    """The worker of one rank, with its process group and its backend."""

    def __init__(self, config: PolicyConfig, settings: WorkerSettings) -> None:
        torch.set_num_threads(settings.threads(invariant=config.invariant_gradients))
        transformers_logging.disable_progress_bar()
        if config.zero_mismatch:
            compute_rows_alike()
        device = device_for(settings.uses_gpu)
        torch_device = device.activate()
        backend_class = import_dotted(
            settings.backend,
            ConfigError,
            f"rank_class={settings.backend!r}",
            "Name a PolicyBackend by its dotted path.",
        )
        # # With a device, each of Megatron Core's groups would be split from the group of all ranks. Transfers between
        # its pipeline stages would then wait for each other.
        binds_device = config.backend_key != "megatron_cfg"
        with start_phase("process group"):
            init_process_group(device, settings.collective_timeout_s, binds_device=binds_device)
        layout, rank = settings.layout, dist.get_rank()
        with start_phase("model"):
            backend = backend_class(
                config,
                torch_device,
                layout,
                init_optimizer=settings.init_optimizer,
                init_reference_model=settings.init_reference_model,
                seed=settings.seed,
            )
            require_finite(backend.weights_here(), f"the model {config.model_name}", ANOTHER_COPY)
        set_seed(derive_seed(settings.seed, "policy", *layout.random_path(rank)))
        super().__init__(backend, config, gives_scores=rank in layout.result_ranks)
        self._config = config
        if torch_device.type == "cpu" and is_on("host_allocator", settings.optimizations):
            keep_freed_memory()

    def record_updates(self, *, of_modules: bool) -> None:
        """Record updates until `take_updates` is called (`UpdateRecorder`)."""
        self._stop_recorder()
        self.recorder = UpdateRecorder(self.backend, of_modules=of_modules, gives_scores=self._gives_scores)

    def take_updates(self) -> list[RankUpdate]:
        """Return what was recorded, and stop recording."""
        recorder = self._stop_recorder()
        return [] if recorder is None else recorder.take()

    def _stop_recorder(self) -> UpdateRecorder | None:
        """Stop the recorder, if there is one, and return it."""
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.stop_watching()
        return recorder

    def describe_passes(self) -> PassCosts:
        """Return the costs of passes over rows."""
        return pass_costs(self._config, self.backend.device)
