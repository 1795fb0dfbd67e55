"""Run Megatron Core's GPTModel as an `Engine`, on one rank or on several.

    worker 0: MegatronEngine ─► rows and draws ─┬─ own ModelPart, called directly
                                                └─ link ─► worker k: MegatronRank ─► its ModelPart

Every rank receives and verifies its own weights. Ranks count tensor parallelism first: rank = stage x tensor parallel
size + position within the stage.

A `ModelPart` computes the part of the model that one rank has, with its key-value cache.

    place 0    ┌─ stage 0: embedding, layers ─ hidden states ─► stage 1: layers, output head ─┐
    read() ───►┤  tensor-parallel ranks divide each layer and the vocabulary                  ├─► [b, V] logits
               └─ an engine of one rank has everything                                        ┘   on place 0

Without CUDA, `megatron.parallel` replaces the functions of `torch.cuda` that Megatron Core calls. The layers are always
Megatron Core's own, even if Transformer Engine is installed. A pass is one row of tokens of any requests, without
padding. Invariant: all ranks of an engine make the same calls in the same order.

Megatron Core assumes that the tokens of a row are at positions 0, 1, 2 ... In a pass of an engine, each sequence
continues at its own position, so `RotaryAtPositions` gives the rotary embeddings the positions of the tokens.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from operator import attrgetter
from typing import Any, override

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_rl.config import MegatronConfig
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.host.device import device_for
from nemo_rl.host.row_invariance import rows_are_alike
from nemo_rl.models.attention.cached_pass import CachedPass
from nemo_rl.models.generation.continuous import ContinuousEngine, TokenCache
from nemo_rl.models.generation.interfaces import EngineSettings
from nemo_rl.models.generation.ranks import (
    Link,
    Meeting,
    RankCall,
    ServedRank,
    call_all,
    ending_if_alone,
    meet,
    open_link,
    open_links,
)
from nemo_rl.models.huggingface.layers import recorded_outputs
from nemo_rl.models.huggingface.load import load_model_config, torch_dtype
from nemo_rl.models.huggingface.tensor_files import model_folder
from nemo_rl.models.megatron.parallel import start_model_parallel
from nemo_rl.models.training.tensor_checks import ANOTHER_COPY, not_finite, require_finite
from nemo_rl.models.training.torch_backend import HostMemory, move_weights
from nemo_rl.weight_sync.parts import BlocksByName, ReadRecorder


class RotaryAtPositions(nn.Module):
    """A rotary embedding of Megatron Core with angles at given positions instead of 0, 1, 2 ...

    Args:
        most_positions: Number of positions for which angles are computed.
    """

    def __init__(self, rotary: Any, most_positions: int) -> None:
        super().__init__()
        self._rotary, self._most_positions = rotary, most_positions
        self.positions = torch.empty(0, dtype=torch.int64)
        """`[T]` int64, positions of the tokens of the next pass."""

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        """Return the number of positions, independent of the input's length."""
        return self._most_positions

    def forward(self, seq_len: int, **kwargs: Any) -> Any:
        """Return `[T, 1, 1, D]` angles. For YaRN, return a tuple of the angles and their factor."""
        angles = self._rotary(seq_len)
        if isinstance(angles, tuple):
            return (angles[0].index_select(0, self.positions), *angles[1:])
        return angles.index_select(0, self.positions)


def use_positions(model: nn.Module, most_positions: int) -> list[RotaryAtPositions]:
    """Replace the rotary embeddings of a GPTModel, also in latent attention, and return the replacements."""
    replacements = []
    for holder in list(model.modules()):
        if isinstance(rotary := getattr(holder, "rotary_pos_emb", None), nn.Module):
            replacements.append(RotaryAtPositions(rotary, most_positions))
            holder.rotary_pos_emb = replacements[-1]
    return replacements


