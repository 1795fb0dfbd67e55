"""Predict the memory of a rank that trains, from a trace of the model on the meta device.

`trace_model` counts a model's parameters and the tensors that autograd saves in a forward pass. The model is built and
run on torch's meta device, where tensors have shapes and no memory. The numbers therefore come from the code of the
architecture. Attention and experts are replaced by functions that save the same tensors as the kernels: attention saves
its three inputs and its output, experts save the intermediate values of each routed token. Invariant: byte counts are
those of one rank without parallelism.

`RankMemory` predicts the memory of one rank of each pipeline stage, and takes the largest. The `mesh_check` of each
training backend has a subclass that divides the counts by the axes of its mesh, and knows the moments of a step.
"""

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from math import ceil
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)
from transformers.initialization import no_init_weights
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.distributed.parallel_logprobs import default_chunk_size
from nemo_rl.models.capacity.memory import WIDE, MemoryPlan, Work
from nemo_rl.models.draft.choice import shape_of
from nemo_rl.models.huggingface.layers import body, decoder_layers
from nemo_rl.models.huggingface.load import auto_class, torch_dtype

logger = logging.getLogger(__name__)

GRADIENT_OF_LOGITS = 3
"""Number of tensors as large as a chunk of logits that its gradient needs: logits, probabilities, gradient."""

_ATTENTION = "nemo_rl_traced"
_MASK_OF_STATES = "create_recurrent_attention_mask"
_NOT_TRACED = (RuntimeError, TypeError, AttributeError, KeyError, IndexError, ValueError)
"""Errors of architectures whose code reads values of tensors or does not call the attention function."""


@dataclass
class Parameters:
    """Numbers of elements in the parameters of a part of a model."""

    matrices: int = 0
    """Number of elements in linear layers, embeddings and heads."""
    vectors: int = 0
    """Number of elements in norms and biases."""
    experts: int = 0
    """Number of elements in routed experts."""
    largest: int = 0
    """Number of elements in the largest tensor."""

    @property
    def total(self) -> int:
        """Number of all elements."""
        return self.matrices + self.vectors + self.experts

    def add(self, parameter: Tensor) -> None:
        """Add the elements of a tensor. A tensor with three dimensions contains the experts of a layer."""
        kind = {1: "vectors", 3: "experts"}.get(parameter.dim(), "matrices")
        setattr(self, kind, getattr(self, kind) + parameter.numel())
        self.largest = max(self.largest, parameter.numel())


@dataclass
class Activations:
    """Bytes that a layer stores for its backward pass."""

    entry: int = 0
    """Bytes of the layer's input."""
    outside: int = 0
    """Bytes saved outside the layer's blocks (attention, feed-forward), including the layer's input."""
    into_blocks: int = 0
    """Bytes of the blocks' inputs."""
    inside: int = 0
    """Bytes saved inside the blocks, without keys and values."""
    keys_values: int = 0
    """Bytes of attention's keys and values."""
    kept: int = 0
    """Bytes of the outputs of matrix products and attention that selective checkpointing keeps."""


@dataclass
class ModelTrace:
    """Counts of the parameters and saved tensors of a model."""

    layers: list[Parameters]
    """Parameters of each decoder layer."""
    embedding: Parameters
    """Parameters of the token embedding."""
    last: Parameters
    """All other parameters outside the layers: final norm and head."""
    tied: bool
    """Whether the embedding is also the head. If so, both `embedding` and `last` include it."""
    activations: list[Activations]
    """Activations of each decoder layer; empty if the model cannot run on the meta device."""
    others: int
    """Bytes saved outside the layers."""
    hidden: int
    """Number of elements of a token's hidden state."""
    vocabulary: int
    """Number of rows of the head; 1 for a scalar head."""
    linears: int
    """Sum of the input and output sizes of all linear layers in decoder layers, to which adapters can be added."""


_TRACES: dict[Any, ModelTrace] = {}
"""Cache of traces by the arguments of `trace_model`, because models of one run often have the same trace."""


