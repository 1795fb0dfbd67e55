"""Export checkpoints of the library's own backends: folders with tensors, a Hugging Face configuration and a tokenizer.

A backend says where its tensors and its configuration are, how an exported model is written, and how the weights of a
checkpoint are read into a model of transformers. Invariant: `verify_export` compares the exported folder as
`transformers` reads it with the checkpoint as the backend reads it.
"""

import logging
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.files.manifest import find_damage
from nemo_rl.host.waiting_log import StillWaiting
from nemo_rl.models.huggingface.folders import CONSOLIDATED_FOLDER, MODEL_FOLDER, TOKENIZER_FILES, require_empty
from nemo_rl.models.training.backends import TrainingBackend
from nemo_rl.utils.errors import CheckpointError, ConfigError

if TYPE_CHECKING:  # see `models.training.backends`
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from nemo_rl.models.huggingface.comparison import ExportCheck

logger = logging.getLogger(__name__)


class FolderBackend(TrainingBackend):
    """A backend whose checkpoints are folders of one model."""

    section: ClassVar[str]
    """Its section in the policy."""
    kind: ClassVar[str] = ""
    """Addition to "policy checkpoint" in messages."""
    tensor_folder: ClassVar[str]
    """Subfolder of a weights folder that holds the tensors."""
    tensor_files: ClassVar[str]
    """Pattern of files in this subfolder."""

    @abstractmethod
    def described_folder(self, weights: Path) -> Path:
        """Return the folder with the configuration and the tokenizer of a checkpoint."""

    @abstractmethod
    def write_model(self, weights: Path, target: Path, dtype: torch.dtype | None) -> None:
        """Write the model of a checkpoint as a folder that `from_pretrained` loads; None keeps the dtype."""

    @abstractmethod
    def read_into(self, model: "PreTrainedModel", weights: Path) -> None:
        """Read the weights of a checkpoint into a model on the CPU.

        Raises:
            CheckpointError: the weights do not fit the model.
        """

    def layout_of(self, policy: PolicyConfig, num_ranks: int, section: str) -> ParallelLayout:
        """Return the axis sizes of a model's section.

        Raises:
            ConfigError: the ranks do not divide into them; names the section.
        """
        try:
            return ParallelLayout.of(policy, num_ranks)
        except ConfigError as error:
            raise ConfigError(f"{section}.{self.section}: {error}") from error

    def complete_checkpoint(self, weights: Path, tokenizer: "PreTrainedTokenizerBase", precision: str | None) -> None:
        """Write the tokenizer, and optionally a copy of the model in `precision` into `model/consolidated`."""
        from nemo_rl.models.huggingface.load import torch_dtype

        tokenizer.save_pretrained(str(self.described_folder(weights)))
        if precision is not None:
            self.write_model(weights, weights / MODEL_FOLDER / CONSOLIDATED_FOLDER, torch_dtype(precision))

    def find_weights(self, path: Path) -> Path:
        """Return the weights folder.

        Args:
            path: a step folder, its `policy`, `policy/weights` or the subfolder of that with the tensors.

        Raises:
            CheckpointError: none of these holds weights.
        """
        given = path.expanduser()
        for folder in (given, given / "weights", given / "policy" / "weights", given.parent):
            if any((folder / self.tensor_folder).glob(self.tensor_files)) and (
                folder != given.parent or given.name == self.tensor_folder
            ):
                return folder
        raise CheckpointError(
            f"{str(given)!r} is no policy checkpoint{self.kind}: neither it nor its policy/weights has a folder "
            f"{self.tensor_folder} with {self.tensor_files}. Give a step folder, for example "
            "results/grpo/step_10, or its policy/weights."
        )

    def export(self, weights: Path, target: Path, tokenizer_name: str | None = None, dtype: str | None = None) -> None:
        """See `TrainingBackend.export`.

        Raises:
            CheckpointError: the target already holds files, there is no tokenizer, a file of the weights is damaged, or
                the weights do not fit the configuration in their folder.
            ConfigError: the dtype is unknown.
        """
        from transformers import AutoTokenizer

        from nemo_rl.models.huggingface.load import torch_dtype

        require_empty(target)
        source = self.described_folder(weights)
        has_tokenizer = any((source / name).exists() for name in TOKENIZER_FILES)
        if not has_tokenizer and tokenizer_name is None:
            raise CheckpointError(
                f"{source} has no tokenizer. Name one: policy.tokenizer.name in the file of --config."
            )
        damage = find_damage(weights.absolute().parents[1], "policy/weights/")
        if damage:
            raise CheckpointError(f"{weights} is damaged: {'; '.join(damage)}. Export another checkpoint.")
        self.write_model(weights, target, None if dtype is None else torch_dtype(dtype))
        if not has_tokenizer:
            AutoTokenizer.from_pretrained(tokenizer_name, trust_remote_code=False).save_pretrained(target)
        logger.info("Exported %s to %s.", source, target)

    def verify_export(self, weights: Path, target: Path) -> "ExportCheck":
        """See `TrainingBackend.verify_export`; compares in float32 on the CPU.

        The checkpoint is read into a model with random weights, the exported folder by `from_pretrained`. The wait is
        shown on the console.

        Raises:
            CheckpointError: the weights do not fit the model.
        """
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

        from nemo_rl.models.huggingface.comparison import compare_models, is_classifier

        def check() -> "ExportCheck":
            config = AutoConfig.from_pretrained(self.described_folder(weights), trust_remote_code=False)
            kind = AutoModelForSequenceClassification if is_classifier(config) else AutoModelForCausalLM
            trained = kind.from_config(config, dtype=torch.float32).eval()
            self.read_into(trained, weights)
            exported = kind.from_pretrained(target, dtype=torch.float32).eval()
            return compare_models(trained, exported, AutoTokenizer.from_pretrained(target, trust_remote_code=False))

        with StillWaiting(f"the comparison of {target}", "it is running") as progress:
            return progress.during(check)
