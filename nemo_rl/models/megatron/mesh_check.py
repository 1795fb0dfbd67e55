"""Check before Ray starts that Megatron Core can train on a mesh, and predict the memory of its ranks.

`check_mesh` needs only the model's configuration. Invariant: all findings are reported together, with the arithmetic
and the nearest valid choice.

`MeshPlace` predicts the memory of a rank, as `dtensor.mesh_check` does for FSDP, with the invariant of
`models.capacity.memory`. Data-parallel ranks of Megatron Core do not shard weights and gradient buffers, but only the
optimizer's float32 state (ZeRO-1, Rajbhandari et al. 2020, arXiv:1910.02054). Activations are those of plain PyTorch
layers, divided as in Korthikanti et al. 2022 (arXiv:2205.05198). Transformer Engine's fused layers keep fewer of them.
The module does not import megatron.
"""

from collections.abc import Iterator
from itertools import chain

from transformers import PretrainedConfig

from nemo_rl.config import MegatronConfig, PolicyConfig
from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.capacity.memory import WIDE, MemoryPlan, Moment, microbatches_in_flight
from nemo_rl.models.capacity.memory_trace import GRADIENT_OF_LOGITS, Parameters, RankMemory
from nemo_rl.models.megatron.model.families import MODEL_TYPES
from nemo_rl.models.training.mesh_rules import (
    Divided,
    Mesh,
    check_context,
    check_experts,
    divided_layers,
    vocabulary,
)

_WITH_MAMBA = ("nemotron_h",)
_WITH_DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_DIVIDED_KINDS = ("linear_attention", "mlp", "moe")
_FIRST, _LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"


