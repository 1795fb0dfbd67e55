"""What is wrong about a mesh for a model: found from its configuration, before Ray starts and before a weight is read.

Every finding has what was given, the arithmetic and the nearest sizes that fit both the model and the number of ranks.
Invariant: all findings come at once, and only what cannot work is one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from transformers import PretrainedConfig

from nemo_rl.config import PolicyConfig
from nemo_rl.config.rules.findings import Findings
from nemo_rl.config.rules.topology import row_parts
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.utils.errors import ConfigError

type PlanFor = Callable[[PretrainedConfig], object]
"""The tensor-parallel plan of a model; raises `ConfigError` where there is none."""

_WHOLE_SEQUENCE = {"full_attention", "sliding_attention", "attention"}
"""Kinds of layers that need nothing of other tokens but their keys and values."""
_KINDS = ("layer_types", "layers_block_type", "block_types")
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")


@dataclass(frozen=True)
class Divided:
    """Something of a model that ranks share equally.

    Attributes:
        what: its name, for messages.
        count: how many there are.
    """

    what: str
    count: int


@dataclass(frozen=True)
class Mesh:
    """A model and the mesh that is asked for.

    Attributes:
        keys: dotted path of the section with the sizes, for messages.
        policy: the model's section.
        layout: sizes of the axes.
        model: configuration of its language part.
    """

    keys: str
    policy: PolicyConfig
    layout: ParallelLayout
    model: PretrainedConfig

    def key(self, name: str) -> str:
        """A key of the backend with its value, as the user writes it."""
        return f"{self.keys}.{name}={str(getattr(self.policy.backend_section, name)).lower()}"

    def count(self, *names: str) -> int | None:
        """The first of these fields that the configuration has; None where it has none of them, or 0."""
        return next((int(value) for name in names if (value := getattr(self.model, name, None))), None)

    @property
    def experts(self) -> int | None:
        """Routed experts of a layer; None for a dense model."""
        return self.count(*_EXPERTS)

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return self.count("num_hidden_layers") or 1


def check_mesh(
    policy: PolicyConfig,
    layout: ParallelLayout,
    model: PretrainedConfig,
    section: str = "policy",
    plan_for: PlanFor | None = None,
) -> Findings:
    """What keeps a model from being trained, or from answering, on a mesh.

    Args:
        policy: section of the model.
        layout: sizes that the section and the number of ranks give.
        model: the model's configuration.
        section: name of the section, for messages.
        plan_for: finds the plan that divides the model's layers; None does not ask for one.
    """
    mesh = Mesh(f"{section}.dtensor_cfg", policy, layout, model.get_text_config())
    yield from _check_tensor(mesh)
    yield from _check_experts(mesh)
    yield from _check_context(mesh)
    yield from _check_pipeline(mesh)
    if layout.tp > 1 and plan_for is not None:
        try:
            plan_for(model)
        except ConfigError as error:
            yield str(error)


def _check_tensor(mesh: Mesh) -> Findings:
    """Everything that tensor-parallel ranks divide is a multiple of their number."""
    if mesh.layout.tp == 1:
        return
    divided = list(_divided_by_tensor(mesh))
    fitting = [size for size in _sizes(mesh, "tp") if all(each.count % size == 0 for each in divided)]
    given = mesh.key("tensor_parallel_size")
    yield from _indivisible(mesh, given, mesh.layout.tp, divided, fitting)


def _divided_by_tensor(mesh: Mesh) -> Iterator[Divided]:
    model = mesh.model
    yield from _named(mesh, "attention heads", "num_attention_heads")
    yield from _named(mesh, "heads of keys and values", "num_key_value_heads")
    if mesh.experts is None or _has_dense_layers(mesh):
        yield from _named(mesh, "columns of the dense layers", "intermediate_size_mlp", "intermediate_size")
    yield from _named(mesh, "columns of the shared expert", "shared_expert_intermediate_size")
    shared, width = getattr(model, "n_shared_experts", None), getattr(model, "moe_intermediate_size", None)
    if shared and width:
        yield Divided("columns of the shared experts (n_shared_experts x moe_intermediate_size)", shared * width)
    if not mesh.policy.reward_model_cfg.enabled:
        yield from _named(mesh, "tokens of the vocabulary", "vocab_size")
    if mesh.layout.ep == 1:
        yield from _named(mesh, "experts of a layer", *_EXPERTS)


def _named(mesh: Mesh, what: str, *fields: str) -> Iterator[Divided]:
    field = next((field for field in fields if getattr(mesh.model, field, None)), None)
    if field is not None:
        yield Divided(f"{what} ({field})", int(getattr(mesh.model, field)))


def _has_dense_layers(mesh: Mesh) -> bool:
    """Whether a model with experts has layers without."""
    model = mesh.model
    sparse = getattr(model, "moe_layers", None)
    return bool(
        getattr(model, "first_k_dense_replace", 0)
        or getattr(model, "mlp_only_layers", None)
        or (getattr(model, "decoder_sparse_step", None) or 1) > 1
        or (sparse is not None and len(sparse) < mesh.layers)
        or "dense" in (getattr(model, "mlp_layer_types", None) or ())
    )


def _check_experts(mesh: Mesh) -> Findings:
    """Expert-parallel ranks have experts to share, the same number each."""
    size, given = mesh.layout.ep, mesh.key("expert_parallel_size")
    if size == 1:
        return
    if mesh.experts is None:
        yield f"{given}, but {mesh.model.model_type} has no experts. Set {mesh.keys}.expert_parallel_size=1."
        return
    fitting = [ep for ep in _sizes(mesh, "ep") if mesh.experts % ep == 0]
    yield from _indivisible(mesh, given, size, _named(mesh, "experts of a layer", *_EXPERTS), fitting)


def _check_context(mesh: Mesh) -> Findings:
    """Rows can be divided among context-parallel ranks, and so can the model's attention."""
    size, given = mesh.layout.cp, mesh.key("context_parallel_size")
    if size == 1:
        return
    alone = f"Set {mesh.keys}.context_parallel_size=1."
    others = sorted(_mixing_layers(mesh.model))
    if others:
        yield (
            f"{given}, but {mesh.model.model_type} has layers that need the tokens before theirs in one piece: "
            f"{', '.join(others)}. Only softmax attention, with or without a window, can be divided. {alone}"
        )
        return
    if mesh.policy.dtensor_cfg.context_parallel_method == "ulysses":
        yield from _check_ulysses(mesh)
    sharing = mesh.layout.tp if mesh.policy.dtensor_cfg.sequence_parallel else 1
    parts, longest = row_parts(mesh.policy), mesh.policy.max_total_sequence_length
    if longest < parts:
        by = f"2 x {size}" + (f", and tensor_parallel_size={sharing} divides each rank's" if sharing > 1 else "")
        yield (
            f"{given} cuts a row into {parts} parts ({by}), more than its {longest} tokens "
            f"(max_total_sequence_length={longest}). Use rows of at least {parts} tokens, or a smaller size."
        )


