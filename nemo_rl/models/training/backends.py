"""Choose the training backend of a configuration, and check runs and convert checkpoints without a model.

`TrainingBackend` is used in the controller, in tools and before Ray starts. It names the `PolicyBackend` that each rank
builds. Invariant: only a backend depends on the contents of the folders `weights` and `optimizer` of a checkpoint.

`FolderBackend` exports checkpoints of the library's own backends, which are folders with tensors, a Hugging Face
configuration and a tokenizer. A subclass defines where its tensors and its configuration are, how an exported model is
written, and how a checkpoint's weights are read into a model of transformers. Invariant: `verify_export` compares the
exported folder, read by `transformers`, with the checkpoint, read by the backend.
"""

import json
import logging
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import yaml

from nemo_rl.config import CheckpointingConfig, PolicyConfig
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.files.manifest import find_damage
from nemo_rl.files.regular_file import read_text
from nemo_rl.files.trusted_code import may_run
from nemo_rl.host.waiting_log import StillWaiting
from nemo_rl.models.accepted_rows import AcceptedRows
from nemo_rl.models.capacity.memory import MemoryPlan, Work, keys_per_token, microbatch_tokens
from nemo_rl.models.huggingface.folders import (
    CONSOLIDATED_FOLDER,
    MODEL_FOLDER,
    TOKENIZER_FILES,
    require_empty,
    save_tokenizer,
)
from nemo_rl.utils.errors import CheckpointError, ConfigError
from nemo_rl.utils.named_parts import Registry, check_own_keys

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from nemo_rl.models.capacity.memory_trace import RankMemory
    from nemo_rl.models.huggingface.comparison import ExportCheck

BACKENDS = {
    "dtensor_cfg": "nemo_rl.models.dtensor.training_backend.DTensorTraining",
    "megatron_cfg": "nemo_rl.models.megatron.training_backend.MegatronTraining",
}
"""Classes of the library's backends, by the section of `policy` that enables them. The first one is the default."""


class TrainingBackend(ABC):
    """The part of a training backend that the controller and tools use.

    Worker ranks use the `PolicyBackend` named by `rank_class`. This class imports no library that only the ranks need.
    """

    rank_class: ClassVar[str]
    """Dotted name of the backend's `PolicyBackend`, which is imported in the ranks."""

    config_class: ClassVar[type | None] = None
    """Dataclass or pydantic model that `training_backend.kwargs` must match. If None, the kwargs are not checked."""
    offloads_trained_weights: ClassVar[bool] = False
    """Whether `PolicyBackend.move_weights` also moves the weights of a model with an optimizer."""

    @abstractmethod
    def check(self, policy: PolicyConfig, num_ranks: int, section: str = "policy") -> None:
        """Refuse a model that cannot be trained or scored, before Ray starts.

        Args:
            num_ranks: Number of processes that hold the model.
            section: Name of the section, for messages. `policy` is the model that is trained.

        Raises:
            ConfigError: The model is refused. The message names the keys.
        """

    def check_sizes(self, policy: PolicyConfig, num_ranks: int, section: str = "policy") -> None:
        """Make those checks of `check` that take milliseconds, for a search through hundreds of meshes.

        Args:
            num_ranks: Number of processes that hold the model.
            section: Name of the section, for messages.

        Raises:
            ConfigError: As in `check`.
        """
        self.check(policy, num_ranks, section)

    def accepted_rows(self, policy: PolicyConfig) -> AcceptedRows:
        """Return the rows that ranks accept. `Policy` refuses all others. By default, only token ids are accepted."""
        return AcceptedRows(type(self).__name__)

    def environment(self, policy: PolicyConfig) -> dict[str, str]:
        """Return environment variables of the ranks. `env_vars` in the backend's section overrides them."""
        return {}

    def rank_memory(self) -> "type[RankMemory] | None":
        """Return the class that predicts the memory of a rank. By default, return None, for no prediction."""
        return None

    def predict_memory(
        self,
        policy: PolicyConfig,
        num_ranks: int,
        *,
        trains: bool,
        keeps_reference: bool,
        on_gpu: bool,
        rows_per_prompt: int = 1,
        rows_per_sample: int = 1,
    ) -> MemoryPlan | None:
        """Predict the memory of the rank that needs the most, for the largest microbatch of the section.

        Args:
            num_ranks: Number of processes that hold the model.
            trains: Whether the model has an optimizer.
            keeps_reference: Whether its initial weights are kept.
            rows_per_prompt: Number of sequences of a batch with the same prompt.
            rows_per_sample: Number of rows of a sample: 2 for pairs, whose scores a loss compares.

        Returns:
            The plan, or None if the backend has no prediction.
        """
        memory = self.rank_memory()
        if memory is None:
            return None
        from nemo_rl.models.huggingface.load import load_model_config

        tokens = microbatch_tokens(policy, trains=trains, rows_per_sample=rows_per_sample)
        keys = keys_per_token(policy, rows_per_prompt)
        work = Work(
            tokens,
            trains=trains,
            keeps_reference=keeps_reference,
            on_cpu=not on_gpu,
            keys_per_token=keys,
            scores_rows=rows_per_sample > 1,
        )
        model = load_model_config(policy.model_name, policy.hf_config_overrides)
        return memory.predict(policy, ParallelLayout.of(policy, num_ranks), model, work)

    @abstractmethod
    def complete_checkpoint(self, weights: Path, tokenizer: "PreTrainedTokenizerBase", precision: str | None) -> None:
        """Add the files that a single process writes to a checkpoint of all ranks.

        Args:
            weights: The folder that the ranks have written.
            tokenizer: Tokenizer to save next to the weights, if the folder can then be loaded by itself.
            precision: Number format of an additional Hugging Face model for other programs. If None, it is not written.
        """

    @abstractmethod
    def checkpoint_bytes(self, policy: PolicyConfig, checkpointing: CheckpointingConfig) -> int | None:
        """Return the smallest number of bytes that the first checkpoint needs on the disk, or None if it is unknown."""

    @abstractmethod
    def find_weights(self, path: Path) -> Path:
        """Find the weights folder of a checkpoint, given that folder or a folder above it.

        Raises:
            CheckpointError: There is no weights folder.
        """

    @abstractmethod
    def export(self, weights: Path, target: Path, tokenizer_name: str | None = None, dtype: str | None = None) -> None:
        """Write a new or empty folder, which `from_pretrained` and engines can load.

        Args:
            weights: Folder that `find_weights` returns.
            tokenizer_name: Tokenizer for checkpoints without one.
            dtype: Number format of floating-point weights. If None, the checkpoint's format.

        Raises:
            CheckpointError: The target already holds files, or a file of the checkpoint is missing.
        """

    @abstractmethod
    def verify_export(self, weights: Path, target: Path) -> "ExportCheck":
        """Compare the outputs of an exported model with the checkpoint's outputs."""


