"""Check before Ray starts, from the model's configuration only, that Megatron Core can train on a mesh.

Does not import megatron. Invariant: all findings are reported together, with the arithmetic and the nearest valid
choice.
"""

from collections.abc import Iterator
from itertools import chain

from transformers import PretrainedConfig

from nemo_rl.config import MegatronConfig, PolicyConfig
from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.megatron.families import MODEL_TYPES
from nemo_rl.models.training.mesh_rules import Mesh, check_context, check_experts, divided_layers, vocabulary

_FIRST, _LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"


def check_mesh(
    policy: PolicyConfig, layout: ParallelLayout, model: PretrainedConfig, section: str = "policy"
) -> Findings:
    """Find the reasons why Megatron Core cannot train a model, or run it for inference, on a mesh.

    Args:
        policy: section of the model.
        layout: axis sizes, from the section and the number of ranks.
        model: the model's configuration.
        section: name of the section, for messages; only `policy` is trained.
    """
    mesh = Mesh(f"{section}.megatron_cfg", policy, layout, model.get_text_config())
    asked = policy.megatron_cfg
    if mesh.model.model_type not in MODEL_TYPES:
        yield (
            f"{section}.model_name={policy.model_name} is a {mesh.model.model_type}, which {mesh.keys} cannot train: "
            f"there are {', '.join(MODEL_TYPES)}. Train it with {section}.dtensor_cfg.enabled=true and "
            f"{mesh.keys}.enabled=false."
        )
        return
    if layout.tp > 1:
        yield from mesh.indivisible("tp", chain(divided_layers(mesh), vocabulary(mesh)))
    yield from _check_sequence_parallel(mesh, asked, trains=section == "policy")
    yield from check_experts(mesh)
    yield from _check_expert_parts(mesh)
    yield from _check_dispatcher(mesh, asked)
    yield from check_context(mesh)
    yield from _check_pipeline(mesh, asked)


def _check_sequence_parallel(mesh: Mesh, asked: MegatronConfig, *, trains: bool) -> Findings:
    """Check that sequence parallelism has ranks to divide sequences, and is on if tensor parallelism needs it."""
    if asked.sequence_parallel and mesh.layout.tp == 1:
        yield (
            f"{mesh.keys}.sequence_parallel=true divides sequences among the ranks of {mesh.name('tp')}. Set it to "
            f"false, or {mesh.keys}.tensor_model_parallel_size to at least 2."
        )
    if mesh.layout.tp == 1 or asked.sequence_parallel:
        return
    if getattr(mesh.model, "kv_lora_rank", None):
        yield (
            f"{mesh.key('tp')} divides the latent attention of {mesh.model.model_type} only with sequence parallelism: "
            f"without it gradients of its down projections are wrong. Set {mesh.keys}.sequence_parallel=true."
        )
    elif trains and mesh.experts is not None:
        yield (
            f"{mesh.key('tp')} trains the experts of {mesh.model.model_type} only with sequence parallelism. Set "
            f"{mesh.keys}.sequence_parallel=true."
        )


def _check_expert_parts(mesh: Mesh) -> Findings:
    """Check that the ranks that divide each expert have equal parts of it."""
    if mesh.asked.size("etp") == 1:
        return
    if mesh.experts is None:
        yield f"{mesh.key('etp')}, but {mesh.model.model_type} has no experts. {mesh.alone('etp')}"
        return
    yield from mesh.indivisible(
        "etp", mesh.divided("columns of an expert", "moe_intermediate_size", "intermediate_size")
    )


