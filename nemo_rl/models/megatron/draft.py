"""Train a draft model (`models.draft`) with a model of Megatron Core."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import SGD, AdamW, Optimizer

from nemo_rl.config import PolicyConfig
from nemo_rl.config.schema.model.megatron import MegatronOptimizerConfig
from nemo_rl.distributed.ranks.collectives import all_gather
from nemo_rl.models.draft.trainer import DraftModel, DraftRows, DraftTrainer, Taps, build_draft_model
from nemo_rl.models.huggingface.layers import first_tensor
from nemo_rl.models.huggingface.load import torch_dtype
from nemo_rl.models.megatron.inputs import RankInputs
from nemo_rl.models.megatron.model.build import unwrap
from nemo_rl.models.megatron.parallel import ParallelGroups


def draft_trainer(
    config: PolicyConfig, chunks: Sequence[Any], groups: ParallelGroups, device: torch.device, seed: int
) -> DraftTrainer:
    """Build the draft model, its optimizer, and its hooks on the policy. The call is collective.

    Args:
        config: the policy section; the model has no pipeline stages.
        chunks: the only chunk of this rank.
        seed: run seed, for the weights of a new draft model.
    """
    (chunk,) = chunks
    model, section = unwrap(chunk), config.megatron_cfg
    ranks = parallel_state.get_data_parallel_group()
    mesh = DeviceMesh.from_group(ranks, device.type)
    draft = build_draft_model(config, mesh, torch_dtype(config.precision), device, seed)

    def rows_of(output: Any) -> Tensor:
        hidden = first_tensor(output)  # `[t, b, D]`
        if groups.sequence_parallel:
            hidden = all_gather(hidden, 0, groups.tp, partial_gradient=False)
        return hidden.transpose(0, 1)

    return DraftTrainer(
        draft,
        Taps(model.embedding, list(model.decoder.layers), draft.head.shape.tapped_layers, rows_of),
        _optimizer(draft, section.optimizer),
        max_grad_norm=section.optimizer.clip_grad,
        loss_weight=config.draft.loss_weight,
        groups=[ranks],
    )


def draft_rows(inputs: RankInputs) -> DraftRows:
    """Return the draft model's inputs for a microbatch: positions, scored tokens and sequence boundaries."""
    positions_bt = inputs.arguments["position_ids"]
    rows, width = positions_bt.shape
    places_k = inputs.positions_k % rows * width + inputs.positions_k // rows
    packed = inputs.arguments.get("packed_seq_params")
    if packed is None:
        return DraftRows(positions_bt, places_k)
    return DraftRows(positions_bt, places_k, packed.cu_seqlens_q, packed.max_seqlen_q)


def _optimizer(draft: DraftModel, wanted: MegatronOptimizerConfig) -> Optimizer:
    """Build the optimizer with the settings of `policy.megatron_cfg.optimizer`. Vectors have no weight decay."""
    matrices = [parameter for parameter in draft.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in draft.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": wanted.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if wanted.optimizer == "sgd":
        return SGD(groups, lr=wanted.lr, momentum=wanted.sgd_momentum)
    return AdamW(groups, lr=wanted.lr, betas=(wanted.adam_beta1, wanted.adam_beta2), eps=wanted.adam_eps)
