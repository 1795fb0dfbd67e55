"""Cut a model into pipeline stages, run a stage's part, and collect values over all stages.

The forward of the Hugging Face model's body still computes masks, positions and keyword arguments. It runs over a list
in which modules that return their input replace the layers of other chunks. Layers thus keep their index in the list,
which forwards use to index `config.layer_types`. Hidden states from another stage replace the input of the first layer
in the list, and the output of the last layer is sent to the next stage. Therefore operations before the layers (an
embedding multiplier, a norm, dropout) affect only the first chunk, and operations after the layers (a final norm)
affect only the last chunk.

Invariant: parameters keep the names they have in the whole model, and the chunks, run in order, compute the same bits
as the whole model; `require_divisible` compares the two before any module is removed.

Functions that collect weights, shared gradients and other values are collective over the stages, and do nothing for a
whole model. Invariant: `of_all_stages` yields the same names and values in the same order on all stages, and holds one
group of tensors of another stage at a time.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import P2POp, batch_isend_irecv
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.distributed.ranks.placements import held_here
from nemo_rl.models.dtensor.mesh import Meshes
from nemo_rl.models.dtensor.pipeline.stand_ins import (
    PassThrough,
    Through,
    hidden_states_of_whole,
    keep_stand_ins,
    outputs_of_layers,
    stand_ins,
)
from nemo_rl.models.huggingface.layers import body, decoder_layers, hidden_states, parts_without_text
from nemo_rl.utils.errors import ConfigError
from nemo_rl.weight_sync.buckets import group_by_size

_ATTRIBUTE, _ENDS = "pipeline_stage", "_pipeline_ends"


@dataclass(frozen=True)
class Place:
    """Position of a rank in the pipeline."""

    number: int
    """Number of the rank's stage. Stage 0 has the embedding, and the last stage has final norm and head."""
    size: int
    """Number of stages."""
    chunks: tuple[range, ...]
    """Layers of every chunk, in the order of a forward pass. Chunk c belongs to stage c % size."""
    group: dist.ProcessGroup | None = None
    """The ranks that hold the stages of one model copy, first stage first. None in a test with one process."""
    device: torch.device = torch.device("cpu")
    """Device on which the rank computes."""

    @property
    def is_first(self) -> bool:
        """True for the stage that holds the embedding."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """True for the stage that holds final norm and head."""
        return self.number == self.size - 1

    @property
    def layers(self) -> list[int]:
        """Numbers of the layers that the stage holds."""
        return [layer for chunk in self.chunks[self.number :: self.size] for layer in chunk]


@dataclass(frozen=True)
class PipelineStage:
    """The part of a model that remains after `cut`."""

    place: Place
    """Position of this rank."""
    renamed: dict[str, str]
    """Weights whose name in checkpoints differs from their name in this stage, because another stage also holds them:
    `{name in this stage: name in checkpoints}`."""
    shared: frozenset[str]
    """Checkpoint names of the parameters that the first and the last stage both hold."""
    copies: frozenset[str]
    """Checkpoint names of all weights of this stage that an earlier stage also holds."""
    elsewhere: frozenset[str]
    """Checkpoint names of the weights that only other stages hold."""

    def known_as(self, name: str) -> str:
        """Return the name that checkpoints use for a weight of this stage."""
        return self.renamed.get(name, name)

    def sum(self, number: Tensor) -> Tensor:
        """Return the sum of a number over all stages, on every rank."""
        total = number.to(self.place.device)
        dist.all_reduce(total, group=self.place.group)
        return total


def stage_of(hf: nn.Module) -> PipelineStage | None:
    """Return the stage that `cut` made from this model, or None for a whole model."""
    return getattr(hf, _ATTRIBUTE, None)


def layers_of_chunks(num_layers: int, num_stages: int, chunks_per_stage: int) -> tuple[range, ...]:
    """Divide the layers as evenly as possible. The first chunks get remaining layers, because the last has the head.

    Raises:
        ConfigError: there are fewer layers than chunks.
    """
    num_chunks = num_stages * chunks_per_stage
    if num_layers < num_chunks:
        nearest = num_layers // chunks_per_stage
        raise ConfigError(
            f"policy.dtensor_cfg.pipeline_parallel_size={num_stages} x virtual_pipeline_size={chunks_per_stage} = "
            f"{num_chunks} chunks of layers, but the model has {num_layers} layers. Use "
            + (f"pipeline_parallel_size={nearest}." if nearest else "a smaller virtual_pipeline_size.")
        )
    size, more = divmod(num_layers, num_chunks)
    starts = [chunk * size + min(chunk, more) for chunk in range(num_chunks + 1)]
    return tuple(range(*bounds) for bounds in zip(starts, starts[1:], strict=False))


def keep_stage(hf: PreTrainedModel, meshes: Meshes, chunks_per_stage: int, device: torch.device) -> PipelineStage:
    """Reduce a model in place to the part of this rank's stage. `try_division` must have succeeded before.

    Raises:
        ConfigError: the model cannot be divided into these chunks.
    """
    size = meshes.layout.pp
    chunks = layers_of_chunks(len(decoder_layers(hf)), size, chunks_per_stage)
    return cut(hf, Place(meshes.pp.get_local_rank(), size, chunks, meshes.pp.get_group(), device))


def try_division(probe_model: PreTrainedModel) -> int | None:
    """Test on a small model that its architecture can be divided before every layer. The model is not divided.

    The first chunk has no layer, so that a division before the first layer is also tested.

    Returns:
        The result of `outputs_of_layers` for this architecture.

    Raises:
        ConfigError: the model cannot be divided.
    """
    number = len(decoder_layers(probe_model))
    chunks = (range(0), *(range(layer, layer + 1) for layer in range(number)))
    require_divisible(probe_model, Place(0, len(chunks), chunks))
    return outputs_of_layers(probe_model)


def cut(hf: PreTrainedModel, place: Place) -> PipelineStage:
    """Remove, in place, the modules that only other stages need. All ranks call this before sharding.

    Raises:
        ConfigError: the model cannot be divided, or a stage would have nothing to train.
    """
    ends = _Ends.of(hf)
    owners = _owners(hf, ends, place)
    _require_trainable(hf, owners, place)
    weights = hf.state_dict(keep_vars=True)
    first_names = {id(parameter): name for name, parameter in hf.named_parameters()}
    known = {name: first_names.get(id(tensor), name) for name, tensor in weights.items()}
    shared = _shared(hf, known, owners)
    _take_away(hf, ends, place)
    mine = set(hf.state_dict(keep_vars=True))
    held = {known[name] for name in mine}
    before = {known[name] for name, stages in owners.items() if min(stages) < place.number}
    stage = PipelineStage(
        place,
        renamed={name: known[name] for name in mine if known[name] != name},
        shared=shared,
        copies=frozenset(held & before),
        elsewhere=frozenset(known.values()) - held,
    )
    setattr(hf, _ATTRIBUTE, stage)
    return stage


@contextmanager
def active(hf: PreTrainedModel, place: Place, chunk: int, *, alone: bool = False) -> Iterator[None]:
    """Run a block in which the forward of the model's body runs only the layers of one chunk.

    In the block the body takes the hidden states of the previous chunk as `inputs_embeds` (except for the first
    chunk), and its `last_hidden_state` is the input of the next chunk (except for the last chunk).

    Args:
        hf: a stage, or a whole model.
        place: position of the stage.
        chunk: number of the chunk.
        alone: replace all modules of other stages that the forward calls, as in the stage of the chunk.
    """
    part: Any = body(hf)
    modules, own_forward = part._modules, part.__dict__.get("forward")
    before = dict(modules)
    held: dict[str, nn.Module] = dict(part.layers.named_children())
    through = list[nn.Module](stand_ins(hf))
    for layer in place.chunks[chunk]:
        through[layer] = held[str(layer)]
    first = Through(through[0])
    through[0] = first
    last = through[-1] = Through(through[-1])
    modules["layers"] = nn.ModuleList(through)
    # # Modules of other stages are replaced too, because the forward calls them. Their output is not used.
    ends, last_chunk = _Ends.of(hf), chunk == len(place.chunks) - 1
    elsewhere = {*(ends.before if alone and chunk else ()), *(ends.after if alone and not last_chunk else ())}
    absent = [name for name in ends.names if before[name] is None or name in elsewhere]
    modules.update(dict.fromkeys(absent, PassThrough()))
    forward = part.forward

    def run(*args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any) -> Any:
        if chunk > 0:
            first.arrived = inputs_embeds
        output = forward(*args, inputs_embeds=inputs_embeds, **kwargs)
        if not last_chunk:
            output.last_hidden_state = last.left
        return output

    part.forward = run
    try:
        yield
    finally:
        modules.update(before)
        del part.forward
        if own_forward is not None:
            part.forward = own_forward


def require_divisible(hf: PreTrainedModel, place: Place) -> None:
    """Run a whole model chunk by chunk on a few tokens, and compare the result with that of the model's own forward.

    Args:
        hf: the whole model with its weights loaded, or a small model of the same architecture.
        place: position of any stage; only its division into chunks is used.

    Raises:
        ConfigError: the results differ, or a chunk cannot run alone.
    """
    _Ends.of(hf)  # refuses models that it does not know, with the reason
    was_training = hf.training
    hf.eval()
    try:
        alike = _chunks_compute_the_same(hf, place)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        what = "its layers need more than the hidden states of those before them, so no part of them can run alone"
        raise _refused(hf, f"{what} ({type(error).__name__}: {error})") from error
    finally:
        hf.train(was_training)
    if not alike:
        raise _refused(hf, "its parts, run one after another, do not compute what the whole model computes")


@torch.no_grad()
def _chunks_compute_the_same(hf: PreTrainedModel, place: Place) -> bool:
    embeddings: Any = hf.get_input_embeddings()
    tokens = (torch.arange(8, device=embeddings.weight.device) * 5 + 1)[None] % embeddings.weight.shape[0]
    whole = hidden_states_of_whole(hf, tokens)
    given: dict[str, Tensor] = {"input_ids": tokens}
    for chunk in range(len(place.chunks)):
        with active(hf, place, chunk, alone=True):
            hidden = hidden_states(hf, given)
        given = {"inputs_embeds": hidden}
        if hidden.shape != whole.shape:
            raise ValueError(f"its layers return {list(hidden.shape)} where the model gives {list(whole.shape)}")
    return bool((hidden - whole).abs().max() <= 1e-5 * whole.abs().max())


@dataclass(frozen=True)
class _Ends:
    """Names of the body's modules with weights that are not decoder layers."""

    before: tuple[str, ...]
    """Modules that run before the layers. The first one is not always the embedding."""
    after: tuple[str, ...]
    """Modules after the layers: the final norm, if it has weights."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names before and after the layers."""
        return self.before + self.after

    @classmethod
    def of(cls, hf: PreTrainedModel) -> "_Ends":
        """Return the names for a model, including modules that were removed from a stage."""
        known = getattr(hf, _ENDS, None)
        return known or cls._found(hf)

    @classmethod
    def _found(cls, hf: PreTrainedModel) -> "_Ends":
        part = body(hf)
        if part is hf or not isinstance(part._modules.get("layers"), nn.ModuleList):
            raise _refused(hf, "it has no list of decoder layers `layers` in its body")
        if parts_without_text(hf):
            raise _refused(hf, "it has parts that read images or sound, which no stage holds")
        embedding = hf.get_input_embeddings()
        if not any(module is embedding for module in part.children()):
            raise _refused(hf, "its embedding is not next to its layers")
        children = [name for name, module in part._modules.items() if module is not None]
        place = children.index("layers")
        before = [name for name in children[:place] if _has_weights(part, name)]
        after = [name for name in children[place + 1 :] if _has_weights(part, name)]
        misplaced = [name for name in after if getattr(part, name) is embedding]
        return cls((*misplaced, *before), tuple(name for name in after if name not in misplaced))