def check_mesh(
    policy: PolicyConfig, layout: ParallelLayout, model: PretrainedConfig, section: str = "policy"
) -> Findings:
    """Yield the reasons why Megatron Core cannot train or run a model on a mesh.

    Args:
        layout: axis sizes, from the section and the number of ranks.
        model: the model's configuration.
        section: name of the section, for messages. Only `policy` is trained.
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
        yield from mesh.indivisible("tp", chain(divided_layers(mesh), _recurrent_layers(mesh), vocabulary(mesh)))
    yield from _check_sequence_parallel(mesh, asked, trains=section == "policy")
    yield from check_experts(mesh)
    yield from _check_expert_parts(mesh)
    yield from _check_dispatcher(mesh, asked)
    divisible = mesh.model.model_type in (*_WITH_MAMBA, *_WITH_DELTA_NETS)
    yield from check_context(mesh, _DIVIDED_KINDS if divisible else ())
    yield from _check_mamba_context(mesh)
    yield from _check_delta_context(mesh)
    yield from _check_pipeline(mesh, asked)


def _check_sequence_parallel(mesh: Mesh, asked: MegatronConfig, *, trains: bool) -> Findings:
    """Check that sequence parallelism is only on with tensor parallelism, and is on where that needs it."""
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


def _recurrent_layers(mesh: Mesh) -> Iterator[Divided]:
    """Yield the parts of layers with states that tensor-parallel ranks divide."""
    if mesh.model.model_type in _WITH_MAMBA:
        yield from mesh.divided("heads of the Mamba-2 layers", "mamba_num_heads")
        yield from mesh.divided("groups of heads of the Mamba-2 layers", "n_groups")
    if mesh.model.model_type in _WITH_DELTA_NETS:
        yield from mesh.divided("heads of keys of the gated delta nets", "linear_num_key_heads")


def _check_delta_context(mesh: Mesh) -> Findings:
    """Check that context-parallel ranks can exchange tokens for heads in gated delta nets."""
    if mesh.layout.cp == 1 or mesh.model.model_type not in _WITH_DELTA_NETS:
        return
    tp, given = mesh.layout.tp, mesh.model.linear_num_key_heads
    each = f"of each of the {tp} tensor-parallel ranks in gated delta nets" if tp > 1 else "of the gated delta nets"
    if given % tp == 0:
        yield from mesh.indivisible("cp", [Divided(f"heads of keys {each} (linear_num_key_heads)", given // tp)])


def _check_mamba_context(mesh: Mesh) -> Findings:
    """Check that context-parallel ranks can exchange tokens for heads in Mamba-2 layers."""
    cp, tp = mesh.layout.cp, mesh.layout.tp
    if cp == 1 or mesh.model.model_type not in _WITH_MAMBA:
        return
    heads, groups = mesh.model.mamba_num_heads // tp, mesh.model.n_groups // tp
    each = f"of each of the {tp} tensor-parallel ranks in Mamba-2 layers" if tp > 1 else "of the Mamba-2 layers"
    yield from mesh.indivisible("cp", [Divided(f"heads {each} (mamba_num_heads)", heads)])
    if groups and groups % cp and cp % groups:
        yield from mesh.indivisible("cp", [Divided(f"groups of heads {each} (n_groups)", groups)])


def _check_expert_parts(mesh: Mesh) -> Findings:
    """Check that expert-tensor-parallel ranks can divide each expert into equal parts."""
    if mesh.asked.size("etp") == 1:
        return
    if mesh.experts is None:
        yield f"{mesh.key('etp')}, but {mesh.model.model_type} has no experts. {mesh.alone('etp')}"
        return
    yield from mesh.indivisible(
        "etp", mesh.divided("columns of an expert", "moe_intermediate_size", "intermediate_size")
    )


def _check_dispatcher(mesh: Mesh, asked: MegatronConfig) -> Findings:
    """Check that the allgather dispatcher gathers equally many tokens from all ranks in all microbatches."""
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
    """Check that all chunks of layers have the same size, except in a first or last stage with a configured size."""
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
    """Return whether the layers without those of the first and last stage (`ends`) divide into equal chunks."""
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
    """Yield numbers of layers of a last stage with which all other stages are equal, largest first.

    The last stage gets fewer layers, because it also has the output head.
    """
    for last in range(layers // stages, 0, -1):
        if last % chunks == 0 and _fits(layers, stages, chunks, {_LAST: last}):
            yield last


_SELECTIVE = "Selective recomputation saves some of the activations; they are counted as if it were off."


def stage_layers(total: int, stages: int, section: MegatronConfig) -> list[range]:
    """Return the decoder layers of each pipeline stage, for a configuration that passes `check_mesh`."""
    first, last = section.num_layers_in_first_pipeline_stage, section.num_layers_in_last_pipeline_stage
    given = (first or 0) + (last or 0)
    size = (total - given) // max(stages - bool(first) - bool(last), 1)
    counts = [size] * stages
    counts[0], counts[-1] = first or counts[0], last or counts[-1]
    starts = [sum(counts[:stage]) for stage in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


class MeshPlace(RankMemory):
    """A rank of Megatron Core."""

    @property
    def layers(self) -> list[int]:
        """Decoder layers of the stage. The last one is repeated for each multi-token-prediction layer of equal size."""
        own = list(stage_layers(len(self.trace.layers), self.layout.pp, self.policy.megatron_cfg)[self.stage])
        return own + own[-1:] * self._mtp_layers

    @property
    def _mtp_layers(self) -> int:
        """Number of multi-token-prediction layers of this stage. Only the last stage has any."""
        return self.policy.megatron_cfg.mtp_num_layers if self.has_head else 0

    def plan(self) -> MemoryPlan:
        """Predict the memory of all moments of a step."""
        section, missing = self.policy.megatron_cfg, []
        weights = {"weights": (self._dense + self._experts + self._adapters) * self.itemsize}
        # # LoRA needs no copy, because the reference is the model without its adapters.
        copies = self.work.keeps_reference and not section.peft.enabled
        host = {"reference weights and their place": 2 * weights["weights"]} if copies else {}
        stays = weights | (host if self.work.on_cpu else {})
        host = {} if self.work.on_cpu else host
        if self.work.trains:
            state = self._updated * WIDE * self._state_per_weight()
            on_host = section.optimizer.optimizer_cpu_offload and not self.work.on_cpu
            kept_there = state * section.optimizer.optimizer_offload_fraction if on_host else 0.0
            stays |= {"gradients": self._gradients, "optimizer state": state - kept_there}
            stays |= self.draft_model(self.layout.data_parallel_size)
            host |= {"optimizer state": kept_there} if kept_there else {}
        if not self.trace.activations:
            missing.append("Activations are not known for this architecture.")
        elif section.activation_checkpointing and section.recompute_granularity == "selective":
            missing.append(_SELECTIVE)
        moments = self._training() if self.work.trains else {"forward pass": self._pass()}
        return MemoryPlan(stays, moments, host, " ".join(missing))

    @property
    def _dense(self) -> float:
        """Number of elements outside of routed experts."""
        inside = sum(self._part(self.trace.layers[index]) for index in self.layers)
        inside += self._mtp_layers * 2 * self.trace.hidden**2 / self.layout.tp
        if self._mtp_layers and self.layout.pp > 1:  # multi-token prediction needs a copy of the embedding
            inside += self.model.vocab_size * self.trace.hidden / self.layout.tp
        return inside + sum(each.matrices / self.layout.tp + each.vectors for each in self.outside)

    def _part(self, layer: Parameters) -> float:
        """Return the number of a layer's elements on this rank. Routers and latent down projections are not divided."""
        latent, experts = getattr(self.model, "kv_lora_rank", None), self._count("n_routed_experts", "num_experts")
        width = latent + self.model.qk_rope_head_dim + (self.model.q_lora_rank or 0) if latent else 0
        whole = self.trace.hidden * (width + (experts if layer.experts else 0))
        return (layer.matrices - whole) / self.layout.tp + whole + layer.vectors

    def _count(self, *names: str) -> int:
        return next((value for name in names if (value := getattr(self.model, name, None))), 0)

    @property
    def _experts(self) -> float:
        """Number of elements of routed experts."""
        parts = self.layout.ep * self.policy.megatron_cfg.expert_tensor_parallel_size
        return sum(self.trace.layers[index].experts for index in self.layers) / parts

    @property
    def _adapters(self) -> float:
        """Upper bound of the number of adapter elements of the stage, as if adapters were not divided."""
        peft = self.policy.megatron_cfg.peft
        return self.trace.linears * peft.dim * len(self.layers) / len(self.trace.layers) if peft.enabled else 0.0

    @property
    def _copies(self) -> tuple[int, float]:
        """Numbers of ranks that hold the same dense weights and of ranks that hold the same experts."""
        layout, parts = self.layout, self.layout.ep * self.policy.megatron_cfg.expert_tensor_parallel_size
        same = layout.data_parallel_size * layout.cp
        return same, same * layout.tp / parts

    @property
    def _trained(self) -> tuple[float, float]:
        """Numbers of trained elements outside of and in routed experts. With LoRA, only adapters are trained."""
        return (self._adapters, 0.0) if self.policy.megatron_cfg.peft.enabled else (self._dense, self._experts)

    @property
    def _updated(self) -> float:
        """Number of elements that the rank's optimizer updates."""
        if not self.policy.megatron_cfg.optimizer.use_distributed_optimizer:
            return sum(self._trained)
        return sum(each / copies for each, copies in zip(self._trained, self._copies, strict=True))

    @property
    def _gradient_size(self) -> int:
        return WIDE if self.policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32 else self.itemsize

    @property
    def _gradients(self) -> float:
        """Bytes of the gradient buffers, which hold a gradient for every trained weight."""
        return sum(self._trained) * self._gradient_size

    @property
    def _moments_of_muon(self) -> float:
        """Mean number of moments per weight. Muon keeps one for a weight of a layer, and Adam two for the others."""
        outside = sum(each.matrices / self.layout.tp + each.vectors for each in self.outside)
        return 1.0 + outside / sum(self._trained)

    def _state_per_weight(self) -> float:
        """Return how many float32 numbers the optimizer stores per weight: moments, and a copy of 16-bit weights."""
        wanted = self.policy.megatron_cfg.optimizer
        moments = {"adam": 2.0, "sgd": float(wanted.sgd_momentum > 0)}.get(wanted.optimizer, self._moments_of_muon)
        return moments + (self.itemsize < WIDE)

    def _training(self) -> dict[str, Moment]:
        kept, again = self._activations()
        # # The backward pass of the head also needs all tokens' hidden states (`hidden`), and the head's float32 copy
        # and gradient (`2 * self.head`).
        states = self.has_head * (2 + self._mtp_layers)
        hidden = states * self.tokens * self.trace.hidden * self.itemsize
        wide = self._updated * WIDE if self._gradient_size < WIDE else 0.0
        moved = min(self.largest / self._copies[0], self._updated)
        update = {"optimizer's temporaries": 2 * moved * WIDE} if self.work.on_cpu else {}
        kept_at_head = kept + hidden + self.scalar_head()
        return {
            "head backward": {"activations": kept_at_head, "logits": self.logits(GRADIENT_OF_LOGITS) + 2 * self.head},
            "layer backward": {"activations": kept + again, "logits": self.head},
            "update": {"float32 gradients": wide} | update,
        }

    def _pass(self) -> Moment:
        """Return the memory of a forward pass without backward: one layer and the head at a time."""
        one = max(map(self._kept, range(len(self.trace.activations))), default=0.0)
        return {"activations": one, "logits": self.logits(2)}

    def _activations(self) -> tuple[float, float]:
        """Return the bytes of activations of all microbatches in flight, and the bytes that are recomputed."""
        section = self.policy.megatron_cfg
        layers = self.layers if self.trace.activations else []
        sharing = self.layout.tp if section.sequence_parallel else 1
        whole, again = sum(map(self._kept, layers)), 0.0
        if section.activation_checkpointing and section.recompute_granularity == "full":
            again = max(map(self._kept, layers), default=0.0)
            whole = sum(self.trace.activations[index].entry / sharing for index in layers)
        chunks = section.virtual_pipeline_model_parallel_size or 1
        return whole * microbatches_in_flight(self.stage, self.layout.pp, chunks) + self.trace.others / sharing, again

    def _kept(self, index: int) -> float:
        """Return the bytes that a layer stores for one microbatch.

        Sequence parallelism also divides the stored inputs of attention and MLP, which the backward pass gathers again.
        """
        layout, each = self.layout, self.trace.activations[index]
        sharing = layout.tp if self.policy.megatron_cfg.sequence_parallel else 1
        rows = layout.cp * (1 + self.work.on_cpu) if layout.cp > 1 else 1
        inside = (each.inside + each.keys_values * rows + self._other_code(index)) / layout.tp
        return (each.outside + each.into_blocks) / sharing + inside

    def _other_code(self, index: int) -> float:
        """Return how many bytes more a layer of Megatron Core stores than a layer of transformers.

        Queries, keys and values are views of one product, and values and the whole product are stored. On CPUs the
        output of attention is copied. A gated feed-forward layer without a fused kernel stores one more tensor of the
        inner width, `up + offset` (`megatron.core.transformer.mlp`). With a fused kernel, it stores one tensor less.
        """
        model, numbers = self.model, 0
        if not getattr(model, "kv_lora_rank", None):
            size = getattr(model, "head_dim", None) or self.trace.hidden // model.num_attention_heads
            queries = model.num_attention_heads * size
            numbers += queries + model.num_key_value_heads * size + queries * self.work.on_cpu
        width = self._count("intermediate_size")
        if self.trace.layers[index].experts:
            routed = model.num_experts_per_tok + self._count("n_shared_experts")
            width = routed * self._count("moe_intermediate_size", "intermediate_size")
        fused = not self.work.on_cpu and self.policy.megatron_cfg.bias_activation_fusion
        return (numbers + (-width if fused else width)) * self.tokens * self.itemsize
