"""Implement the PyTorch-native backend for runs and tools, which check configurations and convert checkpoints.

Checkpoints already hold safetensors under Hugging Face names (`checkpoints.model_files`). An export copies these files
(`huggingface.folders`), adds the tokenizer and optionally changes the dtype. This works for models with any head.
`checkpoints.lora_export` exports adapters that have no merged weights.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, override

import torch

from nemo_rl.config import CheckpointingConfig, PolicyConfig, report_findings
from nemo_rl.models.accepted_rows import AcceptedRows
from nemo_rl.models.huggingface.folders import MODEL_FOLDER, TENSOR_FILES, copy_model_folder
from nemo_rl.models.huggingface.sizes import count_parameters
from nemo_rl.models.training.backends import FolderBackend

if TYPE_CHECKING:  # see `models.training.backends`
    from transformers import PretrainedConfig, PreTrainedModel

    from nemo_rl.models.capacity.memory_trace import RankMemory


class DTensorTraining(FolderBackend):
    """FSDP2 over a Hugging Face model. `from_pretrained` can load the folder `model/` of a checkpoint's weights."""

    section = "dtensor_cfg"
    tensor_folder, tensor_files = MODEL_FOLDER, TENSOR_FILES
    rank_class = "nemo_rl.models.dtensor.backend.DTensorBackend"
    offloads_trained_weights = True

    def check(self, policy: PolicyConfig, num_ranks: int, section: str = "policy") -> None:
        """Check optimizer, schedule and mesh, and prove the mesh on a small model (`TrainingBackend.check`)."""
        from nemo_rl.models.dtensor.optimizer import check_optimizer

        check_optimizer(policy, section)
        self.check_sizes(policy, num_ranks, section)
        from nemo_rl.models.dtensor.mesh_check import needs_proof
        from nemo_rl.models.huggingface.load import load_model_config

        layout = self.layout_of(policy, num_ranks, section)
        model = load_model_config(policy.model_name, policy.hf_config_overrides, section)
        if needs_proof(policy, layout, model):
            from nemo_rl.models.dtensor.proof import prove_mesh

            prove_mesh(policy, layout, model, section)

    def check_sizes(self, policy: PolicyConfig, num_ranks: int, section: str = "policy") -> None:
        """Check the mesh without a proof (`TrainingBackend.check_sizes`)."""
        layout = self.layout_of(policy, num_ranks, section)
        from nemo_rl.models.draft.choice import check_draft
        from nemo_rl.models.dtensor.mesh_check import check_mesh
        from nemo_rl.models.huggingface.load import load_model_config, require_text_model

        model = load_model_config(policy.model_name, policy.hf_config_overrides, section)
        if not policy.reward_model_cfg.enabled:
            require_text_model(model, policy.model_name, section)
        report_findings(check_mesh(policy, layout, model, section, partial(_require_division, policy)))
        if layout.tp > 1:
            _require_shapes(policy, model, dispatched=layout.ep > 1)
        report_findings(check_draft(policy))
        if policy.router_replay.enabled:
            from nemo_rl.models.dtensor.routers import check_configuration

            check_configuration(model)

    def accepted_rows(self, policy: PolicyConfig) -> AcceptedRows:
        """Return the accepted rows. Pipeline and context parallelism accept plain token ids only."""
        section = policy.training_backend or policy.dtensor_cfg
        sizes = {"pipeline": section.pipeline_parallel_size, "context": section.context_parallel_size}
        divided = [f"{name}_parallel_size={size}" for name, size in sizes.items() if size > 1]
        reader = f"policy.{policy.backend_key}{''.join(f' with {size}' for size in divided)}"
        return AcceptedRows(reader, inputs=not divided, positions=not divided, images=not divided)

    @override
    def rank_memory(self) -> "type[RankMemory]":
        from nemo_rl.models.dtensor.mesh_check import DTensorRank

        return DTensorRank

    def checkpoint_bytes(self, policy: PolicyConfig, checkpointing: CheckpointingConfig) -> int | None:
        """Return a lower bound of a checkpoint's bytes while it is written, or None if it is unknown.

        It counts float32 weights, twice while their parts are joined, moments of Adam or Muon and the consolidated
        model.
        """
        parameters = count_parameters(policy.model_name)
        if parameters is None:
            return None
        weights = 4 * parameters
        name = "" if policy.optimizer is None else policy.optimizer.name.lower()
        saves_all = checkpointing.save_optimizer and not policy.dtensor_cfg.lora_cfg.enabled
        moments = weights * (2 if "adam" in name else 1 if "muon" in name else 0) * saves_all
        to_hand_on = weights if policy.precision == "float32" else weights // 2
        return max(2 * weights, weights + moments + (to_hand_on if checkpointing.save_consolidated else 0))

    @override
    def described_folder(self, weights: Path) -> Path:
        return weights / MODEL_FOLDER

    @override
    def write_model(self, weights: Path, target: Path, dtype: torch.dtype | None) -> None:
        copy_model_folder(weights / MODEL_FOLDER, target, dtype)

    def read_into(self, model: "PreTrainedModel", weights: Path) -> None:
        """Read a folder as training does (`FolderBackend.read_into`)."""
        from nemo_rl.models.dtensor.checkpoints.model_files import load_weights

        load_weights(model, weights)


def _require_shapes(policy: PolicyConfig, model: "PretrainedConfig", *, dispatched: bool) -> None:
    """Raise a ConfigError if tensor-parallel ranks cannot divide a weight of the whole model equally."""
    from nemo_rl.models.dtensor.expert_parallel import find_experts
    from nemo_rl.models.dtensor.tensor_parallel import require_divisible
    from nemo_rl.models.huggingface.tensor_plans import made_without_weights, plan_for

    section = policy.dtensor_cfg
    hf = made_without_weights(model, scores=policy.reward_model_cfg.enabled)
    plan = plan_for(hf, section.custom_parallel_plan)
    require_divisible(hf, plan, section.tensor_parallel_size, experts=[*find_experts(hf)], dispatched=dispatched)


def _require_division(policy: PolicyConfig, model: "PretrainedConfig") -> None:
    """Raise a ConfigError if tensor- or context-parallel ranks cannot divide the model's layers."""
    from nemo_rl.models.huggingface.mixers import require_whole_heads
    from nemo_rl.models.huggingface.tensor_plans import made_without_weights, plan_for

    section = policy.dtensor_cfg
    hf = made_without_weights(model, scores=policy.reward_model_cfg.enabled)
    if section.tensor_parallel_size > 1:
        plan_for(hf, section.custom_parallel_plan)
    divides_heads = section.custom_parallel_plan is None
    require_whole_heads(hf, section.tensor_parallel_size if divides_heads else 1, section.context_parallel_size)
