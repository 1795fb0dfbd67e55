"""The PyTorch-native backend for runs and tools: checks of a configuration, and checkpoints without loading a model.

Checkpoints already hold safetensors under Hugging Face names (`checkpoints.model_files`), so an export copies them
(`huggingface.folders`), adds the tokenizer and optionally changes the dtype. Works for any head. See `adapter_export`
for adapters without merged weights. Invariant: `verify_export` compares the folder as `transformers` reads it with the
checkpoint as training reads it.
"""

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nemo_rl.config import CheckpointingConfig, PolicyConfig, report_findings
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.files.manifest import find_damage
from nemo_rl.models.accepted_rows import AcceptedRows
from nemo_rl.models.huggingface.folders import (
    CONSOLIDATED_FOLDER,
    MODEL_FOLDER,
    TENSOR_FILES,
    TOKENIZER_FILES,
    copy_model_folder,
    require_empty,
)
from nemo_rl.models.huggingface.sizes import count_parameters
from nemo_rl.models.training.backends import TrainingBackend
from nemo_rl.utils.errors import CheckpointError, ConfigError

if TYPE_CHECKING:  # see `models.training.backends`
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from nemo_rl.models.capacity.rank_memory import RankMemory
    from nemo_rl.models.huggingface.comparison import ExportCheck

logger = logging.getLogger(__name__)