BACKEND_CLASSES: Registry[TrainingBackend] = Registry("training backend", TrainingBackend, BACKENDS)


def training_backend(policy: PolicyConfig) -> TrainingBackend:
    """Make the backend that a section `policy` selects.

    Raises:
        ConfigError: No backend is enabled, or `training_backend.name` is not the class of a backend.
    """
    own = policy.training_backend
    backend = _make(own.name if own else None, [name for name in BACKENDS if getattr(policy, name).enabled])
    if own is not None:
        check_own_keys(type(backend), "policy.training_backend.kwargs", own.kwargs)
    return backend


def backend_of_checkpoint(path: Path, config_file: Path | None = None) -> TrainingBackend:
    """Make the backend that wrote a checkpoint, from the configuration in the step folder. The default is DTensor.

    Args:
        config_file: File of the configuration, if it is not in the step folder.

    Raises:
        CheckpointError: The file is not a run configuration.
        ConfigError: The backend cannot be imported.
    """
    folder = path.expanduser().absolute()
    places = [config_file] if config_file else [above / "config.yaml" for above in (folder, *folder.parents[:3])]
    found = next((place for place in places if place.exists()), None)
    if found is None:
        return _make(None, list(BACKENDS))
    content = yaml.safe_load(read_text(found))
    policy = content.get("policy") if isinstance(content, dict) else None
    if not isinstance(policy, dict):
        raise CheckpointError(f"{str(found)!r} is not a run configuration: it has no policy.model_name.")
    own = policy.get("training_backend")
    default = next(iter(BACKENDS))
    enabled = [name for name in BACKENDS if (policy.get(name) or {}).get("enabled", name == default)]
    return _make(own["name"] if own else None, enabled)


def _make(own: str | None, enabled: Sequence[str]) -> TrainingBackend:
    """Make the user's backend by its dotted name, or the backend of the first enabled section."""
    if own is None and not enabled:
        keys = " or ".join(f"policy.{name}.enabled=true" for name in BACKENDS)
        raise ConfigError(f"no training backend is enabled: set {keys}.")
    name = own or enabled[0]
    return BACKEND_CLASSES.make(name, "policy.training_backend", {})


def convert_dcp_to_hf(
    dcp_ckpt_path: str | Path,
    hf_ckpt_path: str | Path,
    model_name_or_path: str | None = None,
    tokenizer_name_or_path: str | None = None,
    overwrite: bool = False,
    hf_overrides: Mapping[str, Any] | None = None,
) -> str:
    """Export a checkpoint as a Hugging Face folder, with NeMo RL's arguments.

    Args:
        dcp_ckpt_path: A step folder, or its `policy/weights`.
        model_name_or_path: Has no effect, because a checkpoint names its model.
        tokenizer_name_or_path: Tokenizer for checkpoints without one.
        overwrite: Whether to replace an existing folder at the end. If not, the folder must be new or empty.
        hf_overrides: Values that replace those of the exported `config.json`.

    Returns:
        `hf_ckpt_path`.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or the folder holds files.
    """
    source, target = Path(dcp_ckpt_path), Path(hf_ckpt_path)
    backend = backend_of_checkpoint(source)
    weights = backend.find_weights(source)
    if overwrite and weights.absolute().is_relative_to(target.absolute()):
        raise CheckpointError(f"hf_ckpt_path={str(target)!r} holds the checkpoint itself. Give another folder.")
    made = target.with_name(f"{target.name}.part") if overwrite else target
    backend.export(weights, made, tokenizer_name_or_path)
    if hf_overrides:
        config = made / "config.json"
        content = json.loads(read_text(config)) | dict(hf_overrides)
        config.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if overwrite:
        shutil.rmtree(target, ignore_errors=True)
        made.rename(target)
    return str(hf_ckpt_path)


