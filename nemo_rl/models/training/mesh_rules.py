"""Check that a mesh divides a model, with the arithmetic and messages of all backends.

Invariant: a finding contains the given size, the arithmetic, and the nearest sizes that fit the model and the ranks.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from transformers import PretrainedConfig

from nemo_rl.config import PolicyConfig
from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.rules.topology import row_parts
from nemo_rl.config.schema.model.parallel import BackendSection
from nemo_rl.distributed.parallel_layout import ParallelLayout

_WHOLE_SEQUENCE = {"full_attention", "sliding_attention", "attention"}
"""Kinds of layers in which tokens use only the keys and values of other tokens."""
_KINDS = ("layer_types", "layers_block_type", "block_types")
_SHARED = "moe_shared_expert_intermediate_size"
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")


@dataclass(frozen=True)
class Divided:
    """A part of a model, such as its heads, that ranks divide into equal shares."""

    what: str
    """Name of the part, for messages."""
    count: int
    """Number of units, for example of heads."""


@dataclass(frozen=True)
class Mesh:
    """A model and the configured mesh."""

    keys: str
    """Dotted path of the backend's section, for messages."""
    policy: PolicyConfig
    """The model's section."""
    layout: ParallelLayout
    """Sizes of the axes."""
    model: PretrainedConfig
    """Configuration of the model's language part."""

    @property
    def asked(self) -> BackendSection:
        """Return the backend's section."""
        return self.policy.backend_section

    def name(self, axis: str) -> str:
        """Return the key of an axis with its value, without the section."""
        return f"{self.asked.size_keys[axis]}={self.asked.size(axis)}"

    def key(self, axis: str) -> str:
        """Return the full key of an axis with its value, as in the user's configuration."""
        return f"{self.keys}.{self.name(axis)}"

    def alone(self, axis: str) -> str:
        """Return the advice to set an axis to one rank."""
        return f"Set {self.keys}.{self.asked.size_keys[axis]}=1."

    def count(self, *names: str) -> int | None:
        """Return the value of the first of these fields that the configuration sets, or None.

        A value of 0 counts as not set. If a field has a value per layer, the largest value is returned.
        """
        return next((max(values) for name in names if (values := self.numbers(name))), None)

    def numbers(self, name: str) -> list[int]:
        """Return the distinct values of a field, which may have one value for all layers, one per layer, or none."""
        try:
            value = getattr(self.model, name, None)
        except RuntimeError:  # raised by transformers if layers differ
            layers = getattr(self.model, "per_layer_config", ())
            value = [getattr(layer, name, None) for layer in layers]
        values = value if isinstance(value, list | tuple) else [value]
        return sorted({int(each) for each in values if isinstance(each, int | float) and each})

    @property
    def experts(self) -> int | None:
        """The routed experts of a layer, or None for a dense model.

        Where feed-forward layers are a kind of their own (Nemotron-H), a dense model has a number of experts anyway.
        """
        kinds = getattr(self.model, "layers_block_type", None) or ()
        number = self.count(*_EXPERTS) or 0
        return number if number > 1 and ("moe" in kinds or "mlp" not in kinds) else None

    @property
    def layers(self) -> int:
        """The number of decoder layers."""
        return self.count("num_hidden_layers") or 1

    def sizes(self, axis: str) -> list[int]:
        """Return the sizes of an axis that fit the number of ranks if all other axes keep their sizes."""
        layout = self.layout
        if axis == "ep":
            most = layout.dp_shard * layout.cp * layout.tp // self.asked.size("etp")
        elif axis == "etp":
            most = layout.dp_shard * layout.cp * layout.tp // layout.ep
        else:
            most = layout.num_ranks // prod(
                getattr(layout, other) for other in ("pp", "dp_replicate", "cp", "tp") if other != axis
            )
        return [size for size in range(1, most + 1) if most % size == 0]

    def advice(self, given: int, fitting: Sequence[int]) -> str:
        """Return advice that names the fitting sizes nearest to the given size."""
        near = sorted(sorted(fitting, key=lambda size: (abs(size - given), size))[:2])
        return f"Nearest sizes that fit the model and {self.layout.num_ranks} ranks: {', '.join(map(str, near))}."

    def divided(self, what: str, *fields: str) -> Iterator[Divided]:
        """Yield the part whose size is the first of these fields, if the configuration has one."""
        field = next((field for field in fields if self.numbers(field)), None)
        if field is not None:
            yield from (Divided(f"{what} ({field})", number) for number in self.numbers(field))

    def indivisible(self, axis: str, divided: Iterable[Divided]) -> Findings:
        """Report the parts that an axis does not divide, with the arithmetic and the nearest possible sizes."""
        size, divided = self.asked.size(axis), list(divided)
        fitting = [other for other in self.sizes(axis) if all(each.count % other == 0 for each in divided)]
        for each in divided:
            if each.count % size:
                yield (
                    f"{self.key(axis)} does not divide the {each.count} {each.what} of {self.model.model_type}: "
                    f"{each.count} / {size} = {each.count / size:g}. {self.advice(size, fitting)}"
                )


