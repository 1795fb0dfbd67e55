"""Implement the Megatron Core backend for runs and tools, which check configurations and convert checkpoints.

The module does not import megatron, because the import changes the process (streams, compiled kernels, and on CPUs a
replacement for CUDA). Only processes of ranks may be changed.
"""

import logging
import os
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, override

from nemo_rl.config import CheckpointingConfig, PolicyConfig, report_findings
from nemo_rl.config.rules.megatron import check_adapters_of_experts
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.accepted_rows import AcceptedRows
from nemo_rl.models.capacity.memory import microbatch_tokens
from nemo_rl.models.megatron.checkpoints import ITERATION
from nemo_rl.models.training.backends import FolderBackend

if TYPE_CHECKING:  # see `models.training.backends`
    import torch
    from transformers import PreTrainedModel

    from nemo_rl.models.capacity.memory_trace import RankMemory


logger = logging.getLogger(__name__)

CACHE_VARIABLE = "NRL_MEGATRON_CHECKPOINT_DIR"
"""Environment variable with NeMo RL's folder of converted models."""

_BATCHED_MESSAGES = "NVTE_BATCH_MHA_P2P_COMM"

_MOST_ROUNDED_SUMS = 8
"""Largest number of microbatches whose gradients are summed in a 16-bit dtype without a warning."""


def _warn_of_rounded_sums(policy: PolicyConfig, layout: ParallelLayout) -> None:
    """Warn if gradients of many microbatches are summed in 16 bits.

    A bfloat16 sum loses terms below 1/256 of its value, so its error grows with the number of microbatches.
    """
    if policy.precision == "float32" or policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32:
        return
    rows = policy.train_global_batch_size // layout.data_parallel_size
    microbatches = rows * policy.max_total_sequence_length // microbatch_tokens(policy, trains=True)
    if microbatches > _MOST_ROUNDED_SUMS:
        logger.warning(
            "Gradients of up to %d microbatches are summed in %s, which loses small ones. "
            "policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32=true sums them in float32.",
            microbatches,
            policy.precision,
        )


class MegatronTraining(FolderBackend):
    """Megatron Core's models, schedules and optimizers. Checkpoints have the format of `dist_checkpointing`."""

    section = "megatron_cfg"
    kind = " of Megatron Core"
    tensor_folder, tensor_files = ITERATION, ".metadata"
    rank_class = "nemo_rl.models.megatron.backend.MegatronBackend"

    def check(self, policy: PolicyConfig, num_ranks: int, section: str = "policy") -> None:
        """Check the mesh, the model's configuration and the options (`TrainingBackend.check`)."""
        self.check_sizes(policy, num_ranks, section)
        if section == "policy":
            _warn_of_rounded_sums(policy, self.layout_of(policy, num_ranks, section))
        if section == "policy" and CACHE_VARIABLE in os.environ:
            logger.info("%s has no effect: every rank reads its part of the Hugging Face files.", CACHE_VARIABLE)

    def check_sizes(self, policy: PolicyConfig, num_ranks: int, section: str = "policy") -> None:
        """Check as `check` does, but without warnings (`TrainingBackend.check_sizes`)."""
        layout = self.layout_of(policy, num_ranks, section)
        from nemo_rl.models.draft.choice import check_draft
        from nemo_rl.models.huggingface.load import load_model_config
        from nemo_rl.models.megatron.mesh_check import check_mesh
        from nemo_rl.models.megatron.model.families import text_part
        from nemo_rl.models.megatron.model.model_check import check_expressible, check_mtp, check_options

        model = text_part(load_model_config(policy.model_name, policy.hf_config_overrides, section))
        report_findings(check_mesh(policy, layout, model, section))
        report_findings(check_draft(policy))
        fields = check_expressible(model)
        options = check_options(f"{section}.megatron_cfg", policy.megatron_cfg, fields)
        of_experts = check_adapters_of_experts(section, policy.megatron_cfg, fields)
        report_findings(chain(options, check_mtp(section, policy, model), of_experts))

    def accepted_rows(self, policy: PolicyConfig) -> AcceptedRows:
        """Return that only rows of plain token ids are accepted (`TrainingBackend.accepted_rows`)."""
        return AcceptedRows("policy.megatron_cfg (Megatron Core)")

    @override
    def rank_memory(self) -> "type[RankMemory]":
        from nemo_rl.models.megatron.mesh_check import MeshPlace

        return MeshPlace

    def environment(self, policy: PolicyConfig) -> dict[str, str]:
        """Return variables that limit GPUs to one hardware queue, and batch the messages of context parallelism.

        Megatron Core starts a transfer before the product that overlaps with it, and relies on the GPU to keep this
        order (`core/tensor_parallel/layers.py`), which one hardware queue guarantees.

        With more than two context-parallel ranks, Transformer Engine sends to the next rank and receives from the
        previous rank in separate calls. For such calls, NCCL makes a communicator per pair of ranks at its first use,
        in a different order on each rank. Batched messages use the communicator of the whole group instead. If the
        environment sets this variable, its value is kept.
        """
        section = policy.megatron_cfg
        divided = section.tensor_model_parallel_size > 1 or section.context_parallel_size > 1
        variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if divided else {}
        if section.context_parallel_size > 2:
            variables[_BATCHED_MESSAGES] = os.environ.get(_BATCHED_MESSAGES, "1")
        return variables

    @override
    def checkpoint_bytes(self, policy: PolicyConfig, checkpointing: CheckpointingConfig) -> int | None:
        from nemo_rl.models.megatron.checkpoints.folder import checkpoint_bytes

        return checkpoint_bytes(policy, checkpointing)

    @override
    def described_folder(self, weights: Path) -> Path:
        return weights

    @override
    def write_model(self, weights: Path, target: Path, dtype: "torch.dtype | None") -> None:
        from nemo_rl.models.megatron.checkpoints.folder import write_model

        write_model(weights, target, dtype)

    @override
    def read_into(self, model: "PreTrainedModel", weights: Path) -> None:
        from nemo_rl.models.megatron.checkpoints.folder import read_into

        read_into(model, weights)
