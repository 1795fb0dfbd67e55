"""Run Megatron Core's GPTModel as an `Engine`, with its static key-value cache.

One process has one device and one model: its process group has one rank, and without CUDA `megatron.cpu_shim` replaces
it. Layers are the portable ones, even if Transformer Engine is installed. Rows of different lengths are left-padded in
the cache, which has one write position for all of them, and each row's attention begins at its own first token. Rotary
embeddings depend on distances only, so a row's position in the batch has no effect.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_rl.config import MegatronConfig
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.host.device import device_for
from nemo_rl.models.attention import AttentionPlan, Piece
from nemo_rl.models.generation.batched import BatchedEngine
from nemo_rl.models.generation.interfaces import EngineSettings
from nemo_rl.models.huggingface.layers import recorded_outputs
from nemo_rl.models.huggingface.load import load_model_config, torch_dtype
from nemo_rl.models.huggingface.tensor_files import model_folder
from nemo_rl.models.megatron.parallel import start_model_parallel
from nemo_rl.models.training.finite import ANOTHER_COPY, require_finite

_ON_ONE_RANK: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "sequence_parallel": False,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "transformer_impl": "local",
}


class MegatronEngine(BatchedEngine):
    """One model; `engine_kwargs["megatron_cfg"]` has the settings with which the policy computes it."""

    def __init__(self, settings: EngineSettings) -> None:
        self._device = torch.device(settings.device)
        hf_config = load_model_config(settings.model_name, settings.hf_overrides)
        section = settings.engine_kwargs.get("megatron_cfg") or MegatronConfig.build()
        section = section.model_copy(update=_ON_ONE_RANK)
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            start_model_parallel(ParallelLayout(), section, self._device, settings.seed)
        # Imported only now: without CUDA these modules need the preparation above.
        from nemo_rl.models.megatron.build import build_chunks
        from nemo_rl.models.megatron.conversion.importer import load_huggingface
        from nemo_rl.models.megatron.conversion.receiver import HubReceiver

        dtype = torch_dtype(settings.precision)
        chunks = build_chunks(hf_config, section, precision=dtype, device=self._device)
        if settings.load_weights:
            load_huggingface(chunks, hf_config, model_folder(settings.model_name))
            require_finite(dict(chunks[0].named_parameters()), f"the model {settings.model_name}", ANOTHER_COPY)
        self._model = chunks[0].eval()
        self._receiver = HubReceiver(chunks, hf_config)
        room = _cache_bytes(settings, self._device) // _token_bytes(self._model)
        super().__init__(settings, hf_config.vocab_size, room)
        self._cache: Any = None
        self._starts: list[int] = []

    def read(self, rows: list[list[int]], most_new: int) -> Tensor:
        """See `BatchedEngine.read`; the last new token is never read."""
        from megatron.core.inference.contexts import StaticInferenceContext

        width = max(len(row) for row in rows)
        self._starts = [width - len(row) for row in rows]
        self._cache = None  # frees its memory before the next one is allocated
        self._cache = StaticInferenceContext(len(rows), width + most_new)
        ids_bt = torch.tensor([[0] * start + row for start, row in zip(self._starts, rows, strict=True)])
        return self._logits(ids_bt)

    def advance(self, token_ids: list[int]) -> Tensor:
        """See `BatchedEngine.advance`."""
        return self._logits(torch.tensor(token_ids)[:, None])

    def _logits(self, ids_bt: Tensor) -> Tensor:
        before, new = self._cache.sequence_len_offset, ids_bt.shape[1]
        plan = left_padded(self._starts, before, new)
        logits_bV: Tensor = self._call(ids_bt, plan, before, inference_context=self._cache, output_processor=_last)
        self._cache.sequence_len_offset += new
        return logits_bV

    def _call(self, ids_bt: Tensor, plan: AttentionPlan | None, first: int = 0, **arguments: Any) -> Any:
        positions = torch.arange(first, first + ids_bt.shape[1]).expand(ids_bt.shape)
        return self._model(ids_bt.to(self._device), positions.to(self._device), plan, **arguments)

    def forget(self) -> None:
        """See `BatchedEngine.forget`."""
        self._cache = None

    def start_loading(self) -> None:
        """See `SteppedEngine.start_loading`."""
        self._receiver.begin()

    async def load_tensors(self, tensors: list[tuple[str, Tensor]]) -> None:
        """See `Engine.load_tensors`."""
        for name, tensor in tensors:
            self._receiver.take(name, tensor)

    def put_in_force(self) -> list[str]:
        """See `BatchedEngine.put_in_force`; returns hub names of the tensors that were not sent."""
        return self._receiver.unbound()

    @torch.inference_mode()
    async def layer_outputs(self, token_ids: list[int]) -> list[Tensor]:
        """See `Engine.layer_outputs`."""
        with recorded_outputs(self._model.decoder.layers) as outputs:
            self._call(torch.tensor([token_ids]), None, output_processor=_last)
        return outputs

    async def sleep(self) -> None:
        """See `Engine.sleep`."""
        self._model.to("cpu")
        device_for(uses_gpu=self._device.type != "cpu").empty_cache()

    async def wake_up(self) -> None:
        """See `Engine.wake_up`."""
        self._model.to(self._device)


def left_padded(starts: list[int], cached: int, new: int) -> AttentionPlan:
    """Plan the attention of rows that end in the same column, laid end to end.

    Args:
        starts: column where each row begins; padding before it attends to padding.
        cached: number of columns that were read before.
        new: number of columns that are read now.
    """
    width = cached + new
    pieces = []
    for row, start in enumerate(starts):
        query, key = row * new, row * width
        if start > cached:
            pieces.append(Piece(query, query + start - cached, key, key + start - cached))
        first = max(start - cached, 0)
        pieces.append(Piece(query + first, query + new, key + start, key + width))
    return AttentionPlan(pieces)


def _last(*, hidden_states: Tensor, output_layer: nn.Module, output_weight: Tensor | None, **ignored: Any) -> Tensor:
    """Compute `[b, V]` logits after the last column of `hidden_states` `[t, b, D]`."""
    logits_1bV, _ = output_layer(hidden_states[-1:], weight=output_weight)
    logits_bV: Tensor = logits_1bV[0]
    return logits_bV


def _token_bytes(model: Any) -> int:
    """Count the bytes of the keys and values of one token."""
    layers = [layer.self_attention for layer in model.decoder.layers]
    widths = [
        attention.num_query_groups_per_partition * (attention.key_hidden_size + attention.val_hidden_size)
        for attention in layers
    ]
    size: int = sum(widths) * model.config.params_dtype.itemsize
    return size


def _cache_bytes(settings: EngineSettings, device: torch.device) -> int:
    """Return the configured cache size, or the part of the engine's share of a GPU that the weights leave."""
    if settings.kv_cache_bytes is not None:
        return settings.kv_cache_bytes
    _, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * settings.gpu_memory_utilization) - torch.cuda.memory_allocated(device))