def divided_layers(mesh: Mesh) -> Iterator[Divided]:
    """Yield the parts of layers that tensor-parallel ranks divide in every architecture, except routed experts."""
    model = mesh.model
    yield from mesh.divided("attention heads", "num_attention_heads")
    yield from mesh.divided("heads of keys and values", "num_key_value_heads")
    if mesh.experts is None or _has_dense_layers(mesh):
        yield from mesh.divided("columns of the dense layers", "intermediate_size_mlp", "intermediate_size")
    yield from mesh.divided("columns of the shared expert", "shared_expert_intermediate_size")
    if mesh.experts is not None and mesh.numbers(_SHARED):
        yield from mesh.divided("columns of the shared expert", _SHARED)
        return
    shared, width = getattr(model, "n_shared_experts", None), mesh.count("moe_intermediate_size")
    if shared and width:
        yield Divided("columns of the shared experts (n_shared_experts x moe_intermediate_size)", shared * width)


def routed_experts(mesh: Mesh) -> Iterator[Divided]:
    """Yield the routed experts of a layer as a part that ranks divide."""
    if mesh.experts is not None:
        yield from mesh.divided("experts of a layer", *_EXPERTS)


def vocabulary(mesh: Mesh) -> Iterator[Divided]:
    """Yield the tokens of the vocabulary as a part that ranks divide."""
    yield from mesh.divided("tokens of the vocabulary", "vocab_size")


def _has_dense_layers(mesh: Mesh) -> bool:
    """Return whether a model with experts has layers without experts."""
    model = mesh.model
    sparse = getattr(model, "moe_layers", None)
    return bool(
        getattr(model, "first_k_dense_replace", 0)
        or getattr(model, "mlp_only_layers", None)
        or (getattr(model, "decoder_sparse_step", None) or 1) > 1
        or (sparse is not None and len(sparse) < mesh.layers)
        or "dense" in (getattr(model, "mlp_layer_types", None) or ())
        or "mlp" in (getattr(model, "layers_block_type", None) or ())
    )


def check_experts(mesh: Mesh) -> Findings:
    """Check that expert-parallel ranks divide the experts equally."""
    if mesh.layout.ep == 1:
        return
    if mesh.experts is None:
        yield f"{mesh.key('ep')}, but {mesh.model.model_type} has no experts. {mesh.alone('ep')}"
        return
    yield from mesh.indivisible("ep", routed_experts(mesh))


def check_context(mesh: Mesh, divisible: Collection[str] = ()) -> Findings:
    """Check that context-parallel ranks can divide the rows and the model's attention.

    Args:
        divisible: kinds of layers without attention in which the backend can divide rows.
    """
    size = mesh.layout.cp
    if size == 1:
        return
    others = sorted(mixing_layers(mesh.model) - set(divisible))
    if others:
        yield (
            f"{mesh.key('cp')}, but {mesh.model.model_type} has layers that need the tokens before theirs in one "
            f"piece: {', '.join(others)}. Only softmax attention, with or without a window, can be divided. "
            f"{mesh.alone('cp')}"
        )
        return
    sharing = mesh.layout.tp if getattr(mesh.asked, "sequence_parallel", False) else 1
    parts, longest = row_parts(mesh.policy), mesh.policy.max_total_sequence_length
    if longest < parts:
        by = f"2 x {size}" + (f", and {mesh.name('tp')} divides each rank's" if sharing > 1 else "")
        yield (
            f"{mesh.key('cp')} cuts a row into {parts} parts ({by}), more than its {longest} tokens "
            f"(max_total_sequence_length={longest}). Use rows of at least {parts} tokens, or a smaller size."
        )


def mixing_layers(model: PretrainedConfig) -> set[str]:
    """Return the kinds of layers in which tokens do not use only keys and values of other tokens."""
    kinds = {str(kind) for field in _KINDS for kind in getattr(model, field, None) or ()} - _WHOLE_SEQUENCE
    if getattr(model, "attention_chunk_size", None) is not None:
        kinds.add("chunked_attention")
    if getattr(model, "num_attention_heads", None) is None:
        kinds.add("layers without attention heads")
    return kinds