def trace_model(
    config: PretrainedConfig,
    tokens: int,
    dtype: torch.dtype,
    *,
    scores: bool = False,
    kept_operators: Collection[str] = (),
) -> ModelTrace:
    """Count the parameters and saved tensors of a model.

    Args:
        tokens: number of tokens of a microbatch.
        scores: whether the model has a scalar head.
        kept_operators: names of the operators whose outputs selective checkpointing keeps, for `Activations.kept`.
    """
    key = (config.to_json_string(use_diff=False), tokens, dtype, scores, frozenset(kept_operators))
    if key not in _TRACES:
        _TRACES[key] = _trace(config, tokens, dtype, scores, kept_operators)
    return _TRACES[key]


def _trace(
    config: PretrainedConfig, tokens: int, dtype: torch.dtype, scores: bool, kept_operators: Collection[str]
) -> ModelTrace:
    AttentionInterface.register(_ATTENTION, _attention)
    AttentionMaskInterface.register(_ATTENTION, lambda *args, **kwargs: None)
    kind = AutoModelForSequenceClassification if scores else auto_class(config)
    with torch.device("meta"), no_init_weights():
        try:
            hf = kind.from_config(deepcopy(config), dtype=dtype, attn_implementation=_ATTENTION).train()
        except (ValueError, KeyError):  # the architecture does not use the attention function
            hf = kind.from_config(deepcopy(config), dtype=dtype).train()
        hf.tie_weights()  # the model was not initialised, so weights are not tied yet
        layers = decoder_layers(hf)
        recorder = Recorder(hf, layers, kept_operators)
        try:
            _run(hf, recorder, tokens)
        except _NOT_TRACED as error:
            logger.info("%s does not run without data (%s).", type(hf).__name__, str(error).split("\n")[0])
            recorder.of_layer.clear()
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    table, head = hf.get_input_embeddings().weight, hf.get_output_embeddings()
    root = [parameter for parameter in hf.parameters() if id(parameter) not in inside and parameter is not table]
    tied = head is not None and head.weight is table
    linears = [part for layer in layers for part in layer.modules() if isinstance(part, nn.Linear)]
    return ModelTrace(
        layers=[_count(layer.parameters()) for layer in layers],
        embedding=_count([table]),
        last=_count([*root, table] if tied else root),
        tied=tied,
        activations=recorder.all_layers(),
        others=recorder.others,
        hidden=table.shape[-1],
        vocabulary=1 if scores or head is None else head.weight.shape[0],
        linears=sum(part.in_features + part.out_features for part in linears),
    )


def _run(hf: PreTrainedModel, recorder: "Recorder", tokens: int) -> None:
    _stand_in_for_experts(hf)
    with recorder.recording(), _without_masks_of_states(hf):
        ids = torch.zeros(1, tokens, dtype=torch.long)
        # # Without a mask, transformers would read values to find packed sequences in rows.
        body(hf)(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)


@contextmanager
def _without_masks_of_states(hf: PreTrainedModel) -> Iterator[None]:
    """Run a block in which recurrent layers get no mask, because transformers would read its values."""
    names = vars(sys.modules[type(hf).__module__])
    before = names.get(_MASK_OF_STATES)
    if before is not None:
        names[_MASK_OF_STATES] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        if before is not None:
            names[_MASK_OF_STATES] = before


def _count(parameters: Iterable[nn.Parameter]) -> Parameters:
    counted = Parameters()
    for parameter in parameters:
        counted.add(parameter)
    return counted