class DTensorTraining(TrainingBackend):
    """FSDP2 over a Hugging Face model; `model/` in the weights folder loads with `from_pretrained`."""

    rank_class = "nemo_rl.models.dtensor.backend.DTensorBackend"
    offloads_trained_weights = True

    def check(self, policy: PolicyConfig, num_ranks: int, section: str = "policy") -> None:
        """Check optimizer, schedule and mesh, and prove the mesh on a small model; see `TrainingBackend.check`."""
        try:
            layout = ParallelLayout.of(policy, num_ranks)
        except ConfigError as error:
            raise ConfigError(f"{section}.dtensor_cfg: {error}") from error
        if section == "policy":
            self._check_optimizer(policy)
        from nemo_rl.models.dtensor.mesh_check import check_mesh, needs_proof
        from nemo_rl.models.huggingface.load import load_model_config

        model = load_model_config(policy.model_name, policy.hf_config_overrides, section)
        report_findings(check_mesh(policy, layout, model, section, partial(_require_plan, policy)))
        if needs_proof(layout, model):
            from nemo_rl.models.dtensor.proof import prove_mesh

            prove_mesh(policy, layout, model, section)

    def accepted_rows(self, policy: PolicyConfig) -> AcceptedRows:
        """See `TrainingBackend.accepted_rows`: all rows, unless stages or ranks divide what belongs to a row."""
        section = policy.training_backend or policy.dtensor_cfg
        sizes = {"pipeline": section.pipeline_parallel_size, "context": section.context_parallel_size}
        divided = [f"{name}_parallel_size={size}" for name, size in sizes.items() if size > 1]
        reader = f"policy.{policy.backend_key}{''.join(f' with {size}' for size in divided)}"
        return AcceptedRows(reader, inputs=not divided, positions=not divided)

    def rank_memory(self) -> "type[RankMemory]":
        """See `TrainingBackend.rank_memory`."""
        from nemo_rl.models.dtensor.memory_plan import DTensorRank

        return DTensorRank

    @staticmethod
    def _check_optimizer(policy: PolicyConfig) -> None:
        from nemo_rl.models.dtensor.optimizer import build_optimizer, build_scheduler, check_classes

        check_classes(policy)
        if policy.optimizer is not None:
            optimizer = build_optimizer([torch.nn.Parameter(torch.zeros(1, 1))], policy.optimizer)
            build_scheduler(optimizer, policy.scheduler)

    def complete_checkpoint(self, weights: Path, tokenizer: "PreTrainedTokenizerBase", precision: str | None) -> None:
        """Write the tokenizer into `model/`, and optionally a copy in `precision` into `model/consolidated/`."""
        from nemo_rl.models.huggingface.load import torch_dtype

        model = weights / MODEL_FOLDER
        tokenizer.save_pretrained(str(model))
        if precision is not None:
            copy_model_folder(model, model / CONSOLIDATED_FOLDER, torch_dtype(precision))

    def checkpoint_bytes(self, policy: PolicyConfig, checkpointing: CheckpointingConfig) -> int | None:
        """Return a lower bound: float32 weights (twice while parts are joined), Adam's moments, consolidated model."""
        parameters = count_parameters(policy.model_name)
        if parameters is None:
            return None
        weights = 4 * parameters
        has_moments = policy.optimizer is not None and "adam" in policy.optimizer.name.lower()
        trains_all = not policy.dtensor_cfg.lora_cfg.enabled
        moments = 2 * weights if checkpointing.save_optimizer and has_moments and trains_all else 0
        to_hand_on = weights if policy.precision == "float32" else weights // 2
        return max(2 * weights, weights + moments + (to_hand_on if checkpointing.save_consolidated else 0))

    def find_weights(self, path: Path) -> Path:
        """Return the folder that holds `model/`.

        Args:
            path: a step folder, its `policy`, `policy/weights` or `policy/weights/model`.

        Raises:
            CheckpointError: none of these holds weights.
        """
        given = path.expanduser()
        for folder in (given, given / "weights", given / "policy" / "weights", given.parent):
            if any((folder / MODEL_FOLDER).glob(TENSOR_FILES)) and (
                folder != given.parent or given.name == MODEL_FOLDER
            ):
                return folder
        raise CheckpointError(
            f"{str(given)!r} is no policy checkpoint: neither it nor its policy/weights has a folder {MODEL_FOLDER} "
            f"with {TENSOR_FILES} files. Give a step folder, for example results/grpo/step_10, or its policy/weights."
        )

    def export(self, weights: Path, target: Path, tokenizer_name: str | None = None, dtype: str | None = None) -> None:
        """See `TrainingBackend.export`.

        Raises:
            CheckpointError: the target already holds files, there is no tokenizer, or a file of the weights is damaged.
            ConfigError: the dtype is unknown.
        """
        from transformers import AutoTokenizer

        from nemo_rl.models.huggingface.load import torch_dtype

        source = weights / MODEL_FOLDER
        require_empty(target)
        tokenizer_files = [source / name for name in TOKENIZER_FILES if (source / name).exists()]
        if not tokenizer_files and tokenizer_name is None:
            raise CheckpointError(
                f"{source} has no tokenizer. Name one: policy.tokenizer.name in the file of --config."
            )
        damage = find_damage(weights.absolute().parents[1], "policy/weights/")
        if damage:
            raise CheckpointError(f"{weights} is damaged: {'; '.join(damage)}. Export another checkpoint.")
        copy_model_folder(source, target, None if dtype is None else torch_dtype(dtype))
        if not tokenizer_files:
            AutoTokenizer.from_pretrained(tokenizer_name).save_pretrained(target)
        logger.info("Exported %s to %s.", source, target)

    def verify_export(self, weights: Path, target: Path) -> "ExportCheck":
        """See `TrainingBackend.verify_export`; compares in float32 on the CPU.

        The reader of training loads the checkpoint into a model with random weights, and `from_pretrained` loads the
        exported folder. The two readers share only the rules for names and shapes.

        Raises:
            CheckpointError: the weights do not fit the model.
        """
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

        from nemo_rl.models.dtensor.checkpoints.model_files import load_weights
        from nemo_rl.models.huggingface.comparison import SCORING_SUFFIX, compare_models

        config = AutoConfig.from_pretrained(weights / MODEL_FOLDER)
        scores = any(name.endswith(SCORING_SUFFIX) for name in config.architectures or ())
        kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
        trained = kind.from_config(config, dtype=torch.float32).eval()
        load_weights(trained, weights)
        exported = kind.from_pretrained(target, dtype=torch.float32).eval()
        return compare_models(trained, exported, AutoTokenizer.from_pretrained(target))


def _require_plan(policy: PolicyConfig, model: "PretrainedConfig") -> None:
    """Raise a ConfigError if there is no plan of how tensor-parallel ranks divide the model's layers."""
    from nemo_rl.models.dtensor.tensor_parallel.plans import plan_for_configuration

    plan_for_configuration(model, policy.dtensor_cfg.custom_parallel_plan, scores=policy.reward_model_cfg.enabled)
