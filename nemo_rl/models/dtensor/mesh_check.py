"""Check a mesh of the PyTorch-native backend before Ray starts and before a weight is read.

Invariant: all findings are reported together, and only settings that cannot work are findings.
"""

from collections.abc import Callable, Iterator

from transformers import PretrainedConfig

from nemo_rl.config import PolicyConfig
from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.dtensor.experts.balance import configured_coefficient, in_a_pipeline
from nemo_rl.models.training.mesh_rules import (
    Divided,
    Mesh,
    check_context,
    check_experts,
    divided_layers,
    routed_experts,
    vocabulary,
)
from nemo_rl.utils.errors import ConfigError

_TRAINED = ("policy", "value")
"""Sections of models that learn, and so have an auxiliary loss of experts."""

type PlanFor = Callable[[PretrainedConfig], object]
"""Returns the tensor-parallel plan of a model; raises `ConfigError` if it has none."""


def check_mesh(
    policy: PolicyConfig,
    layout: ParallelLayout,
    model: PretrainedConfig,
    section: str = "policy",
    plan_for: PlanFor | None = None,
) -> Findings:
    """Find the reasons why a model cannot be trained, or run for inference, on a mesh.

    Args:
        policy: section of the model.
        layout: axis sizes, from the section and the number of ranks.
        model: the model's configuration.
        section: name of the section, for messages.
        plan_for: finds the plan that divides the model's layers; None skips this check.
    """
    mesh = Mesh(f"{section}.{policy.backend_key}", policy, layout, model.get_text_config())
    yield from _check_tensor(mesh)
    yield from check_experts(mesh)
    yield from check_context(mesh)
    if mesh.policy.dtensor_cfg.context_parallel_method == "ulysses":
        yield from _check_ulysses(mesh)
    yield from _check_pipeline(mesh)
    coefficient = configured_coefficient(mesh.model, policy.dtensor_cfg.moe_aux_loss_coeff)
    if coefficient and layout.pp > 1 and section in _TRAINED:
        yield in_a_pipeline(coefficient, layout.pp, section)
    if layout.tp > 1 and plan_for is not None:
        try:
            plan_for(model)
        except ConfigError as error:
            yield str(error)


def needs_proof(layout: ParallelLayout, model: PretrainedConfig) -> bool:
    """Return whether a mesh must be proven on a small model: a rank holds only a part of the model or of a row.

    Also true if rotary frequencies may depend on the longest row of a batch.
    """
    divided = layout.num_ranks > layout.data_parallel_size or layout.ep > 1
    return divided or "dynamic" in str(getattr(model.get_text_config(), "rope_parameters", None))


def _check_tensor(mesh: Mesh) -> Findings:
    """Check that every size that tensor-parallel ranks divide is a multiple of their number."""
    if mesh.layout.tp > 1:
        yield from mesh.indivisible("tp", _divided_by_tensor(mesh))


def _divided_by_tensor(mesh: Mesh) -> Iterator[Divided]:
    yield from divided_layers(mesh)
    if not mesh.policy.reward_model_cfg.enabled:
        yield from vocabulary(mesh)
    if mesh.layout.ep == 1:
        yield from routed_experts(mesh)


def _check_ulysses(mesh: Mesh) -> Findings:
    """Check that the heads on each tensor-parallel rank divide among the context-parallel ranks."""
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
