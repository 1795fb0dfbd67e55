"""The Megatron Core training backend on one rank; it combines the parts of this package.

Implements `models.training.interfaces.PolicyBackend`. `policy.workers.rank` builds it inside a Ray actor, tests build
it in plain processes. The process group must exist before, and a process can hold one backend.

Invariant: this rank's part of the weights is complete (no gathering is outstanding) whenever code other than a forward
pass reads it. For 16-bit weights the optimizer keeps float32 copies. With LoRA (`policy.megatron_cfg.peft`) the
reference is the frozen base, and exported weights are merged (`lora`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.distributed.ranks.collectives import all_gather
from nemo_rl.host.device import free_cache
from nemo_rl.models.huggingface.load import load_model_config, torch_dtype
from nemo_rl.models.huggingface.tensor_files import model_folder
from nemo_rl.models.megatron.inputs import rank_inputs, row_order
from nemo_rl.models.megatron.parallel import division_of, start_model_parallel
from nemo_rl.models.megatron.release import require_megatron_core
from nemo_rl.models.training.checkpoint_writes import Keep, Write, as_it_is
from nemo_rl.models.training.host_memory import HostMemory, move_weights
from nemo_rl.models.training.inputs import ModelInputs
from nemo_rl.models.training.interfaces import CheckpointPaths, ForwardStep, PolicyBackend
from nemo_rl.models.training.low_rank import require_on_some_rank
from nemo_rl.models.training.sampling import sampling_density
from nemo_rl.utils.errors import CheckpointError, ConfigError


class MegatronBackend(PolicyBackend):
    """See the module docstring and `PolicyBackend`.

    Args:
        config: the policy section.
        device: device on which this rank computes.
        layout: sizes of the mesh axes.
        init_optimizer: make optimizer and schedule (a frozen scorer needs none).
        init_reference_model: keep a copy of the initial weights in host memory.
        seed: run seed.
    """

    def __init__(
        self,
        config: PolicyConfig,
        device: torch.device,
        layout: ParallelLayout,
        *,
        init_optimizer: bool = True,
        init_reference_model: bool = True,
        seed: int = 0,
    ) -> None:
        section = config.megatron_cfg
        self.device = device
        require_megatron_core()
        groups = start_model_parallel(layout, section, device, seed)
        # Imported only now: on a machine without CUDA these modules need `start_model_parallel` first.
        from nemo_rl.models.megatron import optimizer as optim
        from nemo_rl.models.megatron.expert_load import ExpertLoad
        from nemo_rl.models.megatron.lora import modules as lora
        from nemo_rl.models.megatron.schedule import Schedule
        from nemo_rl.models.megatron.scoring import Scoring, logit_transform

        self._optim, self._lora, self._groups, self._division = optim, lora, groups, division_of(groups)
        self._has_gradients = False
        self._memory_level = section.empty_unused_memory_level
        self.hf_config, self._scores = _model_config(config), config.reward_model_cfg.enabled
        precision = torch_dtype(config.precision)
        self.chunks: list[Any] = _loaded_chunks(self.hf_config, config, precision, device, seed)
        self._model_name, self._peft = config.model_name, section.peft
        self._adapted = lora.apply_lora(self.chunks, self.hf_config, self._peft, seed) if self._peft.enabled else []
        self._adapters_unproven = self._peft.enabled
        on_gpu = device.type != "cpu"
        self._takes_turns, self._weights_rest, self._state_rests = on_gpu, False, False
        self._resting = defaultdict[int, HostMemory](partial(HostMemory, pinned=on_gpu))
        self._replaced, initial = (HostMemory(pinned=on_gpu) for _ in range(2))
        self._writers: dist.ProcessGroup | None = None
        self._has_reference = init_reference_model
        copies_initial = init_reference_model and not self._peft.enabled
        self._reference = self._copies(initial) if copies_initial else None
        self.optimizer: Any = None
        self.scheduler: Any = None
        if init_optimizer:
            self.chunks = list(optim.with_gradients(self.chunks, section))
            self.optimizer = optim.build_optimizer(self.chunks, section, precision=precision)
            self.scheduler = optim.build_scheduler(self.optimizer, section)
        has_experts = init_optimizer and bool(self.chunks[0].config.num_moe_experts)
        each_layer = section.moe_per_layer_logging
        watched = ExpertLoad(self.chunks, self._division, device, each_layer=each_layer) if has_experts else None
        self._load = watched
        scoring = Scoring(groups, sampling_density(config), logit_transform(self.hf_config), config.logprob_chunk_size)
        watch = None if self._load is None else self._load.watching
        self._schedule = Schedule(self.chunks, scoring, self._division, watch)

    def run(self, microbatches: Sequence[ModelInputs], forward_step: ForwardStep, *, backward: bool) -> None:
        """See `PolicyBackend.run`; an update must follow each training pass before the next one.

        Gradients are summed over ranks at the end of the pass; a second pass would sum them twice.
        """
        assert not (backward and self._has_gradients), "an update (clip_and_step) comes between two training passes"
        self._has_gradients |= backward
        mine = [rank_inputs(inputs, self._division) for inputs in microbatches]
        self._schedule.run(mine, forward_step, backward=backward)

    def update_metrics(self) -> dict[str, float]:
        """See `PolicyBackend.update_metrics`; returns the load of experts, if the model has experts."""
        return {} if self._load is None else self._load.end_update()

    def clip_and_step(self) -> tuple[float, bool]:
        """See `PolicyBackend.clip_and_step`; the update is dropped if the gradient is not finite."""
        assert self.optimizer is not None, "this policy was made without an optimizer"
        self._has_gradients = False
        if self._memory_level > 1:
            free_cache(self.device)
        norm, stepped, self.dropped_for = self._optim.clip_and_step(self.optimizer, self.chunks)
        if stepped and self._adapters_unproven and norm > 0 and self.learning_rate() > 0:
            self._optim.complete_weights(self.chunks)
            self._lora.check_adapters_moved(self.chunks)
            self._adapters_unproven = False
        if self._memory_level > 0:
            free_cache(self.device)
        return norm, stepped

    def weights_here(self) -> dict[str, Tensor]:
        """See `PolicyBackend.weights_here`; uses Megatron Core's names, chunks in order."""
        from nemo_rl.models.megatron.build import unwrap

        self._optim.complete_weights(self.chunks)
        return {name: weight for chunk in self.chunks for name, weight in unwrap(chunk).named_parameters()}

    def advance_schedule(self) -> None:
        """See `PolicyBackend.advance_schedule`."""
        if self.scheduler is not None:
            self.scheduler.step(increment=1)

    def learning_rate(self) -> float:
        """See `PolicyBackend.learning_rate`; 0 without an optimizer."""
        return self._optim.learning_rate(self.optimizer) if self.optimizer is not None else 0.0

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        """See `PolicyBackend.reference_weights`.

        Raises:
            ConfigError: the policy was made with `init_reference_model=False`.
        """
        if not self._has_reference:
            raise ConfigError("Reference log-probabilities need Policy(init_reference_model=True).")
        if self._reference is None:
            with self._lora.adapters_off(self.chunks):
                yield
            return
        current = self._copies(self._replaced)
        self._put(self._reference)
        try:
            yield
        finally:
            self._put(current)

    def iterate_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """See `PolicyBackend.iterate_weights`.

        Raises:
            WeightSyncError: adapters were trained, but every exported weight is still the base model's.
        """
        from nemo_rl.models.megatron.conversion.exporter import iterate_hf_weights

        self._optim.complete_weights(self.chunks)
        merged = self._lora.MergedWeights(self.chunks, dtype)
        yield from iterate_hf_weights(
            self.chunks,
            self.hf_config,
            device=self.device,
            dtype=dtype,
            has_scalar_head=self._scores,
            value=merged,
        )
        if self._peft.enabled and not self._adapters_unproven:
            require_on_some_rank(merged.differ, self.device, self._lora.SECTION)

    def save(self, paths: CheckpointPaths) -> None:
        """See `PolicyBackend.save`."""
        from nemo_rl.models.megatron.checkpoints.run_state import save

        self._ready_to_save(paths)
        save(paths, self.chunks, self.optimizer, self.scheduler, hf_config=self.hf_config)
        for write in self._adapter_writes(paths, as_it_is):
            write(None)

    def stage_save(self, paths: CheckpointPaths) -> Callable[[], None]:
        """See `PolicyBackend.stage_save`."""
        from nemo_rl.models.megatron.checkpoints.run_state import on_host, stage_save

        self._ready_to_save(paths)
        if self._writers is None:
            self._writers = dist.new_group(backend="gloo")
        group, adapter = self._writers, self._adapter_writes(paths, on_host)
        write_model = stage_save(
            paths, self.chunks, self.optimizer, self.scheduler, hf_config=self.hf_config, group=group
        )

        def write_all() -> None:
            write_model()
            for write in adapter:
                write(group)

        return write_all

    def _adapter_writes(self, paths: CheckpointPaths, keep: Keep) -> list[Write]:
        """Return the writes of the adapters for other libraries; empty without adapters."""
        if not self._adapted:
            return []
        from nemo_rl.models.megatron.lora.files import save_adapter

        return [
            save_adapter(self.chunks, self.hf_config, self._peft, self._model_name, self._adapted, paths.weights, keep)
        ]

    def load(self, paths: CheckpointPaths) -> None:
        """See `PolicyBackend.load`."""
        from nemo_rl.models.megatron.checkpoints.run_state import load
        from nemo_rl.models.megatron.lora.files import check_adapter

        check_adapter(paths.weights, self._peft)
        self._optim.complete_weights(self.chunks)
        load(paths, self.chunks, self.optimizer, self.scheduler)

    def _ready_to_save(self, paths: CheckpointPaths) -> None:
        if paths.optimizer is not None and self.optimizer is None:
            raise CheckpointError("This policy has no optimizer to save; leave optimizer_path out.")
        self._optim.complete_weights(self.chunks)

    def decoder_layers(self) -> dict[str, nn.Module]:
        """See `PolicyBackend.decoder_layers`.

        Raises:
            ConfigError: the stages are interleaved, so that layers also run for filler microbatches.
        """
        if len(self.chunks) > 1:
            raise ConfigError(
                "The outputs of layers are not recorded with interleaved stages. Set "
                "policy.megatron_cfg.virtual_pipeline_model_parallel_size=null for this."
            )
        from nemo_rl.models.megatron.build import unwrap

        layers: Any = unwrap(self.chunks[0]).decoder.layers
        return {f"model.layers.{layer.layer_number - 1}": layer for layer in layers}

    def join_tokens(self, hidden_tD: Tensor) -> Tensor:
        """See `PolicyBackend.join_tokens`."""
        row = hidden_tD.to(self.device)
        if self._groups.sequence_parallel:
            row = all_gather(row, 0, self._groups.tp, partial_gradient=False)
        if self._groups.cp is not None:
            row = all_gather(row, 0, self._groups.cp, partial_gradient=False)
            row = row[row_order(len(row), self._division).to(self.device)]
        return row.cpu()

    def move_optimizer_state(self, to_host: bool) -> None:
        """See `PolicyBackend.move_optimizer_state`; gradient buffers are freed while the state is on the host."""
        if self._takes_turns and self.optimizer is not None and to_host != self._state_rests:
            for chunk in self.chunks:
                if to_host:
                    chunk.offload_grad_buffers(synchronize=True, empty_cache=False)
                else:
                    chunk.restore_grad_buffers()
            for number, part in enumerate(self._optim.parts_of(self.optimizer)):
                self._optim.move_part(part, self._resting[number], self.device, to_host=to_host)
            self._state_rests = to_host
        free_cache(self.device)

    def move_weights(self, to_host: bool) -> None:
        """See `PolicyBackend.move_weights`."""
        if self._takes_turns and to_host != self._weights_rest:
            for number, chunk in enumerate(self.chunks):
                move_weights(chunk, self._resting[number], self.device, to_host=to_host)
            self._weights_rest = to_host
        free_cache(self.device)

    def _weights(self) -> dict[str, Tensor]:
        """Return every parameter and buffer of this rank, by chunk and name."""
        from nemo_rl.models.megatron.build import unwrap

        return {
            f"{number}.{name}": tensor
            for number, chunk in enumerate(self.chunks)
            for name, tensor in [*unwrap(chunk).named_parameters(), *unwrap(chunk).named_buffers()]
        }

    @torch.no_grad()
    def _copies(self, memory: HostMemory) -> dict[str, Tensor]:
        """Copy the weights to host memory."""
        self._optim.complete_weights(self.chunks)
        return {name: memory.store(name, tensor) for name, tensor in self._weights().items()}

    @torch.no_grad()
    def _put(self, copies: dict[str, Tensor]) -> None:
        for name, tensor in self._weights().items():
            tensor.copy_(copies[name], non_blocking=True)