def _check_dispatcher(mesh: Mesh, asked: MegatronConfig) -> Findings:
    """Check that the allgather dispatcher gathers equal numbers of tokens from all ranks and in all microbatches."""
    if mesh.experts is None or asked.moe_token_dispatcher_type != "allgather":
        return
    given, with_same_rows = f"{mesh.keys}.moe_token_dispatcher_type=allgather", mesh.layout.tp * mesh.layout.cp
    if mesh.layout.ep > 1 and (experts := mesh.layout.ep * mesh.asked.size("etp")) > with_same_rows:
        yield (
            f"{given} needs equally many tokens on all ranks that share experts. {mesh.name('ep')} with "
            f"{mesh.name('etp')} takes {experts} ranks, and only the {with_same_rows} of tensor and context "
            "parallelism have the same rows. Use alltoall."
        )
    if mesh.layout.pp > 1:
        yield f"{given} knows no stages whose microbatches differ in length: {mesh.name('pp')}. Use alltoall."


def _check_pipeline(mesh: Mesh, asked: MegatronConfig) -> Findings:
    """Check that all chunks have the same number of layers, except for those of the first and last stage."""
    pp, chunks = mesh.layout.pp, mesh.asked.size("virtual")
    ends = {key: count for key in (_FIRST, _LAST) if (count := getattr(asked, key)) is not None}
    written = [f"{key}={count}" for key, count in ends.items()] + ([mesh.name("virtual")] if chunks > 1 else [])
    if pp == 1:
        if written:
            yield (
                f"{mesh.keys}.{' and '.join(written)} divide the layers of a pipeline, and {mesh.name('pp')}. Set "
                f"{'them' if len(written) > 1 else 'it'} to null, or the pipeline to at least 2 stages."
            )
        return
    if _fits(mesh.layers, pp, chunks, ends):
        return
    fitting = [size for size in mesh.sizes("pp") if _fits(mesh.layers, size, chunks, ends)]
    nearest = mesh.advice(pp, fitting) if fitting else ""
    uneven = next(_last_stages(mesh.layers, pp, chunks), None) if not ends else None
    other = "" if uneven is None else f"Or {_LAST}={uneven} ({(mesh.layers - uneven) // (pp - 1)} on each other stage)."
    yield (
        f"{mesh.key('pp')}{''.join(f', {text}' for text in written)} does not divide the {mesh.layers} layers "
        f"(num_hidden_layers) of {mesh.model.model_type}: {_arithmetic(mesh.layers, pp, chunks, ends)}. "
        f"{' '.join(filter(None, (nearest, other))) or f'Leave {_FIRST} and {_LAST} at null.'}"
    )


def _fits(layers: int, stages: int, chunks: int, ends: dict[str, int]) -> bool:
    """Return whether the layers without those of the first and last stage divide into equal chunks."""
    if stages == 1:
        return not ends and chunks == 1
    rest, others = layers - sum(ends.values()), stages - len(ends)
    if any(count < 1 or count % chunks for count in ends.values()):
        return False
    return rest == 0 if others == 0 else rest > 0 and rest % (others * chunks) == 0


def _arithmetic(layers: int, stages: int, chunks: int, ends: dict[str, int]) -> str:
    empty = [f"a stage with {count} layers" for count in ends.values() if count < 1]
    odd = empty + [f"{count} / {chunks} = {count / chunks:g}" for count in ends.values() if count % chunks]
    if odd:
        return ", ".join(odd)
    rest, others = layers - sum(ends.values()), stages - len(ends)
    left = " - ".join(map(str, (layers, *ends.values())))
    if others == 0 or rest <= 0:
        return f"{left} = {rest} layers for the {others} stages between"
    shown = f"({left})" if ends else left
    by = f"{others} stages" + (f" / {chunks} chunks" if chunks > 1 else "")
    return f"{shown} / {by} = {rest / (others * chunks):g}"


def _last_stages(layers: int, stages: int, chunks: int) -> Iterator[int]:
    """Yield the layers of a shorter last stage that leave equal other stages, largest first.

    The last stage also has the vocabulary.
    """
    for last in range(layers // stages, 0, -1):
        if last % chunks == 0 and _fits(layers, stages, chunks, {_LAST: last}):
            yield last