class ModelPart:
    """The layers of this rank. All ranks of the engine construct it together, because the call is collective.

    Args:
        settings: Settings of the engine. `engine_kwargs["megatron_cfg"]` is the section of the policy.
        meeting: The processes of the engine. None if there is only one.
    """

    def __init__(self, settings: EngineSettings, meeting: Meeting | None = None) -> None:
        self._device = device_for(uses_gpu=settings.device != "cpu").activate(meeting.local_place if meeting else 0)
        self._place = meeting.place if meeting else 0
        self._stage_size, self._num_stages = settings.tensor_parallel_size, settings.pipeline_parallel_size
        self._stage = self._place // self._stage_size
        hf_config = load_model_config(settings.model_name, settings.hf_overrides)
        self.vocab_size: int = hf_config.vocab_size
        """Number of token ids."""
        section = (settings.engine_kwargs.get("megatron_cfg") or MegatronConfig.build()).model_copy(
            update=_sizes(settings)
        )
        _start_groups(settings, section, self._device)
        # # These modules are imported here, because without CUDA they need the preparation above.
        from nemo_rl.models.megatron.conversion.importer import HubReceiver, load_huggingface
        from nemo_rl.models.megatron.model.build import build_chunks

        dtype = torch_dtype(settings.precision)
        chunks = build_chunks(hf_config, section, precision=dtype, device=self._device, trains=False)
        if settings.load_weights:
            load_huggingface(chunks, hf_config, model_folder(settings.model_name))
            require_finite(dict(chunks[0].named_parameters()), f"the model {settings.model_name}", ANOTHER_COPY)
        self.model: Any = chunks[0].eval()
        """The layers, as a GPTModel of Megatron Core."""
        self._receiver = HubReceiver(chunks, hf_config)
        self._recorder: ReadRecorder | None = None
        self._resting = HostMemory(pinned=self._device.type != "cpu")
        room = torch.tensor(_cache_bytes(settings, self._device) // _token_bytes(self.model), device=self._device)
        if settings.num_workers > 1:
            dist.all_reduce(room, dist.ReduceOp.MIN)
        self.cache = TokenCache(int(room), self._device)
        """Cache positions of the rows' tokens. All ranks have the same number of positions."""
        self._rotaries = use_positions(self.model, settings.max_model_len)

    @torch.inference_mode()
    def read(self, rows: Mapping[str, Sequence[int]]) -> Tensor | None:
        """Compute a pass (`ContinuousEngine.read`). Return `[b, V]` logits on place 0."""
        step = self.cache.read(rows)
        return self._at_place_0(self._call(step.token_ids, step.positions, step), len(rows))

    def _call(self, token_ids_T: Tensor, positions_T: Tensor, step: CachedPass | None = None) -> Tensor:
        """Compute this stage from the previous stage's hidden states, and send the result to the next stage.

        Returns:
            `[T, 1, D]` hidden states, or in the last stage `[b, V]` logits after the last token of each row.
        """
        for rotary in self._rotaries:
            rotary.positions = positions_T
        if self._stage:
            size = (len(token_ids_T), 1, self.model.config.hidden_size)
            hidden_T1D = torch.empty(size, dtype=self.model.config.pipeline_dtype, device=self._device)
            dist.recv(hidden_T1D, self._place - self._stage_size)
            self.model.set_input_tensor(hidden_T1D)
        last = positions_T[-1:] if step is None else step.last
        output: Tensor = self.model(
            token_ids_T[None], positions_T[None], step, output_processor=_after, output_processor_context=last
        )
        if self._stage < self._num_stages - 1:
            dist.send(output.contiguous(), self._place + self._stage_size)
        return output

    def _at_place_0(self, logits_bV: Tensor, num_rows: int) -> Tensor | None:
        """Return the logits on place 0. If the last stage is on other ranks, its first rank sends them."""
        source = (self._num_stages - 1) * self._stage_size
        if source == 0:
            return logits_bV if self._place == 0 else None
        if self._place == source:
            dist.send(logits_bV.contiguous(), 0)
        if self._place != 0:
            return None
        received = torch.empty(num_rows, self.vocab_size, dtype=self.model.config.pipeline_dtype, device=self._device)
        dist.recv(received, source)
        return received

    @torch.inference_mode()
    def layer_outputs(self, token_ids: list[int]) -> list[Tensor]:
        """Return a prompt's hidden states after each decoder layer of this stage."""
        with recorded_outputs(self.model.decoder.layers) as outputs:
            ids_T = torch.tensor(token_ids, device=self._device)
            self._call(ids_T, torch.arange(len(ids_T), device=self._device))
        return outputs

    def start_loading(self) -> None:
        """Prepare to receive every tensor of a weight update."""
        self._receiver.begin()

    def load_tensors(self, tensors: list[tuple[str, Tensor]]) -> None:
        """Load this rank's part of each tensor."""
        if self._recorder is not None:
            tensors = [(name, tensor.clone()) for name, tensor in tensors]  # each in its own storage
            self._recorder.watch(tensors)
        with self._recorder or nullcontext():
            for name, tensor in tensors:
                self._receiver.take(name, tensor)

    def not_loaded(self) -> list[str]:
        """Return hub names of tensors that this rank needs but has not received."""
        return self._receiver.unbound()

    def record_reads(self) -> None:
        """Record the reads of the next weight update (`RecordsReads.record_reads`)."""
        self._recorder = ReadRecorder()

    def take_reads(self) -> BlocksByName:
        """Return the parts of sent tensors that were read, and stop recording (`RecordsReads.take_reads`)."""
        assert self._recorder is not None, "record_reads comes first"
        recorder, self._recorder = self._recorder, None
        return recorder.reads

    def weights_not_finite(self) -> list[str]:
        """Return the names of the weights that hold NaN or infinity."""
        return not_finite(dict(self.model.named_parameters()))

    def sleep(self) -> None:
        """Move the weights of a GPU to the host, and free the cache if no row runs."""
        self.cache.release()
        if self._device.type != "cpu":
            move_weights(self.model, self._resting, self._device, to_host=True)
        device_for(uses_gpu=self._device.type != "cpu").empty_cache()

    def wake_up(self) -> None:
        """Move the weights back."""
        if self._device.type != "cpu":
            move_weights(self.model, self._resting, self._device, to_host=False)


def _sizes(settings: EngineSettings) -> dict[str, Any]:
    """Return the fields of `megatron_cfg` that differ between engine and policy."""
    return {
        "tensor_model_parallel_size": settings.tensor_parallel_size,
        "sequence_parallel": False,
        "pipeline_model_parallel_size": settings.pipeline_parallel_size,
        "virtual_pipeline_model_parallel_size": None,
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "context_parallel_size": 1,
        "expert_model_parallel_size": settings.expert_parallel_size,
        "expert_tensor_parallel_size": 1 if settings.expert_parallel_size > 1 else settings.tensor_parallel_size,
        "transformer_impl": "local",
    }


def _start_groups(settings: EngineSettings, section: MegatronConfig, device: torch.device) -> None:
    """Start Megatron Core's groups. If there is no default group yet, start one for this process."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    elif settings.num_workers == 1:
        return  # another engine of this process started them
    layout = ParallelLayout(
        pp=settings.pipeline_parallel_size, tp=settings.tensor_parallel_size, ep=settings.expert_parallel_size
    )
    start_model_parallel(layout, section, device, settings.seed)


def _after(
    *, hidden_states: Tensor, output_layer: nn.Module, output_weight: Tensor | None, context: Tensor, **ignored: Any
) -> Tensor:
    """Compute `[b, V]` logits on every rank, after the tokens at indices `context` of `hidden_states` `[T, 1, D]`."""
    logits_b1V, _ = output_layer(hidden_states[context], weight=output_weight, runtime_gather_output=True)
    logits_bV: Tensor = logits_b1V[:, 0]
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
    """Return the configured cache size, or the part of the engine's share of the GPU that weights do not use."""
    if settings.kv_cache_bytes is not None:
        return settings.kv_cache_bytes
    _, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * settings.gpu_memory_utilization) - torch.cuda.memory_allocated(device))