def _model_config(config: PolicyConfig) -> PretrainedConfig:
    """Load the model's configuration; for a reward model, that of a sequence classifier with one label."""
    hf_config = load_model_config(config.model_name, config.hf_config_overrides)
    if config.reward_model_cfg.enabled:
        classes: Any = AutoModelForSequenceClassification._model_mapping
        hf_config.architectures = [classes[type(hf_config)].__name__]
        hf_config.num_labels, hf_config.tie_word_embeddings = 1, False
    return hf_config


def _loaded_chunks(
    hf_config: PretrainedConfig, config: PolicyConfig, precision: torch.dtype, device: torch.device, seed: int
) -> list[Any]:
    """Build this rank's virtual stages and load their weights from the files; collective."""
    from nemo_rl.models.megatron.build import build_chunks
    from nemo_rl.models.megatron.conversion.importer import load_huggingface
    from nemo_rl.models.megatron.schedule import prepare
    from nemo_rl.models.megatron.scoring import give_scalar_head

    section = config.megatron_cfg
    chunks = build_chunks(hf_config, section, precision=precision, device=device, seed=seed)
    prepare(chunks)
    scores = config.reward_model_cfg.enabled
    if scores:
        give_scalar_head(chunks, std=getattr(hf_config, "initializer_range", 0.02))
    load_huggingface(chunks, hf_config, model_folder(config.model_name), has_scalar_head=scores)
    return list(chunks)