class Recorder:
    """Count the tensors that autograd saves, by layer and part of the layer. Of equal layers, only one is run."""

    def __init__(self, hf: PreTrainedModel, layers: Sequence[nn.Module], kept_operators: Collection[str] = ()) -> None:
        self.of_layer: dict[int, Activations] = {}
        self.others = 0
        self.kept_operators = kept_operators
        kinds = [(type(layer), *(parameter.shape for parameter in layer.parameters())) for layer in layers]
        self._first = [kinds.index(kind) for kind in kinds]
        self._layers = layers
        self._seen = {parameter.untyped_storage()._cdata for parameter in hf.parameters()}
        self._keys: set[int] = set()
        self._alive: list[Any] = []
        self._layer: int | None = None
        self._block_inputs: set[int] | None = None

    def all_layers(self) -> list[Activations]:
        """Return the activations of each layer. The list is empty if nothing was recorded."""
        return [self.of_layer[index] for index in self._first] if self.of_layer else []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Run a block and count its saved tensors. The model cannot be used afterwards."""
        outputs: dict[int, Any] = {}
        for index, (layer, first) in enumerate(zip(self._layers, self._first, strict=True)):
            if index != first:
                layer.forward = lambda *args, kind=first, **kwargs: outputs[kind]
                continue
            layer.register_forward_pre_hook(self._enter_layer(index), with_kwargs=True)
            layer.register_forward_hook(self._leave_layer(index, outputs))
            for block in layer.children():
                if any(parameter.dim() > 1 for parameter in block.parameters()):
                    block.register_forward_pre_hook(self._enter_block, with_kwargs=True)
                    block.register_forward_hook(self._leave_block)
        _recorders.append(self)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._saved, lambda tensor: tensor), _Products(self):
                yield
        finally:
            _recorders.remove(self)

    def product(self, output: Any) -> None:
        """Count an operator's output that selective checkpointing keeps."""
        if self._layer is not None:
            tensor = output[0] if isinstance(output, tuple) else output
            self.of_layer[self._layer].kept += tensor.untyped_storage().nbytes()

    def attends(self, key: Tensor, value: Tensor) -> None:
        """Mark keys and values, which are counted separately because context-parallel ranks gather them."""
        self._keys |= {tensor.untyped_storage()._cdata for tensor in (key, value)}

    def _enter_layer(self, index: int) -> Any:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._layer = index
            hidden = args[0] if args else kwargs["hidden_states"]
            self.of_layer[index] = Activations(entry=hidden.untyped_storage().nbytes())

        return enter

    def _leave_layer(self, index: int, outputs: dict[int, Any]) -> Any:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._layer, outputs[index] = None, output

        return leave

    def _enter_block(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        self._block_inputs = {tensor.untyped_storage()._cdata for tensor in given}

    def _leave_block(self, module: nn.Module, args: Any, output: Any) -> None:
        self._block_inputs = None

    def _saved(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata in self._seen:
            return tensor
        self._seen.add(storage._cdata)
        self._alive.append(storage)
        if self._layer is None:
            self.others += storage.nbytes()
            return tensor
        kind = "outside"
        if self._block_inputs is not None:
            kind = "into_blocks" if storage._cdata in self._block_inputs else "inside"
            kind = "keys_values" if storage._cdata in self._keys else kind
        counted = self.of_layer[self._layer]
        setattr(counted, kind, getattr(counted, kind) + storage.nbytes())
        return tensor


_recorders: list[Recorder] = []
"""Stack of active recorders. The attention function, which transformers calls, uses the last one."""


class _Products(TorchDispatchMode):
    """Pass the outputs that selective checkpointing keeps to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.name() in self._recorder.kept_operators:
            self._recorder.product(output)
        return output


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Return an output `[b, T, H, D_v]`, and save the tensors that an attention kernel saves for the backward pass."""
    recorder = _recorders[-1]
    recorder.attends(key, value)
    output: Tensor = _KeptByAttention.apply(query, key, value)
    recorder.product(output)
    return output, None


class _KeptByAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, heads, length, _ = query.shape
        output = query.new_empty(rows, length, heads, value.shape[-1])
        ctx.save_for_backward(query, key, value, output, query.new_empty(rows, heads, length, dtype=torch.float32))
        return output


class _KeptByExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        rows, width, inner = weights.numel(), hidden.shape[-1], down.numel() // down.shape[0] // hidden.shape[-1]
        both = gate_up.numel() // gate_up.shape[0] // width
        kept = [hidden.new_empty(rows, size) for size in (width, both, inner, inner, width)]
        ctx.save_for_backward(*kept)
        return torch.empty_like(hidden)


def _stand_in_for_experts(hf: PreTrainedModel) -> None:
    """Replace the forward of modules with all experts of a layer, because routing reads values."""

    def forward(module: Any, hidden: Tensor, indices: Tensor, weights: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = _KeptByExperts.apply(hidden, weights, module.gate_up_proj, module.down_proj)
        return result

    for module in hf.modules():
        if isinstance(stacked := getattr(module, "gate_up_proj", None), nn.Parameter) and stacked.dim() == 3:
            module.forward = MethodType(forward, module)


@dataclass(frozen=True)
class Images:
    """Memory of the images of a microbatch, and the size of frozen parts."""

    kept: float = 0.0
    """Bytes of the images of a microbatch that are kept for the backward pass."""
    block: float = 0.0
    """Bytes of the intermediate values of the largest block."""
    frozen: int = 0
    """Number of elements of the model's parameters that are not trained."""


NO_IMAGES = Images()


@dataclass(frozen=True)
class RankMemory(ABC):
    """Memory of one rank of a pipeline stage."""

    kept_operators: ClassVar[Collection[str]] = ()
    """Names of the operators whose outputs selective checkpointing keeps."""

    policy: PolicyConfig
    """Section of the model."""
    layout: ParallelLayout
    """Sizes of the mesh axes."""
    model: PretrainedConfig
    """Configuration of the model's text part."""
    trace: ModelTrace
    """Counts of the model."""
    work: Work
    """Work of the rank."""
    tokens: int
    """Number of tokens of a microbatch on this rank."""
    itemsize: int
    """Bytes of a number in `policy.precision`."""
    stage: int
    """Index of the pipeline stage."""
    images: Images = NO_IMAGES
    """Memory of the images of a microbatch, and the size of frozen parts."""

    @classmethod
    def predict(cls, policy: PolicyConfig, layout: ParallelLayout, model: PretrainedConfig, work: Work) -> MemoryPlan:
        """Return the memory plan of the rank that needs the most memory, from the model's whole configuration."""
        tokens, dtype = ceil(work.tokens / layout.cp), torch_dtype(policy.precision)
        scores = policy.reward_model_cfg.enabled
        trace = trace_model(model, tokens, dtype, scores=scores, kept_operators=cls.kept_operators)
        text, images = model.get_text_config(), cls.images_of(policy, model, tokens)
        stages = range(layout.pp)
        ranks = (cls(policy, layout, text, trace, work, tokens, dtype.itemsize, stage, images) for stage in stages)
        return max((rank.plan() for rank in ranks), key=lambda plan: plan.peak)

    @classmethod
    def images_of(cls, policy: PolicyConfig, model: PretrainedConfig, tokens: int) -> Images:
        """Return the memory of the images of a microbatch, and the size of frozen parts."""
        return NO_IMAGES

    @abstractmethod
    def plan(self) -> MemoryPlan:
        """Return the memory at all moments of a step."""

    @property
    def has_head(self) -> bool:
        """True if the rank's stage is the last one."""
        return self.stage == self.layout.pp - 1

    @property
    def outside(self) -> list[Parameters]:
        """Parameters outside the layers of this stage: embedding in the first stage, norm and head in the last."""
        first, last, trace = self.stage == 0, self.has_head, self.trace
        if last and not (first and trace.tied):
            return [trace.embedding, trace.last] if first else [trace.last]
        return [trace.last] if last else [trace.embedding] * first

    @property
    def largest(self) -> float:
        """Number of elements of the largest tensor on one tensor-parallel rank."""
        parts = (self.trace.embedding, self.trace.last, *self.trace.layers)
        return max(parameters.largest for parameters in parts) / self.layout.tp

    @property
    def head(self) -> float:
        """Bytes of this rank's part of the head in float32, or 0 without a head."""
        return self.has_head * self.trace.vocabulary * self.trace.hidden / self.layout.tp * WIDE

    def logits(self, tensors: int) -> float:
        """Return the bytes of `tensors` tensors, each as large as one chunk of float32 logits."""
        chunk = self.policy.logprob_chunk_size or default_chunk_size(on_gpu=not self.work.on_cpu)
        return self.has_head * tensors * min(self.tokens, chunk) * self.trace.vocabulary * WIDE / self.layout.tp

    def draft_model(self, shards: int) -> dict[str, float]:
        """Return the bytes of a trained draft model's weights, gradients and two moments in float32, or 0.

        Args:
            shards: number of ranks that divide the tensors.
        """
        if not (self.policy.draft.enabled and self.work.trains):
            return {}
        return {"draft model": shape_of(self.policy).num_parameters * 4 * WIDE / shards}

    def scalar_head(self) -> float:
        """Return the bytes that the backward pass of a critic's scalar head needs, or 0 for other heads.

        The head stores float32 copies of the hidden states of all tokens and of their gradient. The copies of a reward
        model, which scores only the last token of each row, are too small to count.
        """
        of_tokens = self.has_head and self.trace.vocabulary == 1 and not self.work.scores_rows
        return of_tokens * 2 * self.tokens * self.trace.hidden * WIDE