_LINKS = "ranks"


class _HoldsPart:
    """Methods of `Engine` that each worker implements for its part of the model."""

    _part: ModelPart

    async def load_tensors(self, tensors: list[tuple[str, Tensor]]) -> None:
        """Load this rank's part of each tensor (`Engine.load_tensors`)."""
        self._part.load_tensors(tensors)

    def record_reads(self) -> None:
        """Record the reads of the next weight update (`RecordsReads.record_reads`)."""
        self._part.record_reads()

    def take_reads(self) -> BlocksByName:
        """Return the parts of sent tensors that were read, and stop recording (`RecordsReads.take_reads`)."""
        return self._part.take_reads()

    async def sleep(self) -> None:
        """Free memory until `wake_up` (`Engine.sleep`)."""
        self._part.sleep()

    async def wake_up(self) -> None:
        """Allocate memory again (`Engine.wake_up`)."""
        self._part.wake_up()


class MegatronEngine(_HoldsPart, ContinuousEngine):
    """Megatron Core's engine. `engine_kwargs["megatron_cfg"]` is the policy's section."""

    def __init__(self, settings: EngineSettings) -> None:
        self._links: list[Link] = []
        if settings.num_workers == 1:
            self._part = ModelPart(settings)
        else:
            meeting = meet(settings)
            self._links = open_links(meeting, _LINKS, range(1, settings.num_workers))
            self._part = ModelPart(settings, meeting)
            for link in self._links:
                link.receive()
        self._model = self._part.model
        self.batch_invariant = rows_are_alike()
        """Whether answers do not depend on other requests (`Engine`)."""
        self._leads_stage = [rank % settings.tensor_parallel_size == 0 for rank in range(1, settings.num_workers)]
        super().__init__(settings, self._part.vocab_size, self._part.cache)

    @override
    def read(self, rows: Mapping[str, Sequence[int]]) -> Tensor:
        logits_bV: Tensor = self._on_all("read", rows)[0]
        return logits_bV

    @override
    def enter(self, row: str, token_ids: Sequence[int], adapter: str | None = None) -> None:
        self._on_all("cache.enter", row, token_ids, adapter)

    @override
    def leave(self, rows: Sequence[str]) -> None:
        self._on_all("cache.leave", rows)

    @override
    def clear(self) -> None:
        self._on_all("cache.clear")

    def _on_all(self, method: str, *args: Any, answering: Sequence[bool] = ()) -> list[Any]:
        """Call a method of each part, or "cache.x". Return the answers of this rank and of the ranks in `answering`."""
        wanted = answering or [False] * len(self._links)
        answers = call_all(self._links, RankCall(method, args, {}, wants_answer=False), wanted)
        with ending_if_alone(self._links):
            own = attrgetter(method)(self._part)(*args)
        return [own, *(answer.result() for answer in answers if answer is not None)]

    @override
    def start_loading(self) -> None:
        self._part.start_loading()

    def put_in_force(self) -> list[str]:
        """Activate the weights, and return hub names of tensors that were not sent to this rank."""
        return self._part.not_loaded()

    @override
    async def layer_outputs(self, token_ids: list[int]) -> list[Tensor]:
        return list(chain.from_iterable(self._on_all("layer_outputs", token_ids, answering=self._leads_stage)))


class MegatronRank(_HoldsPart, ServedRank):
    """Workers 1, 2 ... of an engine. They execute the calls of worker 0 and load weights themselves."""

    def __init__(self, settings: EngineSettings) -> None:
        meeting = meet(settings)
        link = open_link(meeting, _LINKS, 0)
        self._part = ModelPart(settings, meeting)
        self.serve(link, self._execute)

    def _execute(self, call: RankCall) -> Any:
        value = attrgetter(str(call.method))(self._part)(*call.args)
        return value if call.wants_answer else None

    @override
    async def begin_weight_update(self) -> None:
        self._part.start_loading()

    async def finish_weight_update(self, version: int) -> list[str]:
        """Activate the weights, and return hub names of tensors that were not sent to this rank."""
        return self._part.not_loaded()

    def weights_not_finite(self) -> list[str]:
        """Return the names of this rank's weights that hold NaN or infinity."""
        return self._part.weights_not_finite()
