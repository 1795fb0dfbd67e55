"""Implement the PyTorch-native training backend of one rank: FSDP2 over a Hugging Face model.

`DTensorBackend` implements `models.training.interfaces.PolicyBackend`. `policy.workers.rank` builds it inside a Ray
actor, and tests build it in plain processes. The process group must already exist.

Invariant: master weights are float32 and sharded over the data-parallel mesh. Before weights are read or changed, the
gathered copies of FSDP2 are freed, so that none becomes stale. With LoRA the loaded weights are the reference and do
not change; weights for engines and checkpoints are merged with the adapters (`lora`).

On CPUs the same data gives the same bits: the caller fixes the number of threads, microbatches run in the order of the
plan, ranks reduce in gloo's fixed ring order, and no kernel used here has a random summation order.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import override

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_rl.config import PolicyConfig
from nemo_rl.config.rules.broken_rules import report_findings
from nemo_rl.config.rules.models import check_trainable
from nemo_rl.data.images.families import media_tokens
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.distributed.ranks.placements import held_here
from nemo_rl.distributed.workers.start_phases import start_phase
from nemo_rl.host.device import free_cache
from nemo_rl.models.accepted_rows import require_parameters
from nemo_rl.models.adapters.lora_linear import SECTION, LoraLinear, adapted_modules
from nemo_rl.models.attention.flash_attn import use_flash_attention
from nemo_rl.models.attention.registered import VARLEN_ATTENTION
from nemo_rl.models.draft.head import load_draft, prepared_draft
from nemo_rl.models.draft.trainer import DraftRows, DraftTrainer, Taps, build_draft_model
from nemo_rl.models.dtensor import lora as adapter_io
from nemo_rl.models.dtensor.build import Built, build_model, build_with_slots
from nemo_rl.models.dtensor.checkpoints import model_files as checkpoint_io
from nemo_rl.models.dtensor.checkpoints import training_state
from nemo_rl.models.dtensor.checkpoints.held_weights import Results, held_weights
from nemo_rl.models.dtensor.checkpoints.lazy_weights import materialize
from nemo_rl.models.dtensor.context_parallel import ContextParallel
from nemo_rl.models.dtensor.lora import check_adapters_moved, held_adapters, merged_by_name
from nemo_rl.models.dtensor.mesh import Meshes
from nemo_rl.models.dtensor.optimizer import (
    build_optimizer,
    build_scheduler,
    clip_gradients,
    hidden_matrices,
    one_tensor_at_a_time,
    optimizer_settings,
    require_element_by_element,
)
from nemo_rl.models.dtensor.parallelize import (
    ShardingSpec,
    adds_up_here,
    finish_gradients,
    hold_in,
    reshard,
    shard,
)
from nemo_rl.models.dtensor.pipeline.runner import pipeline_for
from nemo_rl.models.dtensor.pipeline.stages import copied_parameters, keep_stage, stage_of, sum_shared_gradients
from nemo_rl.models.dtensor.routers import ExpertBalance, ReplayedRouters, watch_experts
from nemo_rl.models.huggingface.layers import body, decoder_layers, first_tensor
from nemo_rl.models.huggingface.load import stays_float32, torch_dtype
from nemo_rl.models.huggingface.recurrent import enter_row
from nemo_rl.models.training.inputs import ModelInputs, with_positions
from nemo_rl.models.training.interfaces import CheckpointPaths, ForwardStep
from nemo_rl.models.training.low_rank import require_on_some_rank
from nemo_rl.models.training.ordered_sums import require_rows_alone
from nemo_rl.models.training.tensor_checks import not_finite
from nemo_rl.models.training.torch_backend import (
    HostMemory,
    Keep,
    TorchBackend,
    Write,
    move_state,
    move_weights,
    sampling_density,
)
from nemo_rl.utils.errors import ConfigError
from nemo_rl.weight_sync.parts import HeldWeights, ReadableWeights

logger = logging.getLogger(__name__)


class DTensorBackend(TorchBackend):
    """The `PolicyBackend` of FSDP2.

    Args:
        device: this rank's device; its type is the mesh's device type.
        layout: sizes of the mesh axes; if None, they follow from the configuration and the number of ranks.
        init_optimizer: make optimizer and schedule (a frozen model needs none).
        init_reference_model: keep a CPU copy of the initial weights; with LoRA the frozen base is used instead.
        seed: run seed, for the initial values of adapters or of a new scalar head.
        build: makes the model; collective.
    """

    def __init__(
        self,
        config: PolicyConfig,
        device: torch.device,
        layout: ParallelLayout | None = None,
        *,
        init_optimizer: bool = True,
        init_reference_model: bool = True,
        seed: int = 0,
        build: Callable[[PolicyConfig, int], Built] = build_model,
    ) -> None:
        if init_optimizer:
            report_findings(check_trainable(config))
        self.device = device
        use_flash_attention(config.dtensor_cfg.flash_attention_version, device)
        layout = layout or ParallelLayout.of(config, dist.get_world_size())
        self._max_grad_norm, self._in_order = config.max_grad_norm, config.invariant_gradients
        self._model_name, self._lora = config.model_name, config.dtensor_cfg.lora_cfg
        self._adapters_unproven = self._lora.enabled
        self._results: Results = {}
        built = build(config, seed)
        self.model = built.model
        self._density = sampling_density(config, media_tokens(built.model.hf.config) if config.is_vlm else ())
        with start_phase("groups of ranks"):
            meshes = Meshes.build(layout, device.type)
        replays = config.router_replay.enabled
        self._replay = ReplayedRouters(self.model.hf, device, meshes.tp) if replays else None
        trained = config.optimizer if init_optimizer else None
        matrices = hidden_matrices(self.model.hf) if trained is not None and trained.is_muon else frozenset()
        if layout.pp > 1:
            keep_stage(self.model.hf, meshes, config.dtensor_cfg.virtual_pipeline_size, device)
        self._balance = watch_experts(self.model.hf, config, device, meshes) if init_optimizer else None
        # # Routing statistics count a prompt's tokens in every row with the prompt, so prompts cannot be shared.
        drafts = config.draft.enabled and init_optimizer
        if self._in_order and init_optimizer:
            has_loss = self._balance is not None and self._balance.has_loss
            require_rows_alone(self.model.hf, device, has_auxiliary_loss=has_loss)
        self.shares_prompts = built.shares_prompts and self._balance is None and not drafts
        if not (init_optimizer or init_reference_model) and _stores_compute_precision(device):
            hold_in(self.model, torch_dtype(config.precision))
        spec = ShardingSpec.of(config, device)
        shard(self.model, meshes, spec)
        self._adds_up_here = adds_up_here(meshes, spec)
        with start_phase("weights"):
            offload = config.dtensor_cfg.cpu_offload
            materialize(self.model, self.model.hf, built.lazy_weights, device, cpu_offload=offload)
        method = config.dtensor_cfg.context_parallel_method
        self._context = ContextParallel(meshes.cp, method) if layout.cp > 1 else None
        self._stage = stage_of(self.model.hf)
        self._pipeline = pipeline_for(self.model, config, meshes, self._scores, self._enter)
        self._has_reference = init_reference_model
        on_gpu = device.type != "cpu"
        self._takes_turns = on_gpu and not config.dtensor_cfg.cpu_offload
        self._weights_rest = False
        self._resting, self._replaced, self._staged, initial = (HostMemory(pinned=on_gpu) for _ in range(4))
        copies_initial = init_reference_model and not self._lora.enabled
        self._reference = self.copied_weights(initial) if copies_initial else None
        self._settings = optimizer_settings(config)
        if init_optimizer:
            assert config.optimizer is not None, "checked above"
            if self.model.ordered_sums is not None:
                require_element_by_element(config.optimizer)
            named = dict(self.model.hf.named_parameters())
            chosen = [weight for name, weight in named.items() if name in matrices]
            settings = one_tensor_at_a_time(config.optimizer) if self._in_order else config.optimizer
            self.optimizer = build_optimizer(named.values(), settings, matrices=chosen)
            self.scheduler = build_scheduler(self.optimizer, config.scheduler)
        self._draft = self.model.draft = self._draft_trainer(config, meshes, seed) if drafts else None

    def _draft_trainer(self, config: PolicyConfig, meshes: Meshes, seed: int) -> DraftTrainer:
        """Build the draft model and its optimizer, with the policy's settings."""
        assert config.optimizer is not None, "checked before"
        model = build_draft_model(config, meshes.fsdp, torch_dtype(config.precision), self.device, seed)
        taps = Taps(
            self.model.hf.get_input_embeddings(),
            decoder_layers(self.model.hf),
            model.head.shape.tapped_layers,
            lambda output: self.model.whole_rows(first_tensor(output), partial_gradient=False),
        )
        return DraftTrainer(
            model,
            taps,
            build_optimizer(model.parameters(), config.optimizer),
            max_grad_norm=config.max_grad_norm,
            loss_weight=config.draft.loss_weight,
            groups=[meshes.fsdp.get_group(axis) for axis in range(meshes.fsdp.ndim)],
        )

    @override
    def run(self, microbatches: Sequence[ModelInputs], forward_step: ForwardStep, *, backward: bool) -> None:
        self._check_further_inputs(microbatches)
        if self.model.sequence_parallel:
            microbatches = [with_positions(inputs) for inputs in microbatches]
        if self._context is not None:
            microbatches, forward_step = self._context.divided(microbatches, forward_step)
        if self._replay is not None and backward:
            self._replay.count(microbatches)
        if self._pipeline is None:
            self._run_whole(microbatches, forward_step, backward=backward)
        else:
            self._pipeline.run(microbatches, forward_step, backward=backward)
        if self._replay is not None:
            self._replay.stop()

    def _run_whole(self, microbatches: Sequence[ModelInputs], forward_step: ForwardStep, *, backward: bool) -> None:
        """Run microbatches through a model without stages, one after another."""
        balance = self._balance if backward else None
        if balance is not None and balance.has_loss:
            self._survey(microbatches, balance)
        sums = self.model.ordered_sums if backward else None
        if sums is not None:
            sums.start()
        self.model.train(backward)
        with torch.set_grad_enabled(backward):
            for index, inputs in enumerate(microbatches):
                with self._teaching(inputs, backward):
                    scores = self._scores(inputs, balance)
                loss = forward_step(index, *scores)
                if backward:
                    assert loss is not None
                    if balance is not None and balance.has_loss:
                        loss = loss + balance.loss()
                    if sums is not None:
                        sums.next_row()
                    if self._adds_up_here:
                        finish_gradients(self.model, last=index == len(microbatches) - 1)
                    loss.backward()
        reshard(self.model)

    def _teaching(self, inputs: ModelInputs, backward: bool) -> AbstractContextManager[None]:
        """Let the draft model, if there is one, learn from the forward pass of a microbatch."""
        if self._draft is None or not backward:
            return nullcontext()
        return self._draft.watching(_draft_rows(inputs))

    def _enter(self, inputs: ModelInputs) -> None:
        """Let recurrent layers compute the row of a microbatch, and routers replay its recorded experts, if any."""
        enter_row(self.model.hf, inputs.model_inputs)
        if self._replay is not None:
            self._replay.use(inputs)

    def _check_further_inputs(self, microbatches: Sequence[ModelInputs]) -> None:
        """Refuse inputs that the forward does not have, forgotten images, and positions that masks may misread.

        Without an attention mask, transformers interprets a jump in the positions as the start of another sequence.
        """
        names = {name for inputs in microbatches for name in inputs.further_names}
        if names:
            require_parameters(body(self.model.hf), sorted(names))
        images = [inputs for inputs in microbatches if not inputs.further_names and self._density.never]
        never = torch.tensor(self._density.never, device=self.device)
        if any(bool(torch.isin(inputs.model_inputs["input_ids"], never).any()) for inputs in images):
            raise ConfigError(
                "Rows have placeholders of images but no images. Their data processor must return the images in "
                "row_inputs, as vlm_hf_data_processor does."
            )
        own_masks = self.model.hf.config._attn_implementation != VARLEN_ATTENTION
        if own_masks and any("position_ids" in inputs.model_inputs for inputs in microbatches):
            raise ConfigError(
                f"Rows compute their own positions, but {type(self.model.hf).__name__} keeps its own attention masks, "
                "which may interpret a step in the positions as a new sequence. Use rows without a position rule."
            )

    def _scores(self, inputs: ModelInputs, balance: ExpertBalance | None = None) -> tuple[Tensor, Tensor]:
        """Return the model's scores of one microbatch and their entropy, and record the routing for `balance`."""
        density = self._density.unfiltered() if inputs.unfiltered else self._density
        self._enter(inputs)
        with nullcontext() if balance is None else balance.watching(inputs.real_tokens):
            scores: tuple[Tensor, Tensor] = self.model(
                inputs.model_inputs, inputs.positions_K, inputs.targets_K, density, inputs.top_k
            )
        return scores

    @torch.no_grad()
    def _survey(self, microbatches: Sequence[ModelInputs], balance: ExpertBalance) -> None:
        """Record the routing of an update's tokens to experts, without computing scores."""
        self.model.eval()
        for inputs in microbatches:
            unscored = replace(inputs, positions_K=inputs.positions_K[:0], targets_K=inputs.targets_K[:0])
            self._scores(unscored, balance)
        reshard(self.model)
        balance.end_survey()

    def update_metrics(self) -> dict[str, float]:
        """Return the metrics of an update, with the load of experts and the share of replayed tokens."""
        balance = {} if self._balance is None else self._balance.end_update()
        draft = {} if self._draft is None else self._draft.end_passes()
        return balance | draft | ({} if self._replay is None else self._replay.counts.end_update())

    def clip_and_step(self) -> tuple[float, bool]:
        """Update the weights unless the clipped gradient is not finite (`PolicyBackend.clip_and_step`)."""
        assert self.optimizer is not None, "this policy was made without an optimizer"
        sum_shared_gradients(self.model.hf)
        norm = clip_gradients(
            self.model.parameters(),
            self._max_grad_norm,
            copies=copied_parameters(self.model.hf),
            sum_over_stages=self._stage.sum if self._stage is not None else None,
            in_order=self._in_order,
        )
        finite = math.isfinite(norm) and math.isfinite(self.learning_rate())
        if finite:
            self.optimizer.step()
            if self._draft is not None:
                self._draft.step(self.learning_rate())
            if self._adapters_unproven and norm > 0 and self.learning_rate() > 0:
                check_adapters_moved(self.model.hf, self.device)
                self._adapters_unproven = False
        else:
            self.dropped_for = not_finite(self._gradients())
        self._forget_gradients()
        return norm, finite

    def _forget_gradients(self) -> None:
        self.model.zero_grad(set_to_none=True)
        if self.model.ordered_sums is not None:
            self.model.ordered_sums.forget()
        if self._draft is not None:
            self._draft.drop_gradients()

    @override
    def weights_here(self) -> dict[str, Tensor]:
        reshard(self.model)
        return dict(self.model.hf.named_parameters())

    def _gradients(self) -> dict[str, Tensor]:
        named = self.model.hf.named_parameters()
        return {f"{name}.grad": weight.grad for name, weight in named if weight.grad is not None}

    @override
    def advance_schedule(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()

    def learning_rate(self) -> float:
        """Return the learning rate of the first parameter group, or 0 without an optimizer."""
        return float(self.optimizer.param_groups[0]["lr"]) if self.optimizer is not None else 0.0

    @override
    def adapters(self) -> Iterable[LoraLinear]:
        return adapted_modules(self.model.hf).values()

    @override
    @torch.no_grad()
    def copied_weights(self, memory: HostMemory) -> dict[str, Tensor]:
        reshard(self.model)
        weights = checkpoint_io.weights_by_name(self.model.hf)
        return {name: memory.store(name, held_here(tensor)) for name, tensor in weights.items()}

    @override
    @torch.no_grad()
    def put_weights(self, copies: dict[str, Tensor]) -> None:
        reshard(self.model)
        for name, tensor in checkpoint_io.weights_by_name(self.model.hf).items():
            held_here(tensor).copy_(copies[name], non_blocking=True)

    @override
    def decoder_layers(self) -> dict[str, nn.Module]:
        names = {id(module): name for name, module in self.model.hf.named_modules()}
        return {names[id(layer)]: layer for layer in decoder_layers(self.model.hf)}

    def modules_here(self) -> dict[str, nn.Module]:
        """Return the modules of this rank, including modules outside the layers, such as embedding and last norm."""
        return {name: module for name, module in self.model.hf.named_modules() if name}

    @override
    def join_tokens(self, hidden_tD: Tensor) -> Tensor:
        return hidden_tD if self._context is None else self._context.join(hidden_tD.to(self.device)).cpu()

    def held_weights(self, dtype: torch.dtype | None = None) -> HeldWeights:
        """Yield the weights of this rank (`PolicyBackend.held_weights`).

        Args:
            dtype: type to which floating-point tensors are cast, except those that stay float32; None casts nothing.
        """
        reshard(self.model)
        hf, named = self.model.hf, checkpoint_io.weights_by_name(self.model.hf)
        adapted = {f"{name}.weight": module for name, module in adapted_modules(hf).items()}
        proves = self._lora.enabled and not self._adapters_unproven
        stays = stays_float32(hf, dtype)
        differ: set[str] = set()

        def value(name: str) -> Tensor:
            if name not in adapted:
                return self._outgoing(named[name], None if stays(name) else dtype)
            merged = self._outgoing(adapted[name].merged_weight(self.device), dtype)
            if proves and not differ:
                base = self._outgoing(adapted[name].weight.detach(), dtype)
                if not torch.equal(held_here(merged), held_here(base)):
                    differ.add(name)
            return merged

        def finish() -> None:
            if proves:
                require_on_some_rank(bool(differ), self.device, SECTION)

        own = held_weights(hf, value, dtype, self._results)
        drafts = () if self._draft is None else self._draft.held_weights(dtype, self.device)
        return ReadableWeights(chain(own, drafts), self.device, finish)

    def held_adapters(self, dtype: torch.dtype) -> HeldWeights:
        """Return the blocks of this rank of the adapters (`PolicyBackend.held_adapters`)."""
        reshard(self.model)
        return ReadableWeights(held_adapters(self.model.hf, dtype, self.device), self.device)

    def _outgoing(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        """Return a weight on this rank's device, in the receiver's dtype."""
        if tensor.device != self.device:
            tensor = tensor.to(self.device)
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    @override
    def move_optimizer_state(self, to_host: bool) -> None:
        if self._takes_turns and self.optimizer is not None:
            move_state(self.optimizer, self._resting, self.device, to_host=to_host)
        free_cache(self.device)

    @override
    def move_weights(self, to_host: bool) -> None:
        if self._takes_turns and to_host != self._weights_rest:
            reshard(self.model)
            move_weights(self.model, self._resting, self.device, to_host=to_host)
            self._weights_rest = to_host
        free_cache(self.device)

    def staged(self, name: str, tensor: Tensor) -> Tensor:
        """Copy the state for a background save (`TorchBackend.staged`). The next save reuses the memory."""
        return self._staged.store(name, tensor)

    @override
    def prepared(self, paths: CheckpointPaths, keep: Keep) -> Iterator[Write]:
        if self._lora.enabled:
            merged = merged_by_name(self.model.hf, self.device)
            yield checkpoint_io.prepare_weights(self.model.hf, paths.weights, merged, keep)
            yield adapter_io.save_adapter(self.model.hf, self._lora, self._model_name, paths.weights, keep)
        else:
            yield checkpoint_io.prepare_weights(self.model.hf, paths.weights, keep=keep)
        if self._draft is not None:
            yield from prepared_draft(self._draft.head, self._draft.optimizer, paths)
        if paths.optimizer is None:
            return
        yield training_state.prepare_training_state(
            self.model.hf, self.optimizer, self.scheduler, self._settings, paths.optimizer, keep
        )

    @override
    def load(self, paths: CheckpointPaths) -> None:
        reshard(self.model)
        if self._lora.enabled:
            adapter_io.load_adapter(self.model.hf, paths.weights, self.device)
        else:
            adapter_io.refuse_adapter(paths.weights)
            checkpoint_io.load_weights(self.model.hf, paths.weights)
        if self._draft is not None:
            load_draft(self._draft.head, self._draft.optimizer, paths)
        if paths.optimizer is not None and self.optimizer is not None and self.scheduler is not None:
            training_state.load_training_state(
                self.model.hf, self.optimizer, self.scheduler, self._settings, paths.optimizer
            )


class SlotBackend(DTensorBackend):
    """A frozen model whose linear layers compute with the adapters of `models.adapters`."""

    def __init__(
        self,
        config: PolicyConfig,
        device: torch.device,
        layout: ParallelLayout | None = None,
        *,
        init_optimizer: bool = False,
        init_reference_model: bool = False,
        seed: int = 0,
    ) -> None:
        assert not (init_optimizer or init_reference_model), "the base is frozen"
        super().__init__(
            config,
            device,
            layout,
            init_optimizer=False,
            init_reference_model=False,
            seed=seed,
            build=build_with_slots,
        )


def _draft_rows(inputs: ModelInputs) -> DraftRows:
    given = inputs.model_inputs
    positions = with_positions(inputs).model_inputs["position_ids"]
    return DraftRows(positions, inputs.positions_K, given.get("cu_seq_lens_q"), given.get("max_length_q"))


def _stores_compute_precision(device: torch.device) -> bool:
    """Return whether a frozen model is stored in its compute precision (GPUs), not in its loaded precision (CPUs)."""
    return device.type != "cpu"