def _mixing_layers(model: PretrainedConfig) -> set[str]:
    kinds = {str(kind) for field in _KINDS for kind in getattr(model, field, None) or ()} - _WHOLE_SEQUENCE
    if getattr(model, "attention_chunk_size", None) is not None:
        kinds.add("chunked_attention")
    if getattr(model, "num_attention_heads", None) is None:
        kinds.add("layers without attention heads")
    return kinds


def _check_ulysses(mesh: Mesh) -> Findings:
    """The heads that tensor parallelism leaves on a rank divide among context-parallel ranks."""
    size, tp, total = mesh.layout.cp, mesh.layout.tp, mesh.count("num_attention_heads")
    if total is None or total % tp or (total // tp) % size == 0:
        return
    heads, given = total // tp, mesh.key("context_parallel_size")
    on_rank = f" ({total} / tensor_parallel_size={tp})" if tp > 1 else ""
    fitting = [cp for cp in _sizes(mesh, "cp") if heads % cp == 0]
    yield (
        f"{given} with context_parallel_method=ulysses does not divide the {heads} attention heads of a rank{on_rank}: "
        f"{heads} / {size} = {heads / size:g}. {_advice(mesh, size, fitting)} context_parallel_method=all_gather takes "
        "any number of heads."
    )


def _check_pipeline(mesh: Mesh) -> Findings:
    """Every chunk of every stage has a layer."""
    pp, layers = mesh.layout.pp, mesh.layers
    virtual = mesh.policy.dtensor_cfg.virtual_pipeline_size if pp > 1 else 1
    if pp == 1 or pp * virtual <= layers:
        return
    chunked = f" x virtual_pipeline_size={virtual}" if virtual > 1 else ""
    most = layers // pp
    fewer = f" Or virtual_pipeline_size={most}." if virtual > 1 and most else ""
    fitting = [size for size in _sizes(mesh, "pp") if size * virtual <= layers]
    yield (
        f"{mesh.key('pipeline_parallel_size')}{chunked} makes {pp * virtual} chunks of layers, and "
        f"{mesh.model.model_type} has {layers} layers (num_hidden_layers). {_advice(mesh, pp, fitting)}{fewer}"
    )


def _indivisible(mesh: Mesh, given: str, size: int, divided: Iterable[Divided], fitting: Sequence[int]) -> Findings:
    for each in divided:
        if each.count % size:
            yield (
                f"{given} does not divide the {each.count} {each.what} of {mesh.model.model_type}: "
                f"{each.count} / {size} = {each.count / size:g}. {_advice(mesh, size, fitting)}"
            )


def _sizes(mesh: Mesh, axis: str) -> list[int]:
    """Sizes of an axis that fit the number of ranks with the other axes as they are."""
    layout = mesh.layout
    if axis == "ep":
        most = layout.dp_shard * layout.cp * layout.tp
    else:
        most = layout.num_ranks // prod(
            getattr(layout, other) for other in ("pp", "dp_replicate", "cp", "tp") if other != axis
        )
    return [size for size in range(1, most + 1) if most % size == 0]


def _advice(mesh: Mesh, given: int, fitting: Sequence[int]) -> str:
    near = sorted(sorted(fitting, key=lambda size: (abs(size - given), size))[:2])
    return f"Nearest sizes that fit the model and {mesh.layout.num_ranks} ranks: {', '.join(map(str, near))}."
