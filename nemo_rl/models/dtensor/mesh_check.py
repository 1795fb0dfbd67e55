"""Check a mesh before Ray starts, and predict the memory of its ranks, without reading weights.

`check_mesh` finds settings that cannot work, and reports all of them together.

`DTensorRank` predicts the memory that a rank always uses, and the additional memory at each moment of a step. A moment
is a point of the step at which memory can be largest. `memory_trace` counts the tensors of the whole model, and this
module divides them by the axes of the mesh. The memory at a moment is summed by kind, so that a table shows which
setting to change.

Invariant: the bytes are those that torch's allocator uses on one rank, for the largest stage of a pipeline. Memory of
other libraries and fragmentation are not included. Source for the tensors that sequence parallelism divides:
Korthikanti et al. 2022 (arXiv:2205.05198).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import override

from transformers import PretrainedConfig

from nemo_rl.config import PolicyConfig
from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.data.images.families import FAMILIES
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.capacity.memory import WIDE, MemoryPlan, Moment, microbatches_in_flight
from nemo_rl.models.capacity.memory_trace import (
    GRADIENT_OF_LOGITS,
    NO_IMAGES,
    Activations,
    Images,
    Parameters,
    RankMemory,
)
from nemo_rl.models.capacity.tower_trace import trace_tower
from nemo_rl.models.dtensor.parallelize import KEPT_OPERATORS
from nemo_rl.models.dtensor.routers import configured_coefficient, in_a_pipeline
from nemo_rl.models.training.mesh_rules import (
    Divided,
    Mesh,
    check_context,
    check_experts,
    divided_layers,
    mixing_layers,
    routed_experts,
    vocabulary,
)
from nemo_rl.utils.errors import ConfigError

_TRAINED = ("policy", "value")
"""Sections of trained models, which can therefore have an auxiliary loss of experts."""

_RECURRENT = ("linear_attention", "mamba", "conv", "hybrid", "mlp", "moe", "layers without attention heads")
"""Kinds of layers in which context-parallel ranks may divide rows. The proof refuses unknown ones of these kinds."""

_PACKED_BY_TESTS = (
    *("cohere2", "deepseek_v3", "exaone4", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_neox", "gpt_oss", "granite"),
    *("llama", "ministral", "mistral", "mixtral", "olmo2", "olmo3", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe"),
    *("qwen3", "qwen3_moe", "smollm3", "starcoder2"),
)
"""Types whose packed rows tests compare with padded ones, so that a run need not prove them."""

type PlanFor = Callable[[PretrainedConfig], object]
"""Function that raises `ConfigError` if there is no tensor-parallel plan, or ranks do not divide heads of a layer."""


def check_mesh(
    policy: PolicyConfig,
    layout: ParallelLayout,
    model: PretrainedConfig,
    section: str = "policy",
    plan_for: PlanFor | None = None,
) -> Findings:
    """Yield the reasons why a model cannot be trained, or run for inference, on a mesh.

    Args:
        layout: axis sizes, from the section and the number of ranks.
        model: the model's configuration.
        section: name of the section, for messages.
        plan_for: checks that ranks can divide the model's layers; if None, this is not checked.
    """
    mesh = Mesh(f"{section}.{policy.backend_key}", policy, layout, model.get_text_config())
    yield from _check_direction(mesh.model, section)
    yield from _check_tensor(mesh)
    yield from check_experts(mesh)
    yield from check_context(mesh, _RECURRENT)
    if mesh.policy.dtensor_cfg.context_parallel_method == "ulysses":
        yield from _check_ulysses(mesh)
    yield from _check_pipeline(mesh)
    coefficient = configured_coefficient(mesh.model, policy.dtensor_cfg.moe_aux_loss_coeff)
    if coefficient and layout.pp > 1 and section in _TRAINED:
        yield in_a_pipeline(coefficient, layout.pp, section)
    exchanges = layout.cp > 1 and bool(mixing_layers(mesh.model))
    if (layout.tp > 1 or exchanges) and plan_for is not None:
        try:
            plan_for(model)
        except ConfigError as error:
            yield str(error)


def _check_direction(model: PretrainedConfig, section: str) -> Findings:
    """Check that tokens do not attend to later tokens, which padding and packing here rely on."""
    for field, reads_both in (("use_bidirectional_attention", (True, "all")), ("is_causal", (False,))):
        value = getattr(model, field, None)
        if value in reads_both:
            yield (
                f"{section}.model_name: tokens of this {model.model_type} also attend to later tokens ({field}="
                f"{value}), so its log-probabilities would depend on what they predict, and on padding. Choose a model "
                f"that reads from left to right, or set {section}.hf_config_overrides.{field}="
                f"{str(not value).lower() if isinstance(value, bool) else 'null'}."
            )
            return


def needs_proof(policy: PolicyConfig, layout: ParallelLayout, model: PretrainedConfig) -> bool:
    """Return whether rows and mesh must be tested on a small model before a run.

    They must be if ranks hold parts of the model or of rows, if rows are packed for layers that are no plain attention
    or for a type that tests do not pack, or if frequencies depend on a batch's longest row. The ranks test all packed
    rows again.
    """
    text = model.get_text_config()
    divided = layout.num_ranks > layout.data_parallel_size or layout.ep > 1
    plain = text.model_type in _PACKED_BY_TESTS and not mixing_layers(text)
    packed = policy.sequence_packing.enabled and model.model_type not in FAMILIES and not plain
    return divided or packed or "dynamic" in str(getattr(text, "rope_parameters", None))


def _check_tensor(mesh: Mesh) -> Findings:
    """Check that every size that tensor-parallel ranks divide is a multiple of the number of ranks."""
    if mesh.layout.tp > 1:
        yield from mesh.indivisible("tp", _divided_by_tensor(mesh))


def _divided_by_tensor(mesh: Mesh) -> Iterator[Divided]:
    yield from divided_layers(mesh)
    if not mesh.policy.reward_model_cfg.enabled:
        yield from vocabulary(mesh)
    if mesh.layout.ep == 1:
        yield from routed_experts(mesh)


def _check_ulysses(mesh: Mesh) -> Findings:
    """Check that context-parallel ranks can divide the heads of each tensor-parallel rank."""
    size, tp, total = mesh.layout.cp, mesh.layout.tp, mesh.count("num_attention_heads")
    if total is None or total % tp or (total // tp) % size == 0:
        return
    heads, given = total // tp, mesh.key("cp")
    on_rank = f" ({total} / tensor_parallel_size={tp})" if tp > 1 else ""
    fitting = [cp for cp in mesh.sizes("cp") if heads % cp == 0]
    yield (
        f"{given} with context_parallel_method=ulysses does not divide the {heads} attention heads of a rank{on_rank}: "
        f"{heads} / {size} = {heads / size:g}. {mesh.advice(size, fitting)} context_parallel_method=all_gather takes "
        "any number of heads."
    )


def _check_pipeline(mesh: Mesh) -> Findings:
    """Check that every chunk of every stage has a layer."""
    pp, layers = mesh.layout.pp, mesh.layers
    virtual = mesh.policy.dtensor_cfg.virtual_pipeline_size if pp > 1 else 1
    if pp == 1 or pp * virtual <= layers:
        return
    chunked = f" x virtual_pipeline_size={virtual}" if virtual > 1 else ""
    most = layers // pp
    fewer = f" Or virtual_pipeline_size={most}." if virtual > 1 and most else ""
    fitting = [size for size in mesh.sizes("pp") if size * virtual <= layers]
    yield (
        f"{mesh.key('pp')}{chunked} makes {pp * virtual} chunks of layers, and "
        f"{mesh.model.model_type} has {layers} layers (num_hidden_layers). {mesh.advice(pp, fitting)}{fewer}"
    )


_MOMENTS = {"adam": 2, "adamw": 2, "nadam": 2, "radam": 2, "adamax": 2, "adagrad": 1, "adadelta": 2, "lion": 1}
_LAYERS_GATHERED = 3
"""Number of layers whose gathered parameters are in memory at once: the current layer, its flat copy, and the next
layer. A pipeline stage instead gathers all of its layers once for all microbatches."""


class DTensorRank(RankMemory):
    """A rank of the PyTorch-native backend."""

    kept_operators = KEPT_OPERATORS

    @classmethod
    @override
    def images_of(cls, policy: PolicyConfig, model: PretrainedConfig, tokens: int) -> Images:
        if model.get_text_config() is model:
            return NO_IMAGES
        tower = trace_tower(model, policy)
        batching = policy.sequence_packing if policy.sequence_packing.enabled else policy.dynamic_batching
        patches = min(tokens * tower.patches_per_token, batching.max_patches or math.inf)
        return Images(tower.kept * patches, tower.block * patches, tower.frozen)

    @property
    def _layers(self) -> range:
        """Number of layers of this rank's stage. The first stages have one more if the layers do not divide evenly."""
        total, stages = len(self.trace.layers), self.layout.pp
        size, more = divmod(total, stages)
        first = self.stage * size + min(self.stage, more)
        return range(first, first + size + (self.stage < more))

    @property
    def _uses_fsdp(self) -> bool:
        offload = self.policy.dtensor_cfg.cpu_offload
        return self.layout.num_ranks > self.layout.pp or self.itemsize != WIDE or offload

    @property
    def _shards(self) -> int:
        return self.layout.dp_shard * self.layout.cp

    def _gathered(self, parameters: Parameters) -> float:
        """Return the number of elements on a rank after FSDP has gathered its shards."""
        layout = self.layout
        experts = parameters.experts / (layout.ep if layout.ep > 1 else layout.tp)
        return parameters.matrices / layout.tp + parameters.vectors + experts

    def _held(self, parameters: Parameters) -> float:
        """Return the number of elements that a rank stores."""
        layout = self.layout
        experts = parameters.experts / (self._shards * layout.tp)
        return (parameters.matrices / layout.tp + parameters.vectors) / self._shards + experts

    def plan(self) -> MemoryPlan:
        """Predict the memory of all moments of a step."""
        own = [self.trace.layers[index] for index in self._layers] + self.outside
        stored = sum(self._held(parameters) for parameters in own)
        lora = self.policy.dtensor_cfg.lora_cfg
        trained = stored - self.images.frozen / self._shards
        if lora.enabled:
            trained = self.trace.linears * lora.dim / (self._shards * self.layout.pp)
        weights = {"weights": stored * self._weight_size + (trained * WIDE if lora.enabled else 0.0)}
        host = self._host(stored)
        stays = weights | (host if self.work.on_cpu else {})
        if self.work.trains:
            stays |= {"optimizer state": self._moments(trained) * WIDE} | self.draft_model(self._shards)
        moments = self._training(trained * WIDE) if self.work.trains else {"forward pass": self._pass()}
        if self.policy.dtensor_cfg.cpu_offload and not self.work.on_cpu:
            host |= stays | {"gradients": trained * WIDE * self.work.trains}
            stays = {}
            moments = {name: {**held, "gradients": 0.0} for name, held in moments.items()}
        missing = "" if self.trace.activations else "Activations are not known for this architecture."
        return MemoryPlan(stays, moments, {} if self.work.on_cpu else host, missing)

    @property
    def _weight_size(self) -> int:
        """Bytes per stored weight: float32, or the compute precision for a frozen model on a GPU."""
        frozen = not self.work.trains and not self.work.keeps_reference and not self.work.on_cpu
        return self.itemsize if frozen else WIDE

    def _moments(self, trained: float) -> float:
        """Return the number of float32 moments of this many weights. Muon keeps one for weights of matrices."""
        assert self.policy.optimizer is not None, "a model that is trained has an optimizer"
        if not self.policy.optimizer.is_muon:
            return trained * self._moments_per_weight()
        layers = [replace(self.trace.layers[index], vectors=0) for index in self._layers]
        return 2 * trained - sum(self._held(parameters) for parameters in layers)

    def _moments_per_weight(self) -> int:
        """Return the number of float32 moments that an optimizer other than Muon keeps for each weight."""
        assert self.policy.optimizer is not None, "a model that is trained has an optimizer"
        name = self.policy.optimizer.name.rpartition(".")[2].lower()
        if name == "sgd":
            return int(bool(self.policy.optimizer.kwargs.get("momentum")))
        return _MOMENTS.get(name, 2)

    def _host(self, stored: float) -> dict[str, float]:
        """Return the bytes in host memory of the initial weights, and of the weights that they temporarily replace."""
        if not self.work.keeps_reference or self.policy.dtensor_cfg.lora_cfg.enabled:
            return {}
        return {"reference weights and their place": 2 * stored * WIDE}

    def _training(self, gradients: float) -> dict[str, Moment]:
        root = sum(self._gathered(parameters) for parameters in self.outside)
        logits = self.logits(GRADIENT_OF_LOGITS) + 2 * self.head
        fsdp = self._uses_fsdp
        gathered = {"gathered weights": self._gathered_at_once(root)}
        images = {"activations of images": self.images.kept}
        earlier = gathered | {"gradients": gradients if self.work.several else 0.0} | images
        kept, again = self._activations()
        unreduced = {"gradients before their reduction": root * (self.itemsize + WIDE) if fsdp else 0.0}
        update = {"optimizer's temporaries": 2 * self.largest / self._shards * WIDE if self.work.on_cpu else 0.0}
        return {
            "head backward": earlier | {"activations": kept + self.scalar_head(), "logits": logits},
            "layer backward": earlier | {"activations": kept + again, "logits": self.head},
            "embedding backward": gathered | unreduced | {"gradients": gradients, "activations": again} | images,
            "update": {"gradients": gradients} | update,
        }

    def _pass(self) -> dict[str, float]:
        """Return the memory of a forward pass without backward: one layer and the head at a time."""
        root = sum(self._gathered(parameters) for parameters in self.outside)
        one = max((self._kept(each) for each in self.trace.activations), default=0.0)
        activations = {"activations": one, "activations of images": self.images.block}
        return {"gathered weights": self._gathered_at_once(root), **activations, "logits": self.logits(2)}

    def _gathered_at_once(self, root: float) -> float:
        """Return the bytes of weights that are gathered at the same time.

        They are the `root` elements outside the layers, and those of a few layers or, if they stay gathered, of all.
        """
        if not self._uses_fsdp:
            return 0.0
        sizes = [self._gathered(self.trace.layers[index]) for index in self._layers]
        stay = self.layout.pp > 1 or self.policy.dtensor_cfg.keep_gathered
        layers = sum(sizes) if stay else _LAYERS_GATHERED * max(sizes, default=0.0)
        return (root + layers) * self.itemsize

    def _activations(self) -> tuple[float, float]:
        """Return the bytes of activations of all microbatches in flight, and the bytes that are recomputed."""
        activations = [self.trace.activations[index] for index in self._layers] if self.trace.activations else []
        how = self.policy.dtensor_cfg.activation_checkpointing
        sharing = self.layout.tp if self.policy.dtensor_cfg.sequence_parallel else 1
        whole, again = sum(self._kept(each) for each in activations), 0.0
        if how:
            again = max((self._kept(each) for each in activations), default=0.0)
            whole = sum(each.entry / sharing for each in activations)
        if how == "selective":
            whole += sum(each.kept / self.layout.tp for each in activations)
            again -= max((each.kept / self.layout.tp for each in activations), default=0.0)
        hidden = 2 * self.tokens * self.trace.hidden * self.itemsize / sharing
        in_flight = microbatches_in_flight(self.stage, self.layout.pp, self.policy.dtensor_cfg.virtual_pipeline_size)
        return whole * in_flight + self.trace.others / sharing + hidden, again

    def _kept(self, each: Activations) -> float:
        """Return the bytes that a layer stores for one microbatch with `tokens` tokens on this rank."""
        layout = self.layout
        sharing = layout.tp if self.policy.dtensor_cfg.sequence_parallel else 1
        gathers = layout.cp > 1 and self.policy.dtensor_cfg.context_parallel_method == "all_gather"
        # # With all_gather, a rank holds the keys of whole rows. CPUs have no kernel for pieces of a row, so they copy
        # the keys of each piece, which needs about as many bytes again. Otherwise, the keys of a shared prompt are
        # repeated for each of its sequences. Context parallelism does not support shared prompts.
        rows = layout.cp * (1 + self.work.on_cpu) if gathers else self.work.keys_per_token
        inside = (each.inside + each.keys_values * rows) / layout.tp
        return each.outside / sharing + each.into_blocks + inside