def _has_weights(owner: nn.Module, child: str) -> bool:
    return next(owner.get_submodule(child).parameters(), None) is not None


def _owners(hf: PreTrainedModel, ends: _Ends, place: Place) -> dict[str, list[int]]:
    """Return, for each weight, the numbers of the stages that hold it."""
    prefix = next(name for name, module in hf.named_modules() if module is body(hf))
    last, everywhere = [place.size - 1], list(range(place.size))
    of_layer = {layer: [c % place.size] for c, chunk in enumerate(place.chunks) for layer in chunk}
    owners: dict[str, list[int]] = {}
    for name in hf.state_dict(keep_vars=True):
        if not name.startswith(f"{prefix}."):
            owners[name] = last
            continue
        part, _, rest = name.removeprefix(f"{prefix}.").partition(".")
        if part == "layers":
            owners[name] = of_layer[int(rest.partition(".")[0])]
        else:
            owners[name] = [0] if part in ends.before else last if part in ends.after else everywhere
    return owners


def _take_away(hf: PreTrainedModel, ends: _Ends, place: Place) -> None:
    """Remove all modules except those of this stage. Layers keep their numbers as names."""
    part: Any = body(hf)
    setattr(hf, _ENDS, ends)
    keep_stand_ins(hf)
    held = nn.ModuleList()
    for layer in place.layers:
        held.add_module(str(layer), part.layers[layer])
    part.layers = held
    if not place.is_first:
        for name in ends.before:
            setattr(part, name, None)
        # # Models that could read images raise an error if they do not find the embedding, also when asked for a head.
        hf.get_input_embeddings = _no_embedding  # type: ignore[method-assign, assignment]
    if not place.is_last:
        for name in ends.after:
            setattr(part, name, None)
        # # The body of a model that could read images is a module of a child.
        for name in [name for name, child in hf.named_children() if part not in child.modules()]:
            setattr(hf, name, None)