logger = logging.getLogger(__name__)


class FolderBackend(TrainingBackend):
    """A backend whose checkpoints are folders with one model."""

    section: ClassVar[str]
    """Name of the backend's section in `policy`."""
    kind: ClassVar[str] = ""
    """Text that follows "policy checkpoint" in messages."""
    tensor_folder: ClassVar[str]
    """Subfolder of a weights folder with the tensors."""
    tensor_files: ClassVar[str]
    """Pattern of the files in this subfolder."""

    @abstractmethod
    def described_folder(self, weights: Path) -> Path:
        """Return the folder with the configuration and the tokenizer of a checkpoint."""

    @abstractmethod
    def write_model(self, weights: Path, target: Path, dtype: torch.dtype | None) -> None:
        """Write a checkpoint's model as a folder for `from_pretrained`. If `dtype` is None, dtypes are kept."""

    @abstractmethod
    def read_into(self, model: "PreTrainedModel", weights: Path) -> None:
        """Read the weights of a checkpoint into a model on the CPU.

        Raises:
            CheckpointError: the weights do not fit the model.
        """

    def layout_of(self, policy: PolicyConfig, num_ranks: int, section: str) -> ParallelLayout:
        """Return the parallel layout that a model's section configures.

        Raises:
            ConfigError: The number of ranks does not divide into the axis sizes. The message names the section.
        """
        try:
            return ParallelLayout.of(policy, num_ranks)
        except ConfigError as error:
            raise ConfigError(f"{section}.{self.section}: {error}") from error

    def complete_checkpoint(self, weights: Path, tokenizer: "PreTrainedTokenizerBase", precision: str | None) -> None:
        """Write the tokenizer and, if `precision` is given, a copy of the model into `model/consolidated`."""
        from nemo_rl.models.huggingface.load import torch_dtype

        save_tokenizer(tokenizer, self.described_folder(weights))
        if precision is not None:
            self.write_model(weights, weights / MODEL_FOLDER / CONSOLIDATED_FOLDER, torch_dtype(precision))

    def find_weights(self, path: Path) -> Path:
        """Return the weights folder.

        Args:
            path: A step folder, its `policy` or `policy/weights`, or the folder of the tensors in `policy/weights`.

        Raises:
            CheckpointError: None of these folders holds weights.
        """
        given = path.expanduser()
        for folder in (given, given / "weights", given / "policy" / "weights", given.parent):
            if any((folder / self.tensor_folder).glob(self.tensor_files)) and (
                folder != given.parent or given.name == self.tensor_folder
            ):
                return folder
        raise CheckpointError(
            f"{str(given)!r} is no policy checkpoint{self.kind}: neither it nor its policy/weights has a folder "
            f"{self.tensor_folder} with {self.tensor_files}. Give a step folder, for example results/grpo/step_10, or "
            "its policy/weights."
        )

    def export(self, weights: Path, target: Path, tokenizer_name: str | None = None, dtype: str | None = None) -> None:
        """Export a checkpoint as a Hugging Face folder (`TrainingBackend.export`).

        Raises:
            CheckpointError: the target already holds files, there is no tokenizer, a file of the weights is damaged, or
                the weights do not fit the configuration in their folder.
            ConfigError: the dtype is unknown.
        """
        from nemo_rl.data.tokenizer import load_tokenizer
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
        if tokenizer_name is not None and not has_tokenizer:
            save_tokenizer(load_tokenizer(tokenizer_name), target)
        logger.info("Exported %s to %s.", source, target)

    def verify_export(self, weights: Path, target: Path) -> "ExportCheck":
        """Compare the outputs of export and checkpoint, in float32 on the CPU.

        The checkpoint is read into a model with random weights, and the exported folder is read by `from_pretrained`. A
        message on the console says that the comparison is running.

        Raises:
            CheckpointError: the weights do not fit the model.
        """
        from transformers import AutoModelForSequenceClassification

        from nemo_rl.data.tokenizer import load_tokenizer
        from nemo_rl.models.huggingface.comparison import compare_models, is_classifier
        from nemo_rl.models.huggingface.load import auto_class, read_config

        def check() -> "ExportCheck":
            config = read_config(self.described_folder(weights))
            kind = AutoModelForSequenceClassification if is_classifier(config) else auto_class(config)
            trained = kind.from_config(config, dtype=torch.float32).eval()
            self.read_into(trained, weights)
            trusted = may_run(target)
            exported = kind.from_pretrained(target, dtype=torch.float32, trust_remote_code=trusted).eval()
            return compare_models(trained, exported, load_tokenizer(target))

        with StillWaiting(f"the comparison of {target}", "it is running") as progress:
            return progress.during(check)
