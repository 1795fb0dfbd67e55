"""Implement one rank of the Megatron Core training backend from the modules of this package.

`MegatronBackend` implements `models.training.interfaces.PolicyBackend`. `policy.workers.rank` builds it inside a Ray
actor, and tests build it in plain processes. The process group must already exist. A process can have one backend.

Invariant: code outside of forward passes reads weights only after the gathering of weights has finished. For 16-bit
weights the optimizer keeps float32 copies. With LoRA (`policy.megatron_cfg.peft`) the frozen base is the reference
model, and exported weights are merged with the adapters (`lora`).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import chain
from typing import Any, override

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.distributed.ranks.collectives import all_gather
from nemo_rl.distributed.workers.start_phases import start_phase
from nemo_rl.host.device import free_cache
from nemo_rl.models.draft.head import load_draft, prepared_draft
from nemo_rl.models.draft.trainer import DraftTrainer
from nemo_rl.models.huggingface.load import describe_scores, load_model_config, names_of_scores, torch_dtype
from nemo_rl.models.huggingface.tensor_files import model_folder
from nemo_rl.models.megatron.inputs import RankInputs, rank_inputs, row_order
from nemo_rl.models.megatron.model.families import text_part
from nemo_rl.models.megatron.parallel import division_of, start_model_parallel
from nemo_rl.models.megatron.release import require_megatron_core
from nemo_rl.models.training.inputs import ModelInputs
from nemo_rl.models.training.interfaces import CheckpointPaths, ForwardStep
from nemo_rl.models.training.low_rank import require_on_some_rank
from nemo_rl.models.training.torch_backend import HostMemory, Keep, TorchBackend, Write, move_weights, sampling_density
from nemo_rl.utils.errors import ConfigError
from nemo_rl.weight_sync.parts import HeldWeights, ReadableWeights


class MegatronBackend(TorchBackend):
    """The `PolicyBackend` of Megatron Core.

    Args:
        layout: sizes of the mesh axes.
        init_optimizer: make optimizer and schedule (a frozen model needs none).
        init_reference_model: keep a copy of the initial weights in host memory (with LoRA, use the frozen base).
        seed: run seed, for dropout and for the initial values of adapters or of a scalar head.
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
        with start_phase("groups of ranks"):
            groups = start_model_parallel(layout, section, device, seed)
        # # These imports are late, because without CUDA `start_model_parallel` must first prepare Megatron Core.
        from nemo_rl.models.megatron import lora
        from nemo_rl.models.megatron import optimizer as optim
        from nemo_rl.models.megatron.model.mtp import MTPLoss
        from nemo_rl.models.megatron.routers import ExpertLoad, MegatronReplayedRouters
        from nemo_rl.models.megatron.schedule import Schedule
        from nemo_rl.models.megatron.scoring import RowScorer, logit_transform

        self._optim, self._lora, self._groups, self._division = optim, lora, groups, division_of(groups)
        self._has_gradients = False
        self._memory_level = section.empty_unused_memory_level
        self._frees_float8 = section.fp8_cfg.enabled and section.fp8_cfg.force_clear_fp8_caches
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
        self._has_reference = init_reference_model
        copies_initial = init_reference_model and not self._peft.enabled
        self._reference = self.copied_weights(initial) if copies_initial else None
        if init_optimizer:
            self.chunks = list(optim.with_gradients(self.chunks, section))
            self.optimizer = optim.build_optimizer(self.chunks, section, precision=precision)
            self.scheduler = optim.build_scheduler(self.optimizer, section)
        has_experts = init_optimizer and bool(self.chunks[0].config.num_moe_experts)
        each_layer = section.moe_per_layer_logging
        watched = ExpertLoad(self.chunks, self._division, device, each_layer=each_layer) if has_experts else None
        self._load = watched
        scoring = RowScorer(
            groups, sampling_density(config), logit_transform(self.hf_config), config.logprob_chunk_size
        )
        if init_optimizer and section.trains_mtp:
            scoring.mtp = MTPLoss(section, scoring.head_options, device)
        self._mtp = scoring.mtp
        self._draft: DraftTrainer | None = None
        if config.draft.enabled and init_optimizer:
            from nemo_rl.models.megatron.draft import draft_trainer

            self._draft = scoring.draft = draft_trainer(config, self.chunks, groups, device, seed)
        watch = None if self._load is None and self._draft is None else self._watching
        replays = config.router_replay.enabled
        self._replay = MegatronReplayedRouters(self.chunks, self._division, device) if replays else None
        self._schedule = Schedule(self.chunks, scoring, self._division, watch, self._replay)

    def run(self, microbatches: Sequence[ModelInputs], forward_step: ForwardStep, *, backward: bool) -> None:
        """Run microbatches. An update must follow each training pass before the next training pass.

        The end of a pass sums the gradients in the buffers over ranks, so a second pass would sum those of the first
        pass again.
        """
        assert not (backward and self._has_gradients), "an update (clip_and_step) comes between two training passes"
        self._has_gradients |= backward
        num_further = self._mtp.num_depths if backward and self._mtp is not None else 0
        mine = [rank_inputs(inputs, self._division, num_further) for inputs in microbatches]
        self._schedule.run(mine, forward_step, backward=backward)

    @contextmanager
    def _watching(self, inputs: RankInputs) -> Iterator[None]:
        """Record the routing and train the draft model, if configured, during a training pass in the block."""
        with ExitStack() as stack:
            if self._load is not None:
                stack.enter_context(self._load.watching(inputs))
            if self._draft is not None:
                from nemo_rl.models.megatron.draft import draft_rows

                stack.enter_context(self._draft.watching(draft_rows(inputs)))
            yield

    def update_metrics(self) -> dict[str, float]:
        """Return the metrics of experts, replay, draft model and MTP layers for an update."""
        load = {} if self._load is None else self._load.end_update()
        draft = {} if self._draft is None else self._draft.end_passes()
        mtp = {} if self._mtp is None else self._mtp.end_update()
        return load | draft | mtp | ({} if self._replay is None else self._replay.counts.end_update())

    def clip_and_step(self) -> tuple[float, bool]:
        """Update the weights unless the clipped gradient is not finite (`PolicyBackend.clip_and_step`)."""
        assert self.optimizer is not None, "this policy was made without an optimizer"
        self._has_gradients = False
        if self._memory_level > 1:
            free_cache(self.device)
        norm, stepped, self.dropped_for = self._optim.clip_and_step(self.optimizer, self.chunks)
        if self._draft is not None:
            self._draft.step(self.learning_rate()) if stepped else self._draft.drop_gradients()
        if stepped and self._adapters_unproven and norm > 0 and self.learning_rate() > 0:
            self._optim.complete_weights(self.chunks)
            self._lora.check_adapters_moved(self.chunks)
            self._adapters_unproven = False
        if self._memory_level > 0:
            free_cache(self.device)
        return norm, stepped

    def weights_here(self) -> dict[str, Tensor]:
        """Return this rank's weights by Megatron Core's names, in the order of the chunks."""
        from nemo_rl.models.megatron.model.build import unwrap

        self._optim.complete_weights(self.chunks)
        return {name: weight for chunk in self.chunks for name, weight in unwrap(chunk).named_parameters()}

    @override
    def advance_schedule(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step(increment=1)

    def learning_rate(self) -> float:
        """Return the current learning rate, or 0 without an optimizer."""
        return self._optim.learning_rate(self.optimizer) if self.optimizer is not None else 0.0

    @override
    def adapters(self) -> Iterable[Any]:
        return [module.adapter for module in self._lora.adapted_modules(self.chunks).values()]

    @override
    @torch.no_grad()
    def copied_weights(self, memory: HostMemory) -> dict[str, Tensor]:
        self._optim.complete_weights(self.chunks)
        return {name: memory.store(name, tensor) for name, tensor in self._weights().items()}

    @override
    @torch.no_grad()
    def put_weights(self, copies: dict[str, Tensor]) -> None:
        for name, tensor in self._weights().items():
            tensor.copy_(copies[name], non_blocking=True)

    @override
    def held_weights(self, dtype: torch.dtype | None = None) -> HeldWeights:
        from nemo_rl.models.megatron.conversion.holdings import held_hf_weights
        from nemo_rl.models.megatron.model.layers import free_float8_copies

        if self._frees_float8:
            free_float8_copies(self.chunks)
        self._optim.complete_weights(self.chunks)
        merged = self._lora.MergedWeights(self.chunks, dtype)
        proves = self._peft.enabled and not self._adapters_unproven

        def finish() -> None:
            if proves:
                require_on_some_rank(merged.differ, self.device, self._lora.SECTION)

        weights = held_hf_weights(
            self.chunks,
            self.hf_config,
            device=self.device,
            dtype=dtype,
            has_scalar_head=self._scores,
            value=merged,
        )
        draft = () if self._draft is None else self._draft.held_weights(dtype, self.device)
        return ReadableWeights(chain(weights, draft), self.device, finish)

    @override
    def staged(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", copy=True)

    def prepared(self, paths: CheckpointPaths, keep: Keep) -> Iterator[Write]:
        """Yield the writes of a checkpoint. Adapters are also written in the format of PEFT."""
        from nemo_rl.models.megatron.checkpoints.run_state import prepared
        from nemo_rl.models.megatron.lora import save_adapter

        self._optim.complete_weights(self.chunks)
        yield from prepared(paths, self.chunks, self.optimizer, self.scheduler, self.hf_config, keep)
        if self._adapted:
            model, adapted = self._model_name, self._adapted
            yield save_adapter(self.chunks, self.hf_config, self._peft, model, adapted, paths.weights, keep)
        if self._draft is not None:
            yield from prepared_draft(self._draft.head, self._draft.optimizer, paths)

    @override
    def load(self, paths: CheckpointPaths) -> None:
        from nemo_rl.models.megatron.checkpoints.run_state import load
        from nemo_rl.models.megatron.lora import check_adapter

        check_adapter(paths.weights, self._peft)
        self._optim.complete_weights(self.chunks)
        load(paths, self.chunks, self.optimizer, self.scheduler)
        if self._draft is not None:
            load_draft(self._draft.head, self._draft.optimizer, paths)

    def decoder_layers(self) -> dict[str, nn.Module]:
        """Return this stage's decoder layers by name (`PolicyBackend.decoder_layers`).

        Raises:
            ConfigError: the stages are interleaved. Their layers also run for microbatches that only fill a group.
        """
        if len(self.chunks) > 1:
            raise ConfigError(
                "The outputs of layers are not recorded with interleaved stages. Set "
                "policy.megatron_cfg.virtual_pipeline_model_parallel_size=null for this."
            )
        from nemo_rl.models.megatron.model.build import unwrap

        layers: Any = unwrap(self.chunks[0]).decoder.layers
        return {f"model.layers.{layer.layer_number - 1}": layer for layer in layers}

    @override
    def join_tokens(self, hidden_tD: Tensor) -> Tensor:
        row = hidden_tD.to(self.device)
        if self._groups.sequence_parallel:
            row = all_gather(row, 0, self._groups.tp, partial_gradient=False)
        if self._groups.cp is not None:
            row = all_gather(row, 0, self._groups.cp, partial_gradient=False)
            row = row[row_order(len(row), self._division).to(self.device)]
        return row.cpu()

    def move_optimizer_state(self, to_host: bool) -> None:
        """Move the optimizer state. Gradient buffers are freed while the state is on the host."""
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

    @override
    def move_weights(self, to_host: bool) -> None:
        if self._takes_turns and to_host != self._weights_rest:
            for number, chunk in enumerate(self.chunks):
                move_weights(chunk, self._resting[number], self.device, to_host=to_host)
            self._weights_rest = to_host
        free_cache(self.device)

    def _weights(self) -> dict[str, Tensor]:
        """Return every parameter and buffer of this rank, by chunk and name."""
        from nemo_rl.models.megatron.model.build import unwrap

        return {
            f"{number}.{name}": tensor
            for number, chunk in enumerate(self.chunks)
            for name, tensor in [*unwrap(chunk).named_parameters(), *unwrap(chunk).named_buffers()]
        }


def _model_config(config: PolicyConfig) -> PretrainedConfig:
    """Load the model's configuration, which for a reward model is a sequence classifier."""
    model_folder(config.model_name)  # first, so that one rank per machine contacts the hub
    hf_config = text_part(load_model_config(config.model_name, config.hf_config_overrides))
    if config.reward_model_cfg.enabled:
        describe_scores(hf_config, config.reward_model_cfg.attributes)
        classes: Any = AutoModelForSequenceClassification._model_mapping
        hf_config.architectures = [classes[type(hf_config)].__name__]
        hf_config.tie_word_embeddings = False
    return hf_config


def _loaded_chunks(
    hf_config: PretrainedConfig, config: PolicyConfig, precision: torch.dtype, device: torch.device, seed: int
) -> list[Any]:
    """Build this rank's virtual stages, and load their weights from Hugging Face files. The call is collective."""
    from nemo_rl.models.megatron.conversion.importer import load_huggingface
    from nemo_rl.models.megatron.model.build import build_chunks, require_packed_attention, uses_transformer_engine
    from nemo_rl.models.megatron.schedule import prepare
    from nemo_rl.models.megatron.scoring import give_scalar_head

    section = config.megatron_cfg
    if config.sequence_packing.enabled and uses_transformer_engine(section, device):
        capability, has_flash_attn = torch.cuda.get_device_capability(device), find_spec("flash_attn") is not None
        require_packed_attention(section.attention_backend, capability, has_flash_attn=has_flash_attn)
    chunks = build_chunks(hf_config, section, precision=precision, device=device, seed=seed)
    prepare(chunks)
    scores = config.reward_model_cfg.enabled
    if scores:
        give_scalar_head(chunks, seed, len(names_of_scores(hf_config)))
    with start_phase("weights"):
        load_huggingface(chunks, hf_config, model_folder(config.model_name), has_scalar_head=scores)
    return list(chunks)