def _no_embedding() -> None:
    """Return None, as other models do for an embedding that was removed."""


def _require_trainable(hf: PreTrainedModel, owners: dict[str, list[int]], place: Place) -> None:
    """Refuse a stage whose weights are all frozen, because its optimizer would have no parameters."""
    trained = {name for name, parameter in hf.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    idle = set(range(place.size)) - {stage for name in trained for stage in owners[name]}
    if trained and idle:
        raise _refused(
            hf,
            f"nothing is trained in {len(idle)} of its {place.size} stages (the first: {min(idle)}); adapt layers of "
            "all stages (policy.dtensor_cfg.lora_cfg)",
        )


def _shared(hf: PreTrainedModel, known: dict[str, str], owners: dict[str, list[int]]) -> frozenset[str]:
    """Return the parameters that several stages use. Only an embedding that is also the head is possible."""
    embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    tied = [name for name, module in hf.named_modules() if module in (embedding, head)]
    shared = {name: first for name, first in known.items() if owners[name] != owners[first]}
    for name, first in shared.items():
        if not {name.rpartition(".")[0], first.rpartition(".")[0]} <= set(tied):
            raise _refused(hf, f"{name} is the same weight as {first} of another stage")
    return frozenset(shared.values())


def _refused(hf: PreTrainedModel, why: str) -> ConfigError:
    return ConfigError(
        f"{type(hf).__name__} cannot be divided into pipeline stages: {why}. "
        "Set policy.dtensor_cfg.pipeline_parallel_size=1 and use the other axes."
    )


_GROUP_BYTES = 64 * 1024**2
"""Bytes of tensors whose names and shapes are broadcast together. A larger tensor is a group by itself."""


def without_copies(hf: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights that this stage exports, except weights that an earlier stage also holds."""
    stage = stage_of(hf)
    for name, tensor in weights:
        if stage is None or name not in stage.copies:
            yield name, tensor


def of_all_stages(hf: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of all stages, stage by stage. Each stage broadcasts its own weights.

    Args:
        hf: the model of this stage.
        weights: whole tensors that this stage exports.

    Yields:
        Name and tensor: this stage's tensors unchanged, and tensors of other stages on this rank's device.
    """
    stage = stage_of(hf)
    if stage is None:
        yield from weights
        return
    for source in range(stage.place.size):
        mine = source == stage.place.number
        yield from _sent(weights, stage.place) if mine else _received(source, stage.place)


def names_here(hf: nn.Module) -> dict[str, str]:
    """Return `{checkpoint name: name in this stage}` for weights whose two names differ."""
    stage = stage_of(hf)
    return {} if stage is None else {known: name for name, known in stage.renamed.items()}


def joined[T](hf: nn.Module, mine: dict[str, T]) -> dict[str, T]:
    """Merge the dicts of all stages, in the order of the stages."""
    stage = stage_of(hf)
    if stage is None:
        return mine
    parts: list[Any] = [None] * stage.place.size
    dist.all_gather_object(parts, mine, group=stage.place.group)
    return {name: value for part in parts for name, value in part.items()}


def shared_parameters(hf: nn.Module) -> dict[str, nn.Parameter]:
    """Return this stage's copies of parameters that the first and last stage hold (tied embeddings).

    Keys are the names that checkpoints use.
    """
    stage = stage_of(hf)
    if stage is None or not (stage.place.is_first or stage.place.is_last):
        return {}
    named = {stage.known_as(name): parameter for name, parameter in hf.named_parameters()}
    return {name: named[name] for name in sorted(stage.shared) if name in named}


def copied_parameters(hf: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of this stage that an earlier stage also holds."""
    stage = stage_of(hf)
    return [] if stage is None else [p for name, p in shared_parameters(hf).items() if name in stage.copies]


@torch.no_grad()
def sum_shared_gradients(hf: nn.Module) -> None:
    """Set both copies of a shared weight's gradient to their sum, which has the same bits on both stages."""
    stage = stage_of(hf)
    for parameter in shared_parameters(hf).values():
        if not parameter.requires_grad:
            continue
        assert stage is not None
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        local = held_here(parameter.grad)
        mine = local.to(stage.place.device).contiguous()
        theirs = torch.empty_like(mine)
        peer = stage.place.size - 1 - stage.place.number
        group = stage.place.group
        exchange = [
            P2POp(dist.isend, mine, group=group, group_peer=peer),
            P2POp(dist.irecv, theirs, group=group, group_peer=peer),
        ]
        for work in batch_isend_irecv(exchange):
            work.wait()
        local.add_(theirs)


def _sent(weights: Iterable[tuple[str, Tensor]], place: Place) -> Iterator[tuple[str, Tensor]]:
    for group in group_by_size(weights, _GROUP_BYTES):
        described = [(name, tensor.shape, tensor.dtype) for name, tensor in group]
        dist.broadcast_object_list([described], group=place.group, group_src=place.number)
        for name, tensor in group:
            dist.broadcast(tensor.to(place.device).contiguous(), group=place.group, group_src=place.number)
            yield name, tensor
    dist.broadcast_object_list([[]], group=place.group, group_src=place.number)


def _received(source: int, place: Place) -> Iterator[tuple[str, Tensor]]:
    while True:
        announced: list[Any] = [None]
        dist.broadcast_object_list(announced, group=place.group, group_src=source)
        if not announced[0]:
            return
        for name, shape, dtype in announced[0]:
            tensor = torch.empty(shape, dtype=dtype, device=place.device)
            dist.broadcast(tensor, group=place.group, group_src=source)
            yield name, tensor
